"""Which node of one graph a whole-graph update pairs with which node of the other.

The driver's documented way: exit nodes are paired in order, then dependencies, in edge order, from
there upwards. Pure; works on indices.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphcore.graph.snapshot import GraphSnapshot


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where two topologies part: a node of the new graph (None where none can be named), and why.

    ``names_node`` says whether the driver names the node too.
    """

    node: int | None
    field: str
    rule: str
    names_node: bool


@dataclass(frozen=True, slots=True)
class Pairing:
    """``partner[j]`` is the index in the old graph that node ``j`` of the new one pairs with."""

    partner: tuple[int, ...]


def pair(old: GraphSnapshot, new: GraphSnapshot) -> Pairing | Mismatch:
    """Pairs the nodes of two graphs as an update does, or says where that fails."""
    if len(old.nodes) != len(new.nodes):
        rule = f"an update keeps the number of nodes ({len(old.nodes)}, not {len(new.nodes)})"
        return Mismatch(_first_unlike(old, new), "nodes", rule, names_node=False)
    if len(old.edges) != len(new.edges):
        rule = f"an update keeps the number of edges ({len(old.edges)}, not {len(new.edges)})"
        return Mismatch(_first_other_degree(old, new), "edges", rule, names_node=False)
    return _Walk(old, new).run()


class _Walk:
    """The walk from the exits upwards."""

    def __init__(self, old: GraphSnapshot, new: GraphSnapshot) -> None:
        self.old_needs, self.new_needs = old.dependencies(), new.dependencies()
        self.old_exits, self.new_exits = _exits(old), _exits(new)
        self.partner: list[int | None] = [None] * len(new.nodes)
        self.taken: list[int | None] = [None] * len(old.nodes)

    def run(self) -> Pairing | Mismatch:
        if len(self.old_exits) != len(self.new_exits):
            rule = "an update keeps the number of exit nodes "
            rule += f"({len(self.old_exits)}, not {len(self.new_exits)})"
            more = len(self.new_exits) > len(self.old_exits)
            node = self.new_exits[min(len(self.old_exits), len(self.new_exits) - 1)]
            return Mismatch(node, "edges", rule, names_node=more)
        waiting = list(zip(self.old_exits, self.new_exits, strict=True))
        for before, after in waiting:
            self._match(before, after)
        for before, after in waiting:  # grows while it is walked
            problem = self._pair_needs(before, after, waiting)
            if problem is not None:
                return problem
        return Pairing(tuple(index for index in self.partner if index is not None))

    def _pair_needs(
        self, before: int, after: int, waiting: list[tuple[int, int]]
    ) -> Mismatch | None:
        old_needs, new_needs = self.old_needs[before], self.new_needs[after]
        if len(old_needs) != len(new_needs):
            rule = "an update keeps each node's number of dependencies "
            rule += f"({len(old_needs)}, not {len(new_needs)})"
            return Mismatch(after, "dependencies", rule, names_node=True)
        for source, target in zip(old_needs, new_needs, strict=True):
            if self.partner[target] is None and self.taken[source] is None:
                self._match(source, target)
                waiting.append((source, target))
            elif self.partner[target] != source:
                rule = "an update keeps each node's dependencies: "
                rule += f"node {target} was paired with another node than node {source}"
                return Mismatch(after, "dependencies", rule, names_node=True)
        return None

    def _match(self, before: int, after: int) -> None:
        self.partner[after], self.taken[before] = before, after


def _exits(graph: GraphSnapshot) -> list[int]:
    sources = {source for source, _ in graph.edges}
    return [node.index for node in graph.nodes if node.index not in sources]


def _first_unlike(old: GraphSnapshot, new: GraphSnapshot) -> int | None:
    """The first node of ``new`` that has no like at its place in ``old``."""
    for before, after in zip(old.nodes, new.nodes, strict=False):
        if (before.kind, before.name) != (after.kind, after.name):
            return after.index
    return len(old.nodes) if len(new.nodes) > len(old.nodes) else None


def _first_other_degree(old: GraphSnapshot, new: GraphSnapshot) -> int | None:
    """The first node of ``new`` whose dependencies differ from those at its place in ``old``."""
    pairs = enumerate(zip(old.dependencies(), new.dependencies(), strict=True))
    return next((index for index, (before, after) in pairs if before != after), None)
