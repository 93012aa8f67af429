"""DOT, Mermaid and terminal text: complete, escaped, and in bounds."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from helpers.snapshots import HOSTILE, chain, decode_step, drawing, node, snapshot

from graphcore.drawing import Box, Drawing, Link
from graphcore.drawing.text import columns_of, cut
from graphcore.driver.records import ChildParams, GraphHandle


def test_dot_has_every_node_edge_and_group() -> None:
    boxes = tuple(
        Box(f"k{index}", "kernel", "grid 1", group)
        for index, group in enumerate(["", "layer 0", "layer 0/mlp", "layer 1"])
    )
    text = Drawing(boxes, (Link(0, 1), Link(1, 2, "programmatic"), Link(2, 3))).to_dot()
    assert text.startswith("digraph")
    assert [line.strip() for line in text.splitlines() if "->" in line] == [
        "n0 -> n1;",
        'n1 -> n2 [style="dashed"];',
        "n2 -> n3;",
    ]
    assert text.count("subgraph") == 3
    assert text.count("{") == text.count("}")
    assert 'label="k0\\nkernel, grid 1"' in text


def test_dot_draws_inner_graphs_as_clusters() -> None:
    graph = snapshot([node(0, ChildParams(GraphHandle(1)), child=chain(3))])
    text = graph.to_dot()
    assert "n0 -> n0_0_0 [style=dotted, arrowhead=none];" in text
    assert "n0_0_1 -> n0_0_2;" in text
    assert 'label="child graph of child"; style=dashed;' in text


def test_dot_quotes_hostile_names() -> None:
    text = Drawing((Box('a"];evil[label="\\', "kernel", group=HOSTILE, title=HOSTILE),)).to_dot()
    quoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert "evil" not in quoted
    assert "script" not in quoted
    assert "\x1b" not in text


def test_mermaid_has_every_node_and_edge() -> None:
    text = drawing(3, [(0, 1), (1, 2)]).to_mermaid()
    assert text.splitlines() == [
        "flowchart TD",
        '  n0["box 0"]',
        '  n1["box 1"]',
        '  n2["box 2"]',
        "  n0 --> n1",
        "  n1 --> n2",
    ]


def test_mermaid_groups_folds_and_marks() -> None:
    grouped = drawing(2, [(0, 1)], group="layer 0", detail="grid 1").to_mermaid()
    assert '  subgraph g0["layer 0"]' in grouped
    assert '    n1["box 1<br/>grid 1"]' in grouped
    assert "  end" in grouped
    folded = decode_step().to_mermaid()
    assert folded.count("-->") == 31
    assert '  n1[["layer 0<br/>13 kernels"]]' in folded
    dashed = Drawing(drawing(2).boxes, (Link(0, 1, "programmatic"),)).to_mermaid()
    assert "n0 -.-> n1" in dashed


def test_mermaid_escapes_hostile_names() -> None:
    text = Drawing((Box(HOSTILE, "kernel", HOSTILE, HOSTILE),)).to_mermaid()
    labels = re.findall(r'"([^"]*)"', text)
    assert len(labels) == 2
    assert not any(set(label.replace("<br/>", "")) & set("<>&'\x1b\x00") for label in labels)


def test_text_is_a_table_of_all_nodes() -> None:
    lines = chain(3).to_text().splitlines()
    assert lines[0] == "3 nodes, 2 edges (3 kernels)"
    assert lines[1].split() == ["#", "kind", "name", "work", "after"]
    assert lines[2].split() == ["0", "kernel", "work", "grid", "1,", "block", "32"]
    assert lines[3].split()[-1] == "0"


def test_text_is_folded_past_200_nodes_unless_asked_for_in_full() -> None:
    step = decode_step()
    folded = step.to_text().splitlines()
    assert len(folded) == 34
    assert folded[3].split() == ["6-18", "layer", "0", "13", "kernels"]
    assert len(step.to_text(full=True).splitlines()) == 403


@pytest.mark.parametrize("width", [30, 60, 100])
def test_text_is_no_wider_than_the_terminal(width: int) -> None:
    for graph in (chain(5, name="a_rather_long_kernel_name" * 9), decode_step()):
        for full in (False, True):
            assert max(map(len, graph.to_text(width=width, full=full).splitlines())) <= width


def test_text_says_how_many_nodes_a_scattered_group_has() -> None:
    boxes = tuple(Box("k", "kernel", group=("left", "right")[index % 2]) for index in range(300))
    links = tuple(Link(index, index + 2) for index in range(298))
    assert "0-298 (150)  left" in Drawing(boxes, links).to_text()
    lone = Drawing((*boxes, Box("end", "kernel", group="end")), links).to_text()
    assert lone.splitlines()[-1].split() == ["300", "end", "1", "kernel"]


def test_text_obeys_no_control_characters() -> None:
    text = Drawing((Box(HOSTILE, "kernel"),)).to_text()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


def test_empty_drawings_have_texts_too() -> None:
    empty = Drawing(())
    assert empty.to_text() == "0 nodes, 0 edges"
    assert empty.to_mermaid() == "flowchart TD\n"
    assert empty.to_dot().endswith("}\n")
    one = Drawing((Box("a", "kernel"),))
    assert one.to_text().splitlines()[0] == "1 node, 0 edges (1 kernel)"
    assert drawing(2, pairwise(range(2))).to_text().startswith("2 nodes, 1 edge ")


@pytest.mark.parametrize(
    "name", ["注意力层", "e\u0301te\u0301", "\uff46\uff55\uff4c\uff4c", "plain"]
)
def test_columns_line_up_under_wide_and_combining_characters(name: str) -> None:
    boxes = (Box(name, "kernel", "grid 1"), Box("x" * 12, "kernel", "grid 22"))
    lines = Drawing(boxes).to_text().splitlines()
    starts = [columns_of(line[: line.index("grid")]) for line in lines[2:]]
    assert starts[0] == starts[1]


def test_wide_names_are_cut_by_the_columns_they_take() -> None:
    assert columns_of("注意力") == 6
    assert cut("注意力层", 8) == "注意力层"
    assert cut("注意力层", 7) == "注意力…"
    assert cut("注意力层", 6) == "注意…"
    text = Drawing((Box("注意力" * 40, "kernel", "grid 1"),)).to_text(width=50)
    assert max(map(columns_of, text.splitlines())) <= 50


def _holding(inside: int) -> Drawing:
    bodies = tuple(
        (f"body {number}", Drawing(tuple(Box(f"{word} {i}", "kernel") for i in range(inside))))
        for number, word in enumerate(("then", "otherwise"))
    )
    return Drawing((Box("fill", "memset"), Box("choose", "conditional", inner=bodies)))


def test_what_lies_inside_a_box_stands_below_it_in_the_table() -> None:
    rows = [" ".join(line.split()) for line in _holding(1).to_text().splitlines()]
    assert rows[2:] == [
        "0 memset fill",
        "1 conditional choose",
        "1 body 0",
        "1/0 kernel then 0",
        "1 body 1",
        "1/0 kernel otherwise 0",
    ]


def test_a_table_that_would_grow_too_long_leaves_out_what_lies_inside_unless_full() -> None:
    assert "otherwise" not in _holding(100).to_text()
    assert "otherwise 99" in _holding(100).to_text(full=True)
