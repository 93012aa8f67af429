"""SVG and HTML: well formed, self-contained, escaped, small, and the same every time."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.snapshots import (
    HOSTILE,
    VECTORIZED,
    chain,
    decode_step,
    drawing,
    kernel_node,
    node,
    snapshot,
)

from graphcore.drawing import Box, Drawing, Link
from graphcore.drawing.theme import KINDS, kind_class
from graphcore.driver.records import ChildParams, GraphHandle
from graphcore.errors import ConfigurationError

NAMESPACE = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "input", "br", "img", "link", "path", "rect", "!doctype"}


class Checked(HTMLParser):
    """Parses a page; remembers what would load something or run, and whether tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0
        self.outside: list[str] = []
        self.rows: list[dict[str, str | None]] = []
        self.boxes: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.scripts += tag == "script"
        for name, value in attrs:
            assert not name.startswith("on"), (tag, attrs)
            if name in ("src", "href", "data", "srcset", "xlink:href") and value != "#":
                self.outside.append(f"{tag} {name}={value}")
        if "data-row" in values:
            self.rows.append(values)
        if "data-box" in values and tag == "g":
            self.boxes.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def hostile(count: int = 3) -> Drawing:
    inside = ("inside " + HOSTILE, drawing(2))
    line = (HOSTILE,)
    box = Box(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, line, line, (inside,))
    return Drawing((box,) * count, tuple(Link(*pair) for pair in pairwise(range(count))))


def test_a_picture_is_well_formed_and_shows_every_box_and_link() -> None:
    picture = chain(10).drawing()
    root = ElementTree.fromstring(picture.to_svg())
    assert root.tag == f"{NAMESPACE}svg"
    boxes = [item for item in root.iter() if item.get("data-box") is not None]
    assert [box.get("data-box") for box in boxes] == [str(index) for index in range(10)]
    links = [item.get("data-link") for item in root.iter() if item.get("data-link")]
    assert links == [f"{a} {b}" for a, b in pairwise(range(10))]
    assert "prefers-color-scheme:dark" in picture.to_svg()
    assert "var(" not in picture.to_svg()


def test_programmatic_links_are_dashed() -> None:
    plain, dashed = drawing(2, [(0, 1)]), Drawing(drawing(2).boxes, (Link(0, 1, "programmatic"),))
    assert 'class="gc-link gc-dashed"' not in plain.to_svg()
    assert 'class="gc-link gc-dashed"' in dashed.to_svg()


@pytest.mark.parametrize("count", [3, 250], ids=["unfolded", "folded"])
def test_hostile_names_are_only_text(count: int) -> None:
    picture = hostile(count)
    for text in (
        picture.to_svg(),
        picture.to_html(),
        picture.to_html_page(HOSTILE, [(HOSTILE, {HOSTILE: HOSTILE}), (HOSTILE, HOSTILE)]),
    ):
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "\x1b" not in text
        assert "\x00" not in text
        assert "&lt;script&gt;" in text
        text.encode()
    ElementTree.fromstring(picture.to_svg())
    assert Checked(picture.to_html()).scripts == 1


@pytest.mark.parametrize(
    "picture",
    [
        Drawing(()),
        drawing(1),
        chain(10).drawing(),
        decode_step().drawing(),
        snapshot([node(0, ChildParams(GraphHandle(1)), child=chain(4))]).drawing(),
    ],
    ids=["empty", "one", "chain", "folded", "child graph"],
)
def test_a_page_is_well_formed_and_loads_nothing(picture: Drawing) -> None:
    text = picture.to_html_page("a page", [("Numbers", {"nodes": 3}), ("Words", "one\ntwo")])
    page = Checked(text)
    assert page.open == []
    assert page.outside == []
    assert "http://www.w3.org/2000/svg" in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    assert [row["data-row"] for row in page.rows] == [str(i) for i in range(len(picture.boxes))]
    assert "<dt>nodes</dt><dd>3</dd>" in text
    assert "<pre>one\ntwo</pre>" in text


def test_every_row_belongs_to_a_box_of_the_picture() -> None:
    page = Checked(decode_step().drawing().to_html())
    boxes = {box["data-box"] for box in page.boxes}
    assert len(boxes) == 32
    assert {row["data-box"] for row in page.rows} == boxes
    assert len(page.rows) == 401
    assert all(box["tabindex"] == "0" and box["role"] == "button" for box in page.boxes)


def test_a_page_of_a_thousand_nodes_stays_under_a_megabyte() -> None:
    arguments = [(0x7F0000000000 + 256 * index).to_bytes(8, "little") for index in range(10)]
    nodes = [
        kernel_node(index, VECTORIZED, arguments=arguments, label=f"layer {index // 30}")
        for index in range(1000)
    ]
    graph = snapshot(nodes, pairwise(range(1000)))
    text = graph.drawing().to_html_page("large")
    assert len(text.encode()) < 1_000_000
    assert text.count("at::native::vectorized_elementwise_kernel") == 1
    assert len(graph.to_svg()) < 60_000


