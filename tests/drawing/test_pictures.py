"""SVG and HTML: well formed, self-contained, escaped, small, and the same every time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.repository import ROOT
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

from graphcore.drawing import RACE, Box, Drawing, Link, Notice
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


def test_the_picture_of_the_readme_has_the_styles_of_today() -> None:
    shown = (ROOT / "docs/images/captured-graph.svg").read_text(encoding="utf-8")
    style = re.compile("<style>.*?</style>", re.DOTALL)
    assert style.findall(shown) == style.findall(decode_step().to_svg())


def test_notebook_themes_and_the_system_decide_between_light_and_dark() -> None:
    text = drawing(1).to_html()
    for selector in ("prefers-color-scheme:dark", '[data-jp-theme-light="false"]', ".vscode-dark"):
        assert selector in text


def test_the_search_box_and_the_buttons_say_what_they_are() -> None:
    text = drawing(3).to_html()
    assert '<input type="search"' in text
    assert 'aria-keyshortcuts="/"' in text
    assert '<output aria-live="polite">' in text
    named = re.findall(r'<button type="button" data-[a-z]+="[^"]*" aria-label="([^"]+)"', text)
    assert named == [
        "Previous match", "Next match", "Smaller", "Larger", "Whole picture, or its own size",
    ]  # fmt: skip
    assert text.count("<button") == len(named)


def test_notebooks_own_rules_for_tables_lists_and_links_do_not_win() -> None:
    css = (files("graphcore.drawing") / "assets" / "page.css").read_text()
    plain = re.sub(r"/\*.*?\*/|@media[^{]*\{|@supports[^{]*\{", "", css)
    selectors = [one for line in plain.splitlines() for one in line.split("{")[0].split(",")]
    weak = {one for one in selectors if one and not one.startswith((".gc.gc.gc ", "}"))}
    assert weak == {".gc", ".gc *", ".gc *::before", ".gc-page", ".gc-page .gc"}


def test_a_picture_alone_has_tooltips_and_in_a_page_the_table_has_the_names() -> None:
    picture = Drawing((Box("short", "kernel", title="the/long::name<int>()"),))
    assert "<title>the/long::name&lt;int&gt;()</title>" in picture.to_svg()
    assert 'role="img"' in picture.to_svg()
    page = picture.to_html_page("a page")
    assert page.count("the/long::name") == 1


def test_races_are_marked_by_a_sign_and_are_no_edges() -> None:
    boxes = (Box("a", "kernel"), Box("b", "kernel"))
    plain = Drawing(boxes, (Link(0, 1),))
    racing = Drawing(boxes, (Link(0, 1, RACE),))
    svg = racing.to_svg()
    assert '<g data-link="0 1" class="gc-race">' in svg
    assert ">!</text>" in svg
    assert "gc-race" not in plain.to_svg().partition("</style>")[2]
    assert racing.to_text().splitlines()[0] == "2 nodes, 0 edges (2 kernels)"
    page = racing.to_html()
    assert '<b class="gc-sign gc-race">!</b>1 race</li>' in page
    assert "data-to=" not in page.partition("</style>")[2].partition("<script>")[0]
    assert "data-to=" in plain.to_html().partition("</style>")[2].partition("<script>")[0]


def test_notices_stand_above_the_picture_with_their_tone() -> None:
    told = Drawing(
        (Box("a", "kernel"),), notices=(Notice("all is well", "good"), Notice("it is not", "bad"))
    )
    page = told.to_html()
    assert '<p class="gc-notice gc-panel gc-tone-good">all is well</p>' in page
    assert page.index("it is not") < page.index("<svg")
    svg = ElementTree.fromstring(told.to_svg())
    assert float(svg.get("width", "0")) >= 420
    assert svg.get("viewBox", "").split()[1].startswith("-")
    assert told.to_text().splitlines()[:2] == ["all is well", "it is not"]


def test_a_long_notice_is_wrapped_in_a_picture_of_its_own() -> None:
    told = Drawing((Box("a", "kernel"),), notices=(Notice("word " * 60, "bad"),))
    assert told.to_svg().count('class="gc-note gc-tone-bad"') > 3


def test_all_of_a_thousand_boxes_can_be_drawn() -> None:
    graph = snapshot(
        [kernel_node(index, VECTORIZED, label=f"layer {index // 40}") for index in range(1000)],
        pairwise(range(1000)),
    )
    text = graph.drawing().to_html_page("large", full=True)
    assert text.count('<g class="gc-box"') == 1000
    assert len(text.encode()) < 1_000_000
    assert graph.drawing().to_svg(full=True).count('<g class="gc-box"') == 1000
    assert graph.to_svg().count('<g class="gc-box"') == 25


def forest(count: int, strands: int) -> Drawing:
    """Strands that run side by side, with links between them now and then."""
    boxes = tuple(
        Box("work", "kernel", group=f"layer {index // 40}/part {index % 2}")
        for index in range(count)
    )
    links = [Link(index - strands, index) for index in range(strands, count)]
    links += [Link(index - 37, index) for index in range(40, count, 10)]
    return Drawing(boxes, tuple(dict.fromkeys(links)))


@pytest.mark.parametrize(
    ("count", "full", "seconds"),
    [(1000, True, 1.0), (1000, False, 1.0), (10_000, False, 3.0)],
    ids=["a thousand whole", "a thousand folded", "ten thousand folded"],
)
def test_large_graphs_are_drawn_quickly(count: int, full: bool, seconds: float) -> None:
    picture = forest(count, 4)
    start = time.process_time()
    text = picture.to_html_page("large", full=full)
    assert time.process_time() - start < seconds
    assert text.count("data-row=") == count


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
