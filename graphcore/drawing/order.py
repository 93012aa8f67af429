"""Orders of a directed graph given by indices: topological order, components, ranks.

Small pure algorithms that folding and layout share; all linear, none recursive, all deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Pair = tuple[int, int]


def successors(count: int, edges: Sequence[Pair]) -> list[list[int]]:
    """For every index the targets of its edges, without repeats, in edge order."""
    result: list[dict[int, None]] = [{} for _ in range(count)]
    for source, target in edges:
        if source != target:
            result[source][target] = None
    return [list(entry) for entry in result]


def topological(count: int, edges: Sequence[Pair]) -> list[int]:
    """All indices so that edges go forward, smallest index first where there is a choice.

    Where a cycle leaves no choice, the smallest index left goes first, as if nothing led to it.
    """
    after = successors(count, edges)
    missing = [0] * count
    for targets in after:
        for target in targets:
            missing[target] += 1
    ready = [index for index in range(count) if not missing[index]]
    done: list[int] = []
    placed = [False] * count
    next_in_cycle = 0
    while len(done) < count:
        if not ready:
            while placed[next_in_cycle]:
                next_in_cycle += 1
            ready = [next_in_cycle]
        index = heapq.heappop(ready)
        if placed[index]:
            continue
        placed[index] = True
        done.append(index)
        for target in after[index]:
            missing[target] -= 1
            if not missing[target] and not placed[target]:
                heapq.heappush(ready, target)
    return done


def ranks(count: int, edges: Sequence[Pair], widest: int) -> list[int]:
    """The layer of every index: longest path from a source, at most ``widest`` on a layer.

    Sources move down to their first target; what finds its layer full goes further down. Assumes
    that there is no cycle.
    """
    order = topological(count, edges)
    after = successors(count, edges)
    return _bounded(order, after, _longest_paths(order, after), widest)


def _longest_paths(order: Sequence[int], after: Sequence[Sequence[int]]) -> list[int]:
    rank = [0] * len(order)
    has_source = [False] * len(order)
    for index in order:
        for target in after[index]:
            rank[target] = max(rank[target], rank[index] + 1)
            has_source[target] = True
    for index in order:
        if not has_source[index] and after[index]:
            rank[index] = min(rank[target] for target in after[index]) - 1
    return rank


def _bounded(
    order: Sequence[int], after: Sequence[Sequence[int]], rank: list[int], widest: int
) -> list[int]:
    """Ranks no fuller than ``widest``, without gaps; edges still go down."""
    filled: dict[int, int] = {}
    for index in sorted(order, key=rank.__getitem__):
        while filled.get(rank[index], 0) >= widest:
            rank[index] += 1
        filled[rank[index]] = filled.get(rank[index], 0) + 1
        for target in after[index]:
            rank[target] = max(rank[target], rank[index] + 1)
    used = {value: at for at, value in enumerate(sorted(filled))}
    return [used[value] for value in rank]


def in_cycle(count: int, edges: Sequence[Pair]) -> list[bool]:
    """Which indices lie on a cycle: those that trimming sources and sinks never reaches.

    An index between two cycles is counted in too.
    """
    after = successors(count, edges)
    before = successors(count, [(target, source) for source, target in edges])
    inside = [True] * count
    for forward, backward in ((after, before), (before, after)):
        degree = [sum(inside[other] for other in backward[index]) for index in range(count)]
        loose = [index for index in range(count) if inside[index] and not degree[index]]
        while loose:
            index = loose.pop()
            inside[index] = False
            for other in forward[index]:
                degree[other] -= 1
                if inside[other] and not degree[other]:
                    loose.append(other)
    return inside
