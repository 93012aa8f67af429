"""The page's script in a browser: the keyboard finds nodes, steps through them and leaves again.

Needs Chromium; everything else about pages is proved without one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from helpers.snapshots import chain, decode_step, snapshot

from graphcore.graph import GraphSnapshot

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: none was found")

SCRIPT = """<script>
const said = [];
const root = document.querySelector('[data-gc]');
const input = root.querySelector('input');
const output = root.querySelector('output');
const key = (target, name, more) => target.dispatchEvent(new KeyboardEvent(
  'keydown', Object.assign({key: name, bubbles: true, cancelable: true}, more)));
const search = (text) => { input.value = text; input.dispatchEvent(new Event('input')); };
const count = (selector) => root.querySelectorAll(selector).length;
const on = () => [...root.querySelectorAll('tr.gc-on')].map((row) => row.dataset.row).join();
const say = (...words) => said.push(words.join(' '));
window.onload = () => {
  STEPS;
  const pre = document.createElement('pre');
  pre.id = 'said';
  pre.textContent = said.join('\\n');
  document.body.append(pre);
};
</script>"""


def said(folder: Path, body: str, steps: str) -> list[str]:
    """What the steps said in a page with ``body``."""
    page = folder / "page.html"
    page.write_text(f"<!doctype html><body>{body}{SCRIPT.replace('STEPS', steps)}</body>")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return unescape(found[1]).splitlines()


def mixed() -> GraphSnapshot:
    """401 nodes in 32 groups; three of them are called needle."""
    step = decode_step()
    nodes = list(step.nodes)
    for index in (10, 11, 300):
        label = nodes[index].label
        nodes[index] = chain(index + 1, ["x"] * index + [label], "needle").nodes[index]
    return snapshot(nodes, step.edges)


@needs_browser
def test_the_keyboard_finds_nodes_steps_through_them_and_leaves(tmp_path: Path) -> None:
    steps = """
      key(document.body, '/'); say('focus', document.activeElement === input);
      search('needle'); say(output.textContent, on());
      say('dim', count('.gc-box.gc-dim'), 'open', count('.gc-list>details[open]'));
      key(input, 'Enter'); say(output.textContent, 'at', on());
      key(input, 'ArrowDown'); key(input, 'Enter'); say(output.textContent, 'at', on());
      key(input, 'Enter'); say(output.textContent, 'at', on());
      key(input, 'Enter', {shiftKey: true}); say(output.textContent, 'at', on());
      root.querySelector('[data-step="-1"]').click(); say(output.textContent, 'at', on());
      search('needle layer 22'); say(output.textContent);
      search('nothing like it');
      say(output.textContent, root.querySelector('[data-step="1"]').disabled);
      key(input, 'Escape');
      say('left', document.activeElement === input, count('.gc-dim'), count('details[open]'));
    """
    assert said(tmp_path, mixed()._repr_html_(), steps) == [
        "focus true",
        "3 of 401 nodes ",
        "dim 30 open 2",
        "1 of 3 at 10",
        "3 of 3 at 300",
        "1 of 3 at 10",
        "3 of 3 at 300",
        "2 of 3 at 11",
        "1 of 401 nodes",
        "0 of 401 nodes true",
        "left false 0 0",
    ]


@needs_browser
def test_boxes_are_reached_and_opened_by_the_keyboard(tmp_path: Path) -> None:
    steps = """
      const box = root.querySelectorAll('.gc-box')[2];
      say(box.getAttribute('tabindex'), box.getAttribute('role'), count('.gc-box:not([tabindex])'));
      key(box, 'Enter'); say(box.classList.contains('gc-on'), count('.gc-list>details[open]'));
      key(box, ' '); say(box.classList.contains('gc-on'), count('.gc-list>details[open]'));
      root.querySelector('a[data-to="4"]').click(); say(on());
      say(root.querySelectorAll('.gc-box>title').length);
    """
    assert said(tmp_path, mixed()._repr_html_(), steps) == [
        "0 button 0",
        "true 1",
        "false 0",
        "4",
        "32",
    ]


@needs_browser
def test_nodes_get_their_tooltip_from_their_row(tmp_path: Path) -> None:
    steps = """
      say(root.querySelector('.gc-box>title').textContent.replace('\\n', ' | '));
      root.querySelector('[data-zoom="in"]').click();
      say(Math.round(root.querySelector('svg').getAttribute('width')));
      root.querySelector('[data-zoom="out"]').click();
      say(Math.round(root.querySelector('svg').getAttribute('width')));
    """
    assert said(tmp_path, chain(2)._repr_html_(), steps) == [
        "work | grid 1, block 32",
        "225",
        "180",
    ]


@needs_browser
def test_a_picture_wider_than_its_view_begins_at_its_first_node(tmp_path: Path) -> None:
    steps = """
      const view = root.querySelector('.gc-view');
      const seen = view.getBoundingClientRect();
      const first = root.querySelector('.gc-box').getBoundingClientRect();
      say(view.scrollWidth > view.clientWidth, first.left >= seen.left, first.right <= seen.right);
    """
    fan = snapshot(chain(9).nodes, [(0, index) for index in range(1, 9)])
    for graph in (chain(190), fan):
        assert said(tmp_path, graph._repr_html_(), steps) == ["true true true"]


@needs_browser
def test_of_several_graphs_the_one_pointed_at_is_searched(tmp_path: Path) -> None:
    steps = """
      const second = document.querySelectorAll('[data-gc]')[1];
      key(document.body, '/'); say(root.contains(document.activeElement));
      document.activeElement.blur();
      second.dispatchEvent(new Event('pointerenter'));
      key(document.body, '/'); say(second.contains(document.activeElement));
    """
    body = chain(2)._repr_html_() + chain(3)._repr_html_()
    assert said(tmp_path, body, steps) == ["true", "true"]