def test_the_bar_of_a_folded_box_has_a_piece_per_label_and_one_for_the_rarest() -> None:
    boxes = tuple(Box(f"k{index % 10}", "kernel", group="a") for index in range(300))
    root = ElementTree.fromstring(Drawing(boxes).to_svg())
    bar = [item for item in root.iter() if item.get("class") == "gc-fill k-kernel"]
    assert len(bar) == 7
    widths = [float(item.get("width", "0")) for item in bar]
    assert widths[0] < widths[-1] < sum(widths[:-1])


def test_links_of_a_fork_are_curves_and_those_of_a_chain_are_straight() -> None:
    assert "C" not in "".join(re.findall(r' d="([^"]*)"', drawing(3, [(0, 1), (1, 2)]).to_svg()))
    fork = drawing(3, [(0, 1), (0, 2)]).to_svg()
    assert len(re.findall(r'class="gc-link" d="M[^"]*C', fork)) == 2


def test_a_node_that_is_not_a_kernel_says_its_kind_on_the_second_line() -> None:
    boxes = (Box("while", "conditional", "2 nodes"), Box("copy", "memcpy"), Box("host", "host"))
    lines = re.findall(r'gc-detail gc-muted"[^>]*>([^<]*)<', Drawing(boxes).to_svg())
    assert lines == ["conditional · 2 nodes", "memcpy", ""]


def test_notes_come_before_the_arguments_and_stronger() -> None:
    text = Drawing((Box("k", "kernel", lines=("arg 0 = 0x7",), notes=("arg 0 = keys",)),)).to_html()
    assert "<b>arg 0 = keys</b><span>arg 0 = 0x7</span>" in text


def test_long_argument_lists_are_cut_and_counted() -> None:
    box = Box("k", "kernel", lines=tuple(f"arg {index} = 0" for index in range(100)))
    text = Drawing((box,)).to_html()
    assert "<span>arg 23 = 0</span><span>and 76 more</span>" in text


def test_the_same_drawing_gives_the_same_bytes_in_any_process() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from helpers.snapshots import decode_step, chain\n"
        "import hashlib\n"
        "d = decode_step().drawing()\n"
        "t = d.to_svg() + d.to_html_page('t') + d.to_dot() + d.to_mermaid() + d.to_text()\n"
        "print(hashlib.sha256(t.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_notebook_themes_and_the_system_decide_between_light_and_dark() -> None:
    text = drawing(1).to_html()
    for selector in ("prefers-color-scheme:dark", '[data-jp-theme-light="false"]', ".vscode-dark"):
        assert selector in text


def test_the_search_box_is_there_and_the_script_gives_it_a_key() -> None:
    text = drawing(3).to_html()
    assert '<input type="search"' in text
    assert "event.key !== '/'" in text


def test_kinds_have_colours_and_unknown_ones_share_one() -> None:
    assert kind_class("event wait") == "k-event-wait"
    assert kind_class('"><script>') == "k-other"
    assert all(len(pair) == 2 for pair in KINDS.values())


def test_the_graph_inside_a_node_is_drawn_inside_its_row() -> None:
    graph = snapshot([node(0, ChildParams(GraphHandle(1)), child=chain(4))])
    text = graph._repr_html_()
    page = Checked(text)
    assert text.count("<svg") == 2
    assert len(page.rows) == 1
    assert text.count("<tr data-inner=") == 4
    assert "child graph" in text


def test_labels_longer_than_a_box_are_cut_and_kept_whole_in_the_title() -> None:
    long = "x" * 300
    text = Drawing((Box(long, "kernel", title=long),)).to_svg()
    assert f"<title>{long}</title>" in text
    assert "…" in text
    assert text.count(long) == 1


def test_a_drawing_shows_itself_in_a_notebook() -> None:
    assert drawing(2)._repr_html_() == drawing(2).to_html()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "title: expected text, got 3"),
        (("t", "text"), "sections: expected a list of .*, got str"),
        (("t", {"heading": "text"}), "sections: expected a list of .*, got dict"),
        (("t", ["ab"]), r"sections\[0\]: expected \(heading, .*got 'ab'"),
        (("t", [("a", "text"), ("b", 3)]), r"sections\[1\]: expected .*got \('b', 3\)"),
        (("t", [("a", "b", "c")]), r"sections\[0\]: expected .*got \('a', 'b', 'c'\)"),
    ],
    ids=["title", "text", "mapping", "two letters", "number", "three parts"],
)
def test_titles_and_sections_of_another_form_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Drawing((Box("a", "kernel"),)).to_html_page(*arguments)


@pytest.mark.parametrize("width", [0, -3, 2.5, True, "wide"], ids=repr)
def test_a_width_without_a_column_is_refused(width: Any) -> None:
    with pytest.raises(ConfigurationError, match="width: expected 1 column or more"):
        Drawing((Box("a", "kernel"),)).to_text(width=width)
