"""The order in force of a plan's nodes: given by ``after``, else derived; only the edges it needs.

Derivation goes in program order: a node comes after each earlier one that it conflicts with, unless
another path says so already. The result is the same for the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphcore.plan.accesses import accesses_of, comes_after_all, comes_before_all
from graphcore.plan.records import PlanNode
from graphcore.plan.touches import Touch, Touches


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
        self._touched: dict[int, Touches] = {}
        # nodes that all later ones come after
        self._gates: set[int] = set()
        # what is known to come before each node, as bits; names of later nodes do not count yet
        self._ancestors: list[int] = []

    def edges(self, nodes: Sequence[PlanNode]) -> list[tuple[int, ...]]:
        direct = []
        for node in nodes:
            touches = [Touch(node.index, access) for access in accesses_of(node)]
            given = node.after
            sources = self._derived(node, touches) if given is None else given
            known = 0
            for source in sources:
                if source < node.index:
                    known |= self._ancestors[source] | 1 << source
            self._ancestors.append(known)
            direct.append(sources)
            self._remember(node, touches)
        return direct

    def _derived(self, node: PlanNode, touches: Sequence[Touch]) -> tuple[int, ...]:
        """Latest first, so that what a later one implies is never compared at all."""
        gathers = comes_after_all(node)
        candidates: Iterable[int]
        if gathers:
            candidates = range(node.index - 1, -1, -1)
        else:
            candidates = sorted(self._gates.union(*map(self._near, touches)), reverse=True)
        kept, known, everything = [], 0, (1 << node.index) - 1
        for source in candidates:
            if known >> source & 1:
                continue
            if gathers or source in self._gates or self._conflicts(touches, source):
                kept.append(source)
                known |= self._ancestors[source] | 1 << source
                if known == everything:
                    break
        return tuple(kept)

    def _near(self, touch: Touch) -> set[int]:
        touched = self._touched.get(id(touch.access.resource))
        return set() if touched is None else touched.near(touch)

    def _conflicts(self, touches: Sequence[Touch], source: int) -> bool:
        for touch in touches:
            touched = self._touched.get(id(touch.access.resource))
            if touched is not None and any(
                touch.conflicts(earlier) for earlier in touched.of(source)
            ):
                return True
        return False

    def _remember(self, node: PlanNode, touches: Sequence[Touch]) -> None:
        for touch in touches:
            touched = self._touched.setdefault(id(touch.access.resource), Touches())
            if touch.access.writes and node.after is None:
                touched.forget_behind(touch)
        for touch in touches:
            self._touched[id(touch.access.resource)].add(touch)
        if comes_before_all(node):
            self._gates.add(node.index)


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
