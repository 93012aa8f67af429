"""TopologyChange: what came or went between two graphs, located by the nodes around it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TopologyChange:
    """One node or edge that only one of two graphs has.

    Args:
        what: Whether it came or went.
        node: The node; None where it is an edge.
        edge: (source, target) of the edge; None where it is a node.
        after: What the node waits for, or the source of the edge, in the graph that has it.
        before: What waits for the node, or the target of the edge.
    """

    what: Literal["node added", "node removed", "edge added", "edge removed"]
    node: NodeRecord | None
    edge: tuple[int, int] | None
    after: tuple[NodeRecord, ...]
    before: tuple[NodeRecord, ...]

    def __str__(self) -> str:
        if self.edge is not None:
            source, target = self.edge
            verb = self.what.removeprefix("edge ")
            return f"edge {source} -> {target}: {verb} ({self.after[0]} -> {self.before[0]})"
        return f"{self.node}: {self.what.removeprefix('node ')}{self._place()}"

    def _place(self) -> str:
        words = []
        if self.after:
            words.append("after " + _listed(self.after))
        if self.before:
            words.append("before " + _listed(self.before))
        return " " + " and ".join(words) if words else ", depending on nothing"


def topology_changes(
    old: GraphSnapshot,
    new: GraphSnapshot,
    nodes: tuple[Iterable[NodeRecord], Iterable[NodeRecord]],
    edges: tuple[Edges, Edges],
) -> tuple[TopologyChange, ...]:
    """The changes of topology: what was removed first, then what was added.

    Args:
        old: The old graph.
        new: The new graph.
        nodes: Nodes that only the old one has, and that only the new one has.
        edges: Likewise of edges between nodes that both have.
    """
    removed, added = nodes
    return (
        *_nodes("node removed", old, removed),
        *_nodes("node added", new, added),
        *_edges("edge removed", old, edges[0]),
        *_edges("edge added", new, edges[1]),
    )


def _nodes(
    what: Literal["node added", "node removed"], graph: GraphSnapshot, nodes: Iterable[NodeRecord]
) -> Iterator[TopologyChange]:
    listed = list(nodes)
    if not listed:
        return
    wanted = {node.index for node in listed}
    sources: dict[int, list[NodeRecord]] = {index: [] for index in wanted}
    targets: dict[int, list[NodeRecord]] = {index: [] for index in wanted}
    for source, target in graph.edges:
        if target in wanted:
            sources[target].append(graph.nodes[source])
        if source in wanted:
            targets[source].append(graph.nodes[target])
    for node in listed:
        around = tuple(sources[node.index]), tuple(targets[node.index])
        yield TopologyChange(what, node, None, *around)


def _edges(
    what: Literal["edge added", "edge removed"], graph: GraphSnapshot, edges: Edges
) -> Iterator[TopologyChange]:
    for source, target in edges:
        ends = (graph.nodes[source],), (graph.nodes[target],)
        yield TopologyChange(what, None, (source, target), *ends)


def _listed(nodes: tuple[NodeRecord, ...]) -> str:
    """The first two by name, the rest counted."""
    shown = ", ".join(str(node) for node in nodes[:2])
    return shown if len(nodes) < 3 else f"{shown} and {len(nodes) - 2} more"
