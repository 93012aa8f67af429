"""Pairing the nodes of two snapshots as a whole-graph update does (driver/pairing.py), by index.

Where the driver names no node, the first one that is different here is found as well.
"""

from __future__ import annotations

from collections.abc import Callable

from graphcore.driver.api import Driver
from graphcore.driver.pairing import Mismatch, Need, Outline, Pairs, Stop, pair
from graphcore.driver.records import GraphHandle, NodeKind
from graphcore.graph.snapshot import GraphSnapshot

_WITH_GRAPHS_INSIDE = frozenset({NodeKind.CHILD, NodeKind.CONDITIONAL})


def pair_snapshots(
    old: GraphSnapshot,
    new: GraphSnapshot,
    check: Callable[[int, int], Stop | None] = lambda _old, _new: None,
) -> Pairs | Mismatch | Stop:
    """The pairs, or where CUDA stops; ``node`` of a mismatch is the one that CUDA names.

    ``check`` compares the parameters of a pair of nodes, by index; it may end the walk.
    """
    return pair(outline(old), outline(new), check)


def outline(graph: GraphSnapshot) -> Outline:
    """What an update compares of a snapshot besides parameters."""
    needs: list[list[Need]] = [[] for _ in graph.nodes]
    for (source, target), data in graph.edges_with_data():
        needs[target].append((source, data))
    return Outline(tuple(node.kind.value for node in graph.nodes), tuple(map(tuple, needs)))


def read_outline(driver: Driver, graph: GraphHandle) -> Outline | None:
    """The outline of a graph, without the rest of a snapshot; None where a node has graphs inside.

    The walk of :func:`pair` over two equal outlines pairs each node with the one at its place.
    """
    nodes = driver.nodes(graph)
    kinds = [driver.node_kind(node) for node in nodes]
    if not _WITH_GRAPHS_INSIDE.isdisjoint(kinds):
        return None
    place = {node: index for index, node in enumerate(nodes)}
    needs: list[list[Need]] = [[] for _ in nodes]
    for source, target, data in driver.plain_edges(graph):
        needs[place[target]].append((place[source], data))
    return Outline(tuple(kind.value for kind in kinds), tuple(map(tuple, needs)))


def first_unlike(old: GraphSnapshot, new: GraphSnapshot) -> int | None:
    """The first node of ``new`` that has no like at its place in ``old``, None where all have."""
    before, after = outline(old), outline(new)
    for index, node in enumerate(new.nodes):
        if index >= len(old.nodes):
            return index
        same_place = old.nodes[index]
        if (same_place.kind, same_place.name) != (node.kind, node.name):
            return index
        if before.needs[index] != after.needs[index]:
            return index
    return None
