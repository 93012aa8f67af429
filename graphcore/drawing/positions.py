"""Positions on a rank: as near to the neighbours as the order and the gaps allow.

Given an order, the best positions in the least-squares sense are an isotonic regression, found by
pooling neighbours that would overlap; linear and exact. Then chains, and links past several ranks,
are put upright wherever their neighbours leave a place for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

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
    _straighten(rows, up, down, widths, gap, centers)
    return centers


def _straighten(
    rows: Sequence[Sequence[int]],
    up: Sequence[Sequence[int]],
    down: Sequence[Sequence[int]],
    widths: Sequence[float],
    gap: float,
    centers: list[float],
) -> None:
    """Gives each chain one center where there is one that its neighbours on every row leave."""
    beside: dict[int, tuple[int | None, int | None]] = {}
    for row in rows:
        for at, item in enumerate(row):
            right = row[at + 1] if at + 1 < len(row) else None
            beside[item] = (row[at - 1] if at else None, right)
    # long chains first: they move what is around them least; twice, as one makes room for another
    for chain in sorted(_chains(up, down), key=len, reverse=True) * 2:
        low, high = -inf, inf
        for item in chain:
            left, right = beside[item]
            if left is not None:
                low = max(low, centers[left] + _apart(left, item, widths, gap))
            if right is not None:
                high = min(high, centers[right] - _apart(item, right, widths, gap))
        if low <= high:
            middle = sorted(centers[item] for item in chain)[len(chain) // 2]
            for item in chain:
                centers[item] = min(max(middle, low), high)


def _chains(up: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> list[list[int]]:
    """The longest runs of items that have one neighbour each on the facing sides."""

    def follower(item: int) -> int | None:
        only = down[item][0] if len(down[item]) == 1 else None
        return only if only is not None and len(up[only]) == 1 else None

    chains = []
    followed = {follower(item) for item in range(len(up))}
    for item in range(len(up)):
        if item in followed:
            continue
        chain, after = [item], follower(item)
        while after is not None:
            chain.append(after)
            after = follower(after)
        if len(chain) > 1:
            chains.append(chain)
    return chains


def _apart(left: int, right: int, widths: Sequence[float], gap: float) -> float:
    """The least distance of the centers of two neighbours; long links may run close together."""
    near = widths[left] <= _STAND_IN and widths[right] <= _STAND_IN
    return (widths[left] + widths[right]) / 2 + (gap / 2 if near else gap)


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
            at += _apart(row[index - 1], item, widths, gap)
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
