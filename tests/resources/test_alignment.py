"""Aligning nodes: equal ones first, then those of one name, always in order."""

from __future__ import annotations

import time

import pytest

from graphcore.resources.alignment import align

CASES: dict[str, tuple[str, str, list[tuple[int, int]]]] = {
    # letters are names, digits what tells nodes of one name apart
    "equal": ("a1 b1 a2", "a1 b1 a2", [(0, 0), (1, 1), (2, 2)]),
    "one changed": ("a1 b1 c1", "a1 b2 c1", [(0, 0), (1, 1), (2, 2)]),
    "one renamed": ("a1 b1 c1", "a1 d1 c1", [(0, 0), (1, 1), (2, 2)]),
    "inserted among its likes": ("a1 a2 a3", "a1 a9 a2 a3", [(0, 0), (1, 2), (2, 3)]),
    "removed": ("a1 a2 a3", "a1 a3", [(0, 0), (2, 1)]),
    "at the start": ("a1 a2", "b1 a1 a2", [(0, 1), (1, 2)]),
    "at the end": ("a1 a2", "a1 a2 b1", [(0, 0), (1, 1)]),
    "inserted and changed": ("a1 b1 c1", "a2 x1 b2 c1", [(0, 0), (1, 2), (2, 3)]),
    "all changed by name": ("a1 b1", "a2 b2", [(0, 0), (1, 1)]),
    "nothing in common": ("a1", "b1 c1", []),
    "empty": ("", "a1", []),
    "moved": ("a1 b1 c1 d1", "b1 c1 d1 a1", [(1, 0), (2, 1), (3, 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_nodes_are_aligned(case: str) -> None:
    old, new, pairs = CASES[case]
    before, after = old.split(), new.split()
    names = [[node[0] for node in nodes] for nodes in (before, after)]
    assert align(before, after, *names) == pairs
    backwards = align(after, before, names[1], names[0])
    assert [(one, other) for other, one in backwards] == pairs


def test_a_long_list_with_one_node_more_is_aligned_in_no_time() -> None:
    old = [f"node {index}" for index in range(20_000)]
    new = [*old[:9_000], "another", *old[9_000:]]
    start = time.process_time()
    pairs = align(old, new, ["n"] * len(old), ["n"] * len(new))
    assert time.process_time() - start < 1
    assert pairs == [(index, index + (index >= 9_000)) for index in range(20_000)]
