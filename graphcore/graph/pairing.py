"""Pairing the nodes of two snapshots as a whole-graph update does (driver/pairing.py), by index.

Where the driver names no node, the first one that is different here is found as well.
"""

from __future__ import annotations

from collections.abc import Callable

from graphcore.driver.pairing import Mismatch, Need, Outline, Pairs, Stop, pair
from graphcore.graph.snapshot import GraphSnapshot


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
