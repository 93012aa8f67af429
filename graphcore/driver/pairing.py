"""Which node of one graph a whole-graph update pairs with which node of another: CUDA's own walk.

Exit nodes (no dependents) are paired from the last to the first, in creation order; from there the
walk goes breadth-first up the dependencies, in edge order. At each pair it compares the number of
dependencies, the kind of node, its parameters (whole inner graphs too), and only then what it
depends on. Found by asking an H200 (driver 580.159) about two thousand pairs of graphs;
tests/driver/data/ and tests/graph/data/ keep its answers. Pure; works on indices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from graphcore.driver.records import UpdateResult

Need = tuple[int, Hashable]
"""A dependency: the index of the node that is waited for, and the data of the edge."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What an update compares of a graph besides parameters, nodes in creation order.

    ``kinds`` has the kind of each node; ``needs`` its dependencies in edge order.
    """

    kinds: tuple[Hashable, ...]
    needs: tuple[tuple[Need, ...], ...]

    def exits(self) -> list[int]:
        """Nodes that nothing depends on."""
        needed = {source for needs in self.needs for source, _ in needs}
        return [index for index in range(len(self.kinds)) if index not in needed]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where two outlines part: what CUDA answers, and the node of the new graph that it names.

    ``field`` and ``rule`` are our words for it; ``from_node`` is the dependency CUDA names too.
    ``before`` and ``after`` are the field's values where it has any.
    """

    result: UpdateResult
    field: str
    rule: str
    node: int | None = None
    from_node: int | None = None
    before: Hashable = None
    after: Hashable = None


Pairs = tuple[tuple[int, int], ...]
"""(old index, new index) of every node, in the order in which the pairs were found."""


Stop = TypeVar("Stop")


def pair(
    old: Outline, new: Outline, check: Callable[[int, int], Stop | None] = lambda _old, _new: None
) -> Pairs | Mismatch | Stop:
    """Pairs the nodes of two graphs as an update does, or says where that fails.

    Args:
        old: The executable's graph.
        new: The graph it is to take.
        check: Compares the parameters of a pair (old index, new index); what it returns other than
            None ends the walk and is returned.
    """
    if len(old.kinds) != len(new.kinds):
        rule = f"an update keeps the number of nodes ({len(old.kinds)}, not {len(new.kinds)})"
        return _topology("nodes", rule)
    old_exits, new_exits = old.exits(), new.exits()
    extra = len(new_exits) - len(old_exits)
    if extra:
        rule = f"an update keeps the exit nodes ({len(old_exits)}, not {len(new_exits)})"
        return _topology("edges", rule, new_exits[extra - 1] if extra > 0 else None)
    return _Walk(old, new, check).run(list(zip(old_exits, new_exits, strict=True))[::-1])


def _topology(
    field: str, rule: str, node: int | None = None, from_node: int | None = None
) -> Mismatch:
    return Mismatch(UpdateResult.TOPOLOGY_CHANGED, field, rule, node, from_node)


class _Walk(Generic[Stop]):
    """The walk from the exits upwards."""

    def __init__(
        self, old: Outline, new: Outline, check: Callable[[int, int], Stop | None]
    ) -> None:
        self.old, self.new, self.check = old, new, check
        self.became: dict[int, int] = {}
        self.taken: set[int] = set()

    def run(self, waiting: list[tuple[int, int]]) -> Pairs | Mismatch | Stop:
        for before, after in waiting:
            self._match(before, after)
        for before, after in waiting:  # grows while it is walked
            problem = self._compare(before, after)
            stop = self.check(before, after) if problem is None else None
            if stop is not None:
                return stop
            problem = problem or self._pair_needs(before, after, waiting)
            if problem is not None:
                return problem
        if len(self.became) < len(self.new.kinds):
            # every node leads to an exit, unless there is a cycle
            return _topology("edges", "a graph has no cycle")
        return tuple(self.became.items())

    def _compare(self, before: int, after: int) -> Mismatch | None:
        had, has = len(self.old.needs[before]), len(self.new.needs[after])
        if had != has:
            rule = f"an update keeps each node's number of dependencies ({had}, not {has})"
            return _topology("dependencies", rule, after)
        was, now = self.old.kinds[before], self.new.kinds[after]
        if was != now:
            rule = "an update keeps each node's kind"
            result = UpdateResult.NODE_TYPE_CHANGED
            return Mismatch(result, "kind", rule, after, before=was, after=now)
        return None

    def _pair_needs(
        self, before: int, after: int, waiting: list[tuple[int, int]]
    ) -> Mismatch | None:
        needs = zip(self.old.needs[before], self.new.needs[after], strict=True)
        for (source, data), (target, new_data) in needs:
            if data != new_data:
                rule = "an update keeps the kind of each dependency"
                return _topology("edge data", rule, after, target)
            if source not in self.became and target not in self.taken:
                self._match(source, target)
                waiting.append((source, target))
            elif self.became.get(source) != target:
                rule = "an update keeps each node's dependencies "
                rule += f"(node {target} is paired with another node than node {source})"
                return _topology("dependencies", rule, after, target)
        return None

    def _match(self, before: int, after: int) -> None:
        self.became[before] = after
        self.taken.add(after)
