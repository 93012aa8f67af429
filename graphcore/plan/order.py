"""The order in force of a plan's nodes: given by ``after``, else derived; only the edges it needs.

Derivation goes in program order: a node comes after each earlier one that it conflicts with, unless
another path says so already. The result is the same for the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.plan.accesses import Access, accesses_of, comes_after_all, comes_before_all
from graphcore.plan.records import PlanNode
from graphcore.plan.shared_bytes import covers


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a plan's nodes.

    Args:
        after: Per node, what it comes directly after: no index that another one implies.
        ancestors: Per node, all that it comes after, as a set of bits by index.
        sequence: Indices so that each node comes after what it depends on.
        cycle: Indices of nodes that each come after the one before, and the first after the last;
            empty where there is none. With a cycle ``after`` is as given and ``ancestors`` and
            ``sequence`` hold what can run.
    """

    after: tuple[tuple[int, ...], ...]
    ancestors: tuple[int, ...]
    sequence: tuple[int, ...]
    cycle: tuple[int, ...] = ()

    def is_ordered(self, first: int, second: int) -> bool:
        """Whether there is a path between two nodes, either way."""
        return bool(self.ancestors[first] >> second & 1 or self.ancestors[second] >> first & 1)

    def is_before(self, first: int, second: int) -> bool:
        """Whether there is a path from ``first`` to ``second``."""
        return bool(self.ancestors[second] >> first & 1)


def order_nodes(nodes: Sequence[PlanNode]) -> Order:
    """The order of the nodes of one plan or body."""
    direct = _Derivation().edges(nodes)
    sequence = _sorted(direct)
    ancestors = [0] * len(nodes)
    after: list[tuple[int, ...]] = [tuple(sorted(set(sources))) for sources in direct]
    position = {index: place for place, index in enumerate(sequence)}
    for index in sequence:
        kept = []
        for source in sorted(after[index], key=position.__getitem__, reverse=True):
            if not ancestors[index] >> source & 1:
                kept.append(source)
                ancestors[index] |= ancestors[source] | 1 << source
        if len(sequence) == len(nodes):
            after[index] = tuple(sorted(kept))
    cycle = _cycle(after, position) if len(sequence) < len(nodes) else ()
    return Order(tuple(after), tuple(ancestors), tuple(sequence), cycle)


class _Derivation:
    """One pass over the nodes in program order."""

    def __init__(self) -> None:
        # by identity of the resource: who touched it, without what a later write hides
        self._touched: dict[int, list[tuple[int, Access]]] = {}
        # nodes that all later ones come after
        self._gates: list[int] = []
        # what is known to come before each node, as bits; names of later nodes do not count yet
        self._ancestors: list[int] = []

    def edges(self, nodes: Sequence[PlanNode]) -> list[tuple[int, ...]]:
        direct = []
        for node in nodes:
            accesses = accesses_of(node)
            if node.after is not None:
                sources = node.after
            elif comes_after_all(node):
                sources = self._reduced(dict.fromkeys(range(node.index), None), node.index)
            else:
                sources = self._reduced(self._candidates(accesses), node.index)
            known = 0
            for source in sources:
                if source < node.index:
                    known |= self._ancestors[source] | 1 << source
            self._ancestors.append(known)
            direct.append(sources)
            self._remember(node, accesses)
        return direct

    def _candidates(
        self, accesses: Sequence[Access]
    ) -> dict[int, list[tuple[Access, Access]] | None]:
        """Earlier nodes that may have to come first, and the accesses that decide it."""
        found: dict[int, list[tuple[Access, Access]] | None] = {}
        for access in accesses:
            for index, earlier in self._touched.get(id(access.resource), ()):
                if access.writes or earlier.writes:
                    pairs = found.setdefault(index, [])
                    if pairs is not None:
                        pairs.append((access, earlier))
        found.update(dict.fromkeys(self._gates))
        return found

    def _reduced(
        self, candidates: dict[int, list[tuple[Access, Access]] | None], index: int
    ) -> tuple[int, ...]:
        """Latest first, so that what a later one implies is never compared at all."""
        kept, known = [], 0
        for source in sorted(candidates, reverse=True):
            if known >> source & 1 or source == index:
                continue
            pairs = candidates[source]
            if pairs is None or any(one.conflicts(other) for one, other in pairs):
                kept.append(source)
                known |= self._ancestors[source] | 1 << source
        return tuple(kept)

    def _remember(self, node: PlanNode, accesses: Sequence[Access]) -> None:
        for access in accesses:
            touched = self._touched.setdefault(id(access.resource), [])
            if access.writes and node.after is None:
                # this node comes after those, and who conflicts with them conflicts with it
                touched[:] = [pair for pair in touched if not _hides(access, pair[1])]
        for access in accesses:
            self._touched[id(access.resource)].append((node.index, access))
        if comes_before_all(node):
            self._gates.append(node.index)


def _hides(write: Access, earlier: Access) -> bool:
    if write.view is None or earlier.view is None:
        return True
    return covers(write.view, earlier.view)


def _sorted(direct: Sequence[Sequence[int]]) -> list[int]:
    """Indices in an order that keeps the edges, else by index; shorter where there is a cycle."""
    waiting = [len(set(sources)) for sources in direct]
    targets: list[list[int]] = [[] for _ in direct]
    for index, sources in enumerate(direct):
        for source in set(sources):
            targets[source].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    found = []
    while ready:
        index = heapq.heappop(ready)
        found.append(index)
        for target in targets[index]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    return found


def _cycle(after: Sequence[Sequence[int]], done: dict[int, int]) -> tuple[int, ...]:
    """One cycle among the nodes that cannot be sorted, in the order in which they would run."""
    index = next(index for index in range(len(after)) if index not in done)
    path: list[int] = []
    while index not in path:
        path.append(index)
        # what cannot run waits for something else that cannot
        index = next(source for source in after[index] if source not in done)
    return tuple(reversed(path[path.index(index) :]))
