"""The picture of a comparison: each node once, changes told by sign and colour, verdict on top."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.contract import Bench
from helpers.kernels import add_one, scale
from helpers.repository import ROOT
from helpers.snapshots import (
    HOSTILE,
    chain,
    decode_step,
    kernel_node,
    node,
    snapshot,
)

from graphcore.drawing import Drawing
from graphcore.drawing.folding import fold
from graphcore.driver.records import ChildParams, GraphHandle, LaunchConfig
from graphcore.errors import ConfigurationError
from graphcore.graph import GraphSnapshot, diff, read


def named(names: str, edges: Sequence[tuple[int, int]], **shapes: int) -> GraphSnapshot:
    """Kernels by name; ``shapes`` gives a kernel another grid."""
    return snapshot(
        [
            kernel_node(index, name, config=LaunchConfig((shapes.get(name, 1), 1, 1), (32, 1, 1)))
            for index, name in enumerate(names.split())
        ],
        edges,
    )


BEFORE = named("load norm rope attention out", [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)])
AFTER = named(
    "load norm attention quantize clamp out",
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 5)],
    norm=2,
)


def changed(graph: GraphSnapshot, *indices: int, **config: Any) -> GraphSnapshot:
    """The same graph with another launch shape of some nodes."""
    nodes = list(graph.nodes)
    for index in indices:
        params: Any = nodes[index].params
        nodes[index] = replace(
            nodes[index], params=replace(params, config=replace(params.config, **config))
        )
    return replace(graph, nodes=tuple(nodes))


def told(drawing: Drawing) -> list[tuple[str, str, str]]:
    return [(box.label, box.change, box.number) for box in drawing.boxes]


def test_every_node_of_both_graphs_is_drawn_once_with_what_became_of_it() -> None:
    assert told(diff(BEFORE, AFTER).drawing()) == [
        ("load", "", "0"),
        ("norm", "changed", "1"),
        ("rope", "removed", "2"),
        ("attention", "", "3->2"),
        ("quantize", "added", "3"),
        ("clamp", "added", "4"),
        ("out", "", "4->5"),
    ]


def test_edges_of_both_graphs_are_drawn_once_with_what_became_of_them() -> None:
    drawing = diff(BEFORE, AFTER).drawing()
    links = {
        (drawing.boxes[link.source].label, drawing.boxes[link.target].label): link.change
        for link in drawing.links
    }
    assert len(links) == len(drawing.links)
    assert links == {
        ("load", "norm"): "",
        ("norm", "rope"): "removed",
        ("rope", "attention"): "removed",
        ("norm", "attention"): "added",
        ("attention", "quantize"): "added",
        ("quantize", "clamp"): "added",
        ("clamp", "out"): "added",
        ("norm", "out"): "added",
        ("attention", "out"): "removed",
        ("load", "out"): "removed",
    }


def test_an_edge_whose_data_changed_is_marked() -> None:
    plain = chain(2)
    found = diff(plain, replace(plain, edge_data=((1, 0, 1),)))
    assert [(link.kind, link.change) for link in found.drawing().links] == [
        ("programmatic", "changed")
    ]


def test_removed_nodes_stand_where_they_were_at_the_ends_too() -> None:
    found = diff(named("a b c d", []), named("b c", []))
    assert told(found.drawing()) == [
        ("a", "removed", "0"),
        ("b", "", "1->0"),
        ("c", "", "2->1"),
        ("d", "removed", "3"),
    ]


def test_changed_fields_are_listed_before_and_after() -> None:
    found = diff(BEFORE, changed(BEFORE, 1, grid=(8, 2, 1), shared_bytes=512))
    box = found.drawing().boxes[1]
    assert box.notes == ("grid: 1 -> 8x2", "shared_bytes: 0 -> 512")
    assert box.lines == ()
    assert ">grid: 1 -&gt; 8x2 (+1 more)</text>" in found.to_svg()


@pytest.mark.parametrize(
    ("after", "said", "tone"),
    [
        (BEFORE, "update in place: possible, nothing to change", "good"),
        (changed(BEFORE, 1, grid=(2, 1, 1)), "possible, carries every change", "good"),
        (
            AFTER,
            r"would be refused \(topology_changed\): node 2 \(kernel attention\): nodes: ",
            "bad",
        ),
        (
            changed(BEFORE, 3, cluster=(2, 1, 1)),
            r"accepted and not applied: node 3 \(kernel attention\): cluster changed from ",
            "bad",
        ),
        (
            changed(BEFORE, 3, cooperative=True),
            r"would be refused \(attributes_changed\): node 3 \(kernel attention\): cooperative "
            r"changed from False to True: an update keeps whether a kernel is cooperative",
            "bad",
        ),
    ],
    ids=["same", "carried", "topology", "trap", "attribute"],
)
def test_the_verdict_on_an_update_stands_on_top_of_every_form(
    after: GraphSnapshot, said: str, tone: str
) -> None:
    found = diff(BEFORE, after)
    (notice,) = found.drawing().notices
    assert re.search(said, notice.text)
    assert notice.tone == tone
    page = found.to_html_page()
    assert f"gc-tone-{tone}" in page
    assert page.index("update in place") < page.index("<svg")
    assert found.to_text().startswith("update in place")
    assert found.to_mermaid().startswith("%% update in place")
    assert 'graph [label="update in place' in found.to_dot()
    assert found.to_svg().index("update in place") < found.to_svg().index("data-box")


def test_colour_is_never_the_only_cue() -> None:
    found = diff(BEFORE, AFTER)
    root = ElementTree.fromstring(found.to_svg())
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        name = group.get("class", "")
        change = next((one for one in ("added", "removed", "changed") if f"gc-{one}" in name), "")
        if change:
            sign = {"added": "+", "removed": "-", "changed": "~"}[change]
            assert sign in [text.text for text in group.iter() if text.tag.endswith("}text")]
    page = found.to_html_page()
    for sign, change in (("+", "added"), ("-", "removed"), ("~", "changed")):
        assert f'<b class="gc-sign gc-{change}" title="{change}">{sign}</b>' in page
    assert "stroke-dasharray" in page  # removed boxes and links are dashed as well


def test_a_page_lists_all_that_changed_with_a_way_to_its_row() -> None:
    page = diff(BEFORE, AFTER).to_html_page("Two captures")
    listed = page[page.index("What changed") : page.index("<b>Nodes</b>")]
    assert re.findall(r'data-to="(\d+)">([^<]+)<', listed)[:4] == [
        ("1", "1"),
        ("2", "2"),
        ("4", "3"),
        ("5", "4"),
    ]
    assert "grid: 1 -&gt; 2" in listed
    assert "4 nodes, 4 edges" in listed
    assert "<title>Two captures</title>" in page


def test_a_long_list_of_changes_is_cut_and_counted() -> None:
    step = decode_step()
    page = diff(step, changed(step, *range(250), grid=(2, 1, 1))).to_html_page()
    assert page.count("grid: 1 -&gt; 2</b></td></tr>") == 200
    assert "and 50 more, in the tables below" in page


def test_what_did_not_change_is_folded_around_a_change() -> None:
    step = decode_step()
    found = diff(step, changed(step, 100, grid=(64, 1, 1)))
    folding = fold(found.drawing())
    assert [len(entry) for entry in folding.members] == [99, 1, 1, 1, 299]
    assert [box.change for box in folding.drawing.boxes] == ["", "", "changed", "", ""]
    first = folding.drawing.boxes[0]
    assert (first.label, first.detail) == ("unchanged", "embed to layer 7/attention")


def test_small_comparisons_are_shown_whole() -> None:
    found = diff(chain(24), chain(24))
    assert len(fold(found.drawing()).members) == 24
    assert len(fold(diff(chain(25), chain(25)).drawing()).members) == 1


def test_where_too_much_changed_groups_say_how_much_of_them_did() -> None:
    step = decode_step()
    found = diff(step, changed(step, *range(6, 400, 3), grid=(64, 1, 1)))
    folding = fold(found.drawing())
    assert len(folding.members) == 32
    embed, layer = folding.drawing.boxes[:2]
    assert (embed.changes, layer.changes) == ((), (("changed", 5),))
    svg = found.to_svg()
    assert ">~5</text>" in svg
    assert svg.count('class="gc-box gc-changed"') == 31


def test_a_group_that_is_all_new_counts_as_added() -> None:
    labels = [f"layer {index // 13}" for index in range(390)]
    found = diff(chain(377, labels), chain(390, labels))
    boxes = fold(found.drawing()).drawing.boxes
    assert [(box.label, box.changes) for box in boxes if box.changes] == []
    assert sum(box.change == "added" for box in boxes) == 13
    many = diff(chain(13, labels), chain(390, labels))
    last = fold(many.drawing()).drawing.boxes[-1]
    assert (last.label, last.changes) == ("layer 29", (("added", 13),))
    assert 'class="gc-box gc-added"' in many.to_svg()


def test_graphs_inside_nodes_are_compared_inside_their_box() -> None:
    def around(inner: GraphSnapshot) -> GraphSnapshot:
        return snapshot([node(0, ChildParams(GraphHandle(1)), child=inner)])

    found = diff(around(chain(2)), around(changed(chain(2), 1, grid=(2, 1, 1))))
    (box,) = found.drawing().boxes
    assert box.change == "changed"
    ((heading, inner),) = box.inner
    assert heading == "child graph"
    assert [one.change for one in inner.boxes] == ["", "changed"]
    assert inner.boxes[1].notes == ("grid: 1 -> 2",)


def test_the_text_lists_changes_below_their_node() -> None:
    assert diff(BEFORE, AFTER).to_text().splitlines()[1:] == [
        "keeps the number of nodes (5, not 6)",
        "7 nodes, 10 edges (7 kernels)",
        "+2 added, -1 removed, ~1 changed",
        "   #     kind    name       work              after",
        "   0     kernel  load       grid 1, block 32",
        "~  1     kernel  norm       grid 2, block 32  0",
        "       grid: 1 -> 2",
        "-  2     kernel  rope       grid 1, block 32  -1",
        "   3->2  kernel  attention  grid 1, block 32  +1 -2",
        "+  3     kernel  quantize   grid 1, block 32  +2",
        "+  4     kernel  clamp      grid 1, block 32  +3",
        "   4->5  kernel  out        grid 1, block 32  +4 +1 -2 -0",
    ]


@pytest.mark.parametrize("width", [12, 40, 80])
def test_no_line_of_the_text_is_wider_than_asked(width: int) -> None:
    lines = diff(BEFORE, AFTER).to_text(width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_dot_and_mermaid_mark_changes_by_sign_and_colour() -> None:
    found = diff(BEFORE, AFTER)
    dot, mermaid = found.to_dot(), found.to_mermaid()
    assert '"- rope\\nkernel, grid 1, block 32"' in dot
    assert '"~ norm\\nkernel, grid 2, block 32\\ngrid: 1 -> 2"' in dot
    assert 'n1 -> n2 [style="dashed", color="#c2242e", fontcolor="#c2242e", label="-"];' in dot
    assert '  n4["+ quantize<br/>grid 1, block 32"]' in mermaid
    assert "class n4,n5 added" in mermaid
    assert "classDef removed fill:" in mermaid
    assert len(re.findall("^  linkStyle ", mermaid, re.MULTILINE)) == 2


def test_hostile_names_stay_text_in_every_form_of_a_comparison() -> None:
    found = diff(snapshot([kernel_node(0, "a")]), snapshot([kernel_node(0, HOSTILE)]))
    page = found.to_html_page(HOSTILE)
    assert "<script>alert" not in page
    assert "<img" not in page
    ElementTree.fromstring(found.to_svg())
    assert "\x1b" not in found.to_text() + found.to_dot() + found.to_mermaid()


def test_notes_stand_beside_the_changes_and_bad_ones_are_refused() -> None:
    found = diff(BEFORE, changed(BEFORE, 1, grid=(2, 1, 1)))
    drawing = found.drawing({1: ["arg 0 = keys"], 2: ["arg 0 = values"]})
    assert drawing.boxes[1].notes == ("grid: 1 -> 2", "arg 0 = keys")
    assert drawing.boxes[2].notes == ("arg 0 = values",)
    with pytest.raises(ConfigurationError, match="notes: expected a mapping"):
        found.drawing(["line"])  # type: ignore[arg-type]


def test_a_comparison_draws_itself_in_a_notebook() -> None:
    found = diff(BEFORE, AFTER)
    assert found._repr_html_() == found.drawing().to_html()
    assert found._repr_html_() == diff(BEFORE, AFTER)._repr_html_()


def test_the_picture_in_the_documents_is_the_one_that_is_drawn() -> None:
    drawn = (ROOT / "docs/images/compared-graphs.svg").read_text(encoding="utf-8")
    assert drawn == diff(BEFORE, AFTER).to_svg()


def test_graphs_read_from_a_driver_are_compared(bench: Bench) -> None:
    before, after = bench.new_graph(), bench.new_graph()
    x = bench.alloc(64)
    bench.add(before, bench.kernel_params(add_one, x, 16))
    first = bench.add(after, bench.kernel_params(add_one, x, 8))
    bench.add(after, bench.kernel_params(scale, x, 2.0, 16), [first])
    found = diff(read(bench.driver, before), read(bench.driver, after))
    drawing = found.drawing()
    assert [box.change for box in drawing.boxes] == ["changed", "added"]
    assert drawing.boxes[0].notes == ("argument 1: 16 -> 8",)
    assert found.refusal is not None
