"""Graphs of the CUDA driver: making, changing and listing them."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, repeat
from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.check import ask, error_of
from graphcore.driver.cuda.context import CudaCalls, in_context
from graphcore.driver.cuda.versions import EdgeData, cuda, node_type_number, result_of
from graphcore.driver.records import (
    ConditionalHandle,
    ConditionalParams,
    Edge,
    GraphHandle,
    NodeHandle,
    NodeKind,
    PlainEdge,
)

_ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT

# numbers of CUgraphNodeType
_KINDS = {
    0: NodeKind.KERNEL,
    1: NodeKind.MEMCPY,
    2: NodeKind.MEMSET,
    3: NodeKind.HOST,
    4: NodeKind.CHILD,
    5: NodeKind.EMPTY,
    6: NodeKind.EVENT_WAIT,
    7: NodeKind.EVENT_RECORD,
    8: NodeKind.SEMAPHORE_SIGNAL,
    9: NodeKind.SEMAPHORE_WAIT,
    10: NodeKind.ALLOC,
    11: NodeKind.FREE,
    12: NodeKind.BATCH_MEM_OP,
    13: NodeKind.CONDITIONAL,
}


class GraphCalls(CudaCalls):
    """The part of the driver that makes and lists graphs; nodes' contents are in nodes.py."""

    # what conditional nodes were made with: drivers before 13.2 do not tell
    _conditionals: dict[int, tuple[GraphHandle, ConditionalParams]]
    # graphs that were given to captures that failed: CUDA destroyed them with the capture
    _gone: set[GraphHandle]

    @in_context
    def create_graph(self) -> GraphHandle:
        return self._new_graph(ask(cuda.cuGraphCreate, 0))

    @in_context
    def destroy_graph(self, graph: GraphHandle) -> None:
        if graph in self._gone:
            self._gone.discard(graph)
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE",
                "cuGraphDestroy",
                description="the graph was given to a capture that failed, and is gone with it",
            )
        ask(cuda.cuGraphDestroy, graph)
        self._forget_conditionals(graph)

    def _forget_conditionals(self, graph: GraphHandle) -> None:
        """Forgets the conditional nodes of ``graph`` and of the bodies in it."""
        for node, (owner, made) in list(self._conditionals.items()):
            if owner == graph:
                self._conditionals.pop(node, None)
                for body in made.bodies:
                    self._forget_conditionals(body)

    @in_context
    def clone_graph(self, graph: GraphHandle) -> GraphHandle:
        return self._new_graph(ask(cuda.cuGraphClone, graph))

    def _new_graph(self, graph: Any) -> GraphHandle:
        handle = GraphHandle(int(graph))
        # the address of one that is gone may come back
        self._gone.discard(handle)
        for node, (_, made) in list(self._conditionals.items()):
            if handle in made.bodies:
                self._conditionals.pop(node, None)
        return handle

    @in_context
    def destroy_node(self, node: NodeHandle) -> None:
        ask(cuda.cuGraphDestroyNode, node)
        made = self._conditionals.pop(node, None)
        for body in made[1].bodies if made else ():
            self._forget_conditionals(body)

    @in_context
    def add_edges(self, graph: GraphHandle, edges: Iterable[Edge]) -> None:
        listed = list(edges)
        # the driver adds one after the other: what comes before a wrong one would stay
        before = {(edge.source, edge.target) for edge in self.edges(graph)} if listed else set()
        try:
            change_edges(cuda.cuGraphAddDependencies, graph, listed)
        except BaseException:
            added = [edge for edge in self.edges(graph) if (edge.source, edge.target) not in before]
            change_edges(cuda.cuGraphRemoveDependencies, graph, added)
            raise

    @in_context
    def remove_edges(self, graph: GraphHandle, edges: Iterable[Edge]) -> None:
        listed = list(edges)
        # one after the other too, and put back they would be in another order; and an edge with
        # data goes where a plain one was named: so look first
        if listed and (len(set(listed)) < len(listed) or not set(listed) <= set(self.edges(graph))):
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE",
                "cuGraphRemoveDependencies",
                description="one of the edges is named twice, or is not there with that data",
            )
        change_edges(cuda.cuGraphRemoveDependencies, graph, listed)

    @in_context
    def nodes(self, graph: GraphHandle) -> list[NodeHandle]:
        # asked for more than there are, the driver pads with null nodes: count first
        count = ctypes.c_size_t()
        self._list_nodes(graph, None, count)
        if not count.value:
            return []
        nodes = (ctypes.c_uint64 * count.value)()
        self._list_nodes(graph, nodes, count)
        return [NodeHandle(node) for node in nodes[: count.value]]

    def _list_nodes(self, graph: int, nodes: Any, count: Any) -> None:
        number = self._entry_points.nodes(graph, nodes, ctypes.byref(count))
        if number:
            raise error_of(result_of(number), "cuGraphGetNodes")

    def edges(self, graph: GraphHandle) -> list[Edge]:
        return [Edge(*edge) for edge in self.plain_edges(graph)]

    @in_context
    def plain_edges(self, graph: GraphHandle) -> list[PlainEdge]:
        count = ctypes.c_size_t()
        self._list_edges(graph, None, None, None, count)
        if not count.value:
            return []
        nodes: Any = ctypes.c_uint64 * count.value
        sources, targets, data = nodes(), nodes(), (EdgeData * count.value)()
        self._list_edges(graph, sources, targets, data, count)
        written = bytes(data)
        kinds: Iterable[tuple[Any, ...]] = repeat((0, 0, 0), count.value)
        if any(written):
            kinds = struct.iter_unpack("=3B5x", written)
        found: list[PlainEdge] = list(zip(sources[:], targets[:], kinds, strict=True))
        _order_joins(found)
        return found

    def _list_edges(self, graph: int, sources: Any, targets: Any, data: Any, count: Any) -> None:
        # always with edge data: programmatic edges make the plain form fail with LOSSY_QUERY
        number = self._entry_points.edges(graph, sources, targets, data, ctypes.byref(count))
        if number:
            raise error_of(result_of(number), "cuGraphGetEdges")

    @in_context
    def node_kind(self, node: NodeHandle) -> NodeKind:
        return self._kind(node)

    def _kind(self, node: NodeHandle) -> NodeKind:
        code, number = node_type_number(node)
        if code:
            raise error_of(code, "cuGraphNodeGetType")
        return _KINDS.get(number, NodeKind.UNKNOWN)

    @in_context
    def create_conditional(
        self, graph: GraphHandle, default: int = 0, *, assign_at_launch: bool = True
    ) -> ConditionalHandle:
        flags = _ASSIGN_DEFAULT if assign_at_launch else 0
        context = self._context.object
        handle = ask(cuda.cuGraphConditionalHandleCreate, graph, context, default, flags)
        return ConditionalHandle(int(handle))


