"""Which node of one graph a whole-graph update pairs with which node of the other.

The driver's documented way: exit nodes are paired in order, then dependencies, in edge order, from
there upwards. Pure; works on indices.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphcore.graph.snapshot import EdgeData, GraphSnapshot


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
    """(old index, new index) of every node, in the order in which the pairs were found."""

    pairs: tuple[tuple[int, int], ...]


def pair(old: GraphSnapshot, new: GraphSnapshot) -> Pairing | Mismatch:
    """Pairs the nodes of two graphs as an update does, or says where that fails."""
    if len(old.nodes) != len(new.nodes):
        rule = f"an update keeps the number of nodes ({len(old.nodes)}, not {len(new.nodes)})"
        return Mismatch(_first_unlike(old, new), "nodes", rule, names_node=False)
    if len(old.edges) != len(new.edges):
        rule = f"an update keeps the number of edges ({len(old.edges)}, not {len(new.edges)})"
        return Mismatch(_first_other_needs(old, new), "edges", rule, names_node=False)
    return _Walk(old, new).run()


class _Walk:
    """The walk from the exits upwards."""

    def __init__(self, old: GraphSnapshot, new: GraphSnapshot) -> None:
        self.old, self.new = old, new
        self.old_needs, self.new_needs = _needs(old), _needs(new)
        self.became: dict[int, int] = {}
        self.taken: set[int] = set()

    def run(self) -> Pairing | Mismatch:
        old_exits, new_exits = _exits(self.old), _exits(self.new)
        if len(new_exits) > len(old_exits):
            rule = f"an update keeps the exit nodes ({len(old_exits)}, not {len(new_exits)})"
            return Mismatch(new_exits[len(old_exits)], "edges", rule, names_node=True)
        for before, after in zip(old_exits, new_exits, strict=False):
            self._match(before, after)
        waiting = list(self.became.items())
        for before, after in waiting:  # grows while it is walked
            problem = self._pair_needs(before, after, waiting)
            if problem is not None:
                return problem
        if len(self.became) < len(self.new.nodes):
            # every node leads to an exit, unless a file says otherwise
            return Mismatch(None, "edges", "a graph has no cycle", names_node=False)
        return Pairing(tuple(self.became.items()))

    def _pair_needs(
        self, before: int, after: int, waiting: list[tuple[int, int]]
    ) -> Mismatch | None:
        old_needs, new_needs = self.old_needs[before], self.new_needs[after]
        if len(old_needs) != len(new_needs):
            rule = "an update keeps each node's number of dependencies "
            rule += f"({len(old_needs)}, not {len(new_needs)})"
            return Mismatch(after, "dependencies", rule, names_node=True)
        for (source, data), (target, new_data) in zip(old_needs, new_needs, strict=True):
            if data != new_data:
                rule = "an update keeps the kind of each dependency"
                return Mismatch(after, "edge data", rule, names_node=True)
            if source not in self.became and target not in self.taken:
                self._match(source, target)
                waiting.append((source, target))
            elif self.became.get(source) != target:
                rule = "an update keeps each node's dependencies "
                rule += f"(node {target} is paired with another node than node {source})"
                return Mismatch(after, "dependencies", rule, names_node=True)
        return None

    def _match(self, before: int, after: int) -> None:
        self.became[before] = after
        self.taken.add(after)


def _needs(graph: GraphSnapshot) -> list[list[tuple[int, EdgeData]]]:
    """For every node its dependencies with their data, in the driver's edge order."""
    needs: list[list[tuple[int, EdgeData]]] = [[] for _ in graph.nodes]
    for (source, target), data in graph.edges_with_data():
        needs[target].append((source, data))
    return needs


def _exits(graph: GraphSnapshot) -> list[int]:
    sources = {source for source, _ in graph.edges}
    return [node.index for node in graph.nodes if node.index not in sources]


def _first_unlike(old: GraphSnapshot, new: GraphSnapshot) -> int | None:
    """The first node of ``new`` that has no like at its place in ``old``."""
    for before, after in zip(old.nodes, new.nodes, strict=False):
        if (before.kind, before.name) != (after.kind, after.name):
            return after.index
    return len(old.nodes) if len(new.nodes) > len(old.nodes) else None


def _first_other_needs(old: GraphSnapshot, new: GraphSnapshot) -> int | None:
    """The first node of ``new`` whose dependencies differ from those at its place in ``old``."""
    pairs = enumerate(zip(_needs(old), _needs(new), strict=True))
    return next((index for index, (before, after) in pairs if before != after), None)
