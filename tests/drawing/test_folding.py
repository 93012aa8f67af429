"""Folding: whole groups where possible, nothing lost, never a cycle."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from helpers.snapshots import decode_step, drawing
from hypothesis import given
from hypothesis import strategies as st

from graphcore.drawing.folding import fold
from graphcore.drawing.model import Box, Drawing, Link
from graphcore.drawing.order import in_cycle


def labelled(labels: list[str], links: list[tuple[int, int]] | None = None) -> Drawing:
    pairs = list(pairwise(range(len(labels)))) if links is None else links
    boxes = tuple(Box("work", "kernel", group=label) for label in labels)
    return Drawing(boxes, tuple(Link(*pair) for pair in pairs))


def test_a_decode_step_folds_by_layer_into_about_35_boxes() -> None:
    step = decode_step(30).drawing()
    folding = fold(step)
    labels = [box.label for box in folding.drawing.boxes]
    assert labels == ["embed", *(f"layer {layer}" for layer in range(30)), "head"]
    assert len(step.boxes) == 401
    assert folding.drawing.boxes[1].counts == (("kernel", 13),)
    assert folding.drawing.boxes[1].detail == "13 kernels"
    assert folding.drawing.links == tuple(Link(*pair) for pair in pairwise(range(32)))
    assert folding.members[1] == tuple(range(6, 19))


def test_small_drawings_stay_as_they_are() -> None:
    small = labelled(["a"] * 200)
    assert fold(small).drawing is small
    assert len(fold(labelled(["a"] * 201)).drawing.boxes) == 1


def test_groups_go_as_deep_as_stays_legible() -> None:
    labels = [f"model/layer {index // 10}" for index in range(300)]
    assert len(fold(labelled(labels)).drawing.boxes) == 30
    deeper = [f"model/layer {index // 10}/part {index % 10}" for index in range(300)]
    assert len(fold(labelled(deeper)).drawing.boxes) == 30


def test_a_group_that_other_work_interrupts_becomes_several() -> None:
    labels = ["a", "b", "a"] * 100
    folding = fold(labelled(labels), limit=250)
    assert len(folding.members) == 201
    interrupted = labelled(["copy"] * 100 + ["work"] * 100 + ["copy"] * 100)
    assert [box.label for box in fold(interrupted).drawing.boxes] == ["copy", "work", "copy"]


def test_parallel_branches_fold_whole_although_their_nodes_alternate() -> None:
    labels = ["left", "right"] * 150
    links = [(index, index + 2) for index in range(298)]
    folding = fold(labelled(labels, links))
    assert [box.label for box in folding.drawing.boxes] == ["left", "right"]
    assert [len(entry) for entry in folding.members] == [150, 150]


def test_unlabelled_boxes_fold_by_runs_and_a_lone_one_stays_itself() -> None:
    labels = ["layer 0"] * 150 + [""] + ["layer 1"] * 150 + [""] * 3
    folding = fold(labelled(labels))
    assert [box.label for box in folding.drawing.boxes] == [
        "layer 0", "work", "layer 1", "nodes 301-303",
    ]  # fmt: skip
    assert folding.drawing.boxes[1].counts == ()


def test_a_drawing_without_groups_folds_into_pieces() -> None:
    folding = fold(drawing(1000, pairwise(range(1000))))
    assert 16 <= len(folding.drawing.boxes) <= 48
    assert folding.drawing.boxes[0].label == "nodes 0-31"


@given(
    st.lists(st.sampled_from(["", "a", "b", "a/x", "a/y", "c"]), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40),
)
def test_nothing_is_lost_and_no_cycle_appears(
    labels: list[str], pairs: list[tuple[int, int]]
) -> None:
    links = [(min(a, b), max(a, b)) for a, b in pairs if a != b and max(a, b) < len(labels)]
    whole = labelled(labels, links)
    folding = fold(whole, limit=0)
    assert sorted(index for entry in folding.members for index in entry) == list(range(len(labels)))
    count = len(folding.members)
    assert not any(in_cycle(count, [(link.source, link.target) for link in folding.drawing.links]))
    block = {index: box for box, entry in enumerate(folding.members) for index in entry}
    between = {(block[a], block[b]) for a, b in links if block[a] != block[b]}
    assert {(link.source, link.target) for link in folding.drawing.links} == between


def test_counts_of_a_folded_box_are_those_of_its_members() -> None:
    whole = labelled(["a"] * 300)
    boxes = (replace(whole.boxes[0], kind="memcpy"), *whole.boxes[1:])
    folded = fold(replace(whole, boxes=boxes)).drawing.boxes[0]
    assert folded.counts == (("kernel", 299), ("memcpy", 1))
    assert folded.detail == "299 kernels · 1 memcpy"


def test_a_folded_box_of_one_kind_says_how_many_different_ones_there_are() -> None:
    boxes = tuple(Box(f"k{index % 7}", "kernel", group="a") for index in range(300))
    folded = fold(Drawing(boxes)).drawing.boxes[0]
    assert folded.detail == "300 kernels, 7 different"
    assert folded.parts[0] == ("kernel", "k0", 43)
    assert sum(count for _, _, count in folded.parts) == 300


def test_the_tooltip_of_a_folded_box_lists_its_most_frequent_names() -> None:
    names = [f"k{number}" for number in range(8) for _ in range(40 - number)]
    boxes = tuple(Box(name, "kernel", group="a") for name in names)
    title = fold(Drawing(boxes)).drawing.boxes[0].title
    assert title.splitlines() == ["a", *(f"{40 - n} x k{n}" for n in range(6)), "and 2 other names"]
