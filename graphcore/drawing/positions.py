"""Positions on a rank: as near to the neighbours as the order and the gaps allow.

Given an order, the best positions in the least-squares sense are an isotonic regression, found by
pooling neighbours that would overlap; linear and exact.
"""

from __future__ import annotations

from collections.abc import Sequence

_SWEEPS = 8
# sweeps, from this one on, that look at the neighbours on both sides
_BOTH_SIDES = 6
# a stand-in for a long link pulls harder: long links come out straight
_STRAIGHT = 4.0
_STAND_IN = 2.0


def place(
    rows: Sequence[Sequence[int]],
    hops: Sequence[tuple[int, int]],
    widths: Sequence[float],
    gap: float,
) -> list[float]:
    """The center of every item; items of one row keep their order and ``gap`` between them."""
    centers = [0.0] * len(widths)
    up: list[list[int]] = [[] for _ in widths]
    down: list[list[int]] = [[] for _ in widths]
    for source, target in hops:
        down[source].append(target)
        up[target].append(source)
    for row in rows:
        _spread(row, [0.0] * len(row), [1.0] * len(row), widths, gap, centers)
    both = [above + below for above, below in zip(up, down, strict=True)]
    for sweep in range(_SWEEPS):
        # both directions start where the last one ended; the last goes down, so that chains line up
        forward = sweep % 2 == 1
        neighbours = both if sweep >= _BOTH_SIDES else up if forward else down
        for row in rows if forward else reversed(rows):
            wanted = [_mean(item, neighbours[item], centers) for item in row]
            weights = [_STRAIGHT if widths[item] <= _STAND_IN else 1.0 for item in row]
            _spread(row, wanted, weights, widths, gap, centers)
    return centers


def _mean(item: int, neighbours: Sequence[int], centers: Sequence[float]) -> float:
    if not neighbours:
        return centers[item]
    return sum(centers[other] for other in neighbours) / len(neighbours)


def _spread(
    row: Sequence[int],
    wanted: Sequence[float],
    weights: Sequence[float],
    widths: Sequence[float],
    gap: float,
    centers: list[float],
) -> None:
    """Sets the centers of a row so that gaps hold and weighted squared distances are least."""
    offsets, at = [], 0.0
    for index, item in enumerate(row):
        if index:
            before = widths[row[index - 1]]
            near = before <= _STAND_IN and widths[item] <= _STAND_IN
            at += (before + widths[item]) / 2 + (gap / 2 if near else gap)
        offsets.append(at)
    pools: list[tuple[float, float, int]] = []  # (mean of wanted minus offset, weight, items)
    for index in range(len(row)):
        value, weight, items = wanted[index] - offsets[index], weights[index], 1
        while pools and pools[-1][0] >= value:
            other, other_weight, other_items = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, items = weight + other_weight, items + other_items
        pools.append((value, weight, items))
    index = 0
    for value, _, items in pools:
        for _ in range(items):
            centers[row[index]] = round(value + offsets[index], 3)
            index += 1
