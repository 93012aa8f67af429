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
from graphcore.plan.shared_bytes import covered_range


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
        # by identity of the resource: who touched it how, without what a later write hides
        self._touched: dict[int, dict[int, list[_Touch]]] = {}
        # nodes that all later ones come after
        self._gates: set[int] = set()
        # what is known to come before each node, as bits; names of later nodes do not count yet
        self._ancestors: list[int] = []

    def edges(self, nodes: Sequence[PlanNode]) -> list[tuple[int, ...]]:
        direct = []
        for node in nodes:
            accesses = accesses_of(node)
            given = node.after
            sources = self._derived(node, accesses) if given is None else given
            known = 0
            for source in sources:
                if source < node.index:
                    known |= self._ancestors[source] | 1 << source
            self._ancestors.append(known)
            direct.append(sources)
            self._remember(node, accesses)
        return direct

    def _derived(self, node: PlanNode, accesses: Sequence[Access]) -> tuple[int, ...]:
        """Latest first, so that what a later one implies is never compared at all."""
        gathers = comes_after_all(node)
        if gathers:
            candidates = set(range(node.index))
        else:
            candidates = set(self._gates)
            for access in accesses:
                candidates.update(self._touched.get(id(access.resource), ()))
        kept, known = [], 0
        for source in sorted(candidates, reverse=True):
            if known >> source & 1:
                continue
            if gathers or source in self._gates or self._conflicts(accesses, source):
                kept.append(source)
                known |= self._ancestors[source] | 1 << source
        return tuple(kept)

    def _conflicts(self, accesses: Sequence[Access], source: int) -> bool:
        return any(
            access.conflicts(earlier.access)
            for access in accesses
            for earlier in self._touched.get(id(access.resource), {}).get(source, ())
        )

    def _remember(self, node: PlanNode, accesses: Sequence[Access]) -> None:
        for access in accesses:
            touched = self._touched.setdefault(id(access.resource), {})
            if access.writes and node.after is None:
                # this node comes after those, and who conflicts with them conflicts with it
                low, high = covered_range(access.view) if access.view else (0, 0)
                for index in [
                    index
                    for index, earlier in touched.items()
                    if all(low <= one.low and one.high <= high for one in earlier)
                ]:
                    del touched[index]
        for access in accesses:
            self._touched[id(access.resource)].setdefault(node.index, []).append(_Touch.of(access))
        if comes_before_all(node):
            self._gates.add(node.index)


@dataclass(frozen=True, slots=True)
class _Touch:
    """An access with its extent, which many later writes are held against."""

    access: Access
    low: int
    high: int

    @staticmethod
    def of(access: Access) -> _Touch:
        return _Touch(access, *(access.view.extent if access.view else (0, 0)))


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