def node_objects(nodes: Iterable[NodeHandle]) -> list[Any]:
    """The bindings' objects of node handles: in a list they take no plain numbers."""
    return [cuda.CUgraphNode(node) for node in nodes]


def change_edges(call: Any, graph: GraphHandle, listed: list[Edge]) -> None:
    """Adds or removes edges, in order, those of equal data together.

    One call with edges of different data gives all of them the first one's (seen on an H200).
    """
    for plain_or_not, together in groupby(listed, key=lambda edge: edge.data):
        edges = list(together)
        sources = node_objects(edge.source for edge in edges)
        targets = node_objects(edge.target for edge in edges)
        data = None if plain_or_not == (0, 0, 0) else [_edge_data(edge) for edge in edges]
        ask(call, graph, sources, targets, data, len(edges))


def _edge_data(edge: Edge) -> Any:
    data = cuda.CUgraphEdgeData()
    data.from_port, data.to_port, data.type = edge.data
    return data


def _order_joins(edges: list[PlainEdge]) -> None:
    """Puts the edges into a node in the order in which the node has its dependencies.

    The list of a graph's edges comes in another order, and an update compares this one.
    """
    counts = Counter([target for _, target, _ in edges])
    if len(counts) == len(edges):
        return
    places: dict[NodeHandle, list[int]] = {}
    for index, (_, target, _) in enumerate(edges):
        if counts[target] > 1:
            places.setdefault(target, []).append(index)
    for target, indices in places.items():
        sources, *_ = ask(cuda.cuGraphNodeGetDependencies, target, len(indices))
        rank = {int(source): position for position, source in enumerate(sources)}
        ordered = sorted((edges[index] for index in indices), key=lambda edge: rank[edge[0]])
        for index, edge in zip(indices, ordered, strict=True):
            edges[index] = edge
