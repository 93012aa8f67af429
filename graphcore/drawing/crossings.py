"""The order of items on each rank, by barycenter sweeps that keep the fewest crossings seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_SWEEPS = 8


def order_ranks(rank: Sequence[int], hops: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The items of each rank from left to right; ``hops`` join neighbouring ranks."""
    rows: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    up: list[list[int]] = [[] for _ in rank]
    down: list[list[int]] = [[] for _ in rank]
    for source, target in hops:
        down[source].append(target)
        up[target].append(source)
    for item, at in enumerate(rank):
        rows[at].append(item)
    best, fewest = [list(row) for row in rows], crossings(rows, down)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        forward = sweep % 2 == 0
        for row in rows[1:] if forward else rows[-2::-1]:
            above = rows[rank[row[0]] + (-1 if forward else 1)]
            _sort_by_barycenter(row, above, up if forward else down)
        count = crossings(rows, down)
        if count < fewest:
            best, fewest = [list(row) for row in rows], count
    return best


def _sort_by_barycenter(
    row: list[int], fixed: Sequence[int], neighbours: Sequence[Sequence[int]]
) -> None:
    """Sorts ``row`` by the mean place of neighbours in ``fixed``; lone items keep their place."""
    position = {item: at for at, item in enumerate(fixed)}
    weight = {
        item: sum(position[other] for other in neighbours[item]) / len(neighbours[item])
        for item in row
        if neighbours[item]
    }
    movable = iter(sorted((item for item in row if item in weight), key=weight.__getitem__))
    row[:] = [next(movable) if item in weight else item for item in row]


def crossings(rows: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> int:
    """How many pairs of hops cross, over all pairs of neighbouring ranks."""
    total = 0
    for upper, lower in pairwise(rows):
        position = {item: at for at, item in enumerate(lower)}
        ends = [at for item in upper for at in sorted(position[other] for other in down[item])]
        total += _inversions(ends, len(lower))
    return total


def _inversions(values: Sequence[int], size: int) -> int:
    """Pairs out of order, counted with a Fenwick tree."""
    tree = [0] * (size + 1)
    total = 0
    for seen, value in enumerate(values):
        at, smaller_or_equal = value + 1, 0
        while at:
            smaller_or_equal += tree[at]
            at -= at & -at
        total += seen - smaller_or_equal
        at = value + 1
        while at <= size:
            tree[at] += 1
            at += at & -at
    return total
