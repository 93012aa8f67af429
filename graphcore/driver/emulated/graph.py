"""Graph descriptions: nodes with payloads, edges in order, editing, copies.

Assumes one thread at a time per graph, as CUDA does. The order in which nodes and edges were added,
and in which nodes became sinks, is kept: a whole-graph update pairs nodes by it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.emulated.conditional import Conditional
from graphcore.driver.emulated.functions import Function
from graphcore.driver.emulated.handles import Table, draw_handle
from graphcore.driver.emulated.memory import Memory
from graphcore.driver.emulated.streams import EventState
from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    Edge,
    GraphHandle,
    KernelParams,
    NodeHandle,
    NodeKind,
    NodeParams,
)

if TYPE_CHECKING:
    from graphcore.driver.emulated.execution import Executable

EdgeData = tuple[int, int, int]
PLAIN: EdgeData = (0, 0, 0)
# CUDA's data of an edge that programmatic dependent launch makes: from the kernel's programmatic
# port, to the whole of the next, of the programmatic type
PROGRAMMATIC: EdgeData = (1, 0, 1)
_MEMORY_KINDS = frozenset({NodeKind.ALLOC, NodeKind.FREE})


class Reservation:
    """The address of a graph-owned allocation, given back with the last graph that has it."""

    def __init__(self, memory: Memory, address: int) -> None:
        self.address = address
        weakref.finalize(self, memory.release, address).atexit = False


@dataclass(frozen=True, slots=True)
class Payload:
    """What a node does: its parameters and the objects their handles stand for."""

    params: NodeParams
    function: Function | None = None
    event: EventState | None = None
    child: Graph | None = None
    conditional: Conditional | None = None
    bodies: tuple[Graph, ...] = ()
    reservation: Reservation | None = None

    @property
    def inner_graphs(self) -> tuple[Graph, ...]:
        return self.bodies if self.child is None else (self.child,)


class Node:
    """A node of one graph. ``sources`` are what it depends on, in edge order."""

    def __init__(self, graph: Graph, payload: Payload) -> None:
        self.handle = NodeHandle(draw_handle())
        self.graph = graph
        self.payload = payload
        self.sources: dict[Node, EdgeData] = {}
        self.targets: dict[Node, None] = {}
        self.is_enabled = True

    @property
    def kind(self) -> NodeKind:
        return self.payload.params.kind

    @property
    def params(self) -> NodeParams:
        """The parameters with the handles of embedded graphs filled in."""
        params = self.payload.params
        if isinstance(params, ChildParams) and self.payload.child is not None:
            return replace(params, graph=self.payload.child.handle)
        if isinstance(params, ConditionalParams):
            return replace(params, bodies=tuple(body.handle for body in self.payload.bodies))
        return params


class Graph:
    """A graph description. ``parent`` is the node it is embedded in, or None."""

    def __init__(self, device: int, parent: Node | None = None) -> None:
        self.handle = GraphHandle(draw_handle())
        self.device = device
        self.parent = parent
        self.nodes: dict[Node, None] = {}
        self.conditionals: list[Conditional] = []
        self.is_being_captured = False
        self.was_instantiated = False
        self.executables: weakref.WeakSet[Executable] = weakref.WeakSet()

    def live_executables(self) -> list[Executable]:
        """Executables made from it and not destroyed."""
        return [one for one in self.executables if not one.is_destroyed]

    @property
    def has_memory_nodes(self) -> bool:
        return any(node.kind in _MEMORY_KINDS for node in self.all_nodes())

    @property
    def has_conditional_nodes(self) -> bool:
        return any(node.kind is NodeKind.CONDITIONAL for node in self.all_nodes())

    def all_nodes(self) -> Iterator[Node]:
        """Its nodes and those of the graphs embedded in them."""
        for node in self.nodes:
            yield node
            for inner in node.payload.inner_graphs:
                yield from inner.all_nodes()

    def edges(self) -> list[Edge]:
        return [
            Edge(source.handle, node.handle, data)
            for node in self.nodes
            for source, data in node.sources.items()
        ]

    # ---- editing -------------------------------------------------------------------------------

    def append(self, payload: Payload, sources: Iterable[Node] = ()) -> Node:
        """Adds a node that depends on ``sources``."""
        is_programmatic = _is_programmatic(payload.params)
        node = Node(self, settled(payload))
        self.nodes[node] = None
        for source in sources:
            follows_kernel = is_programmatic and source.kind is NodeKind.KERNEL
            self.connect(source, node, PROGRAMMATIC if follows_kernel else PLAIN)
        for inner in payload.inner_graphs:
            inner.parent = node
        return node

    def connect(self, source: Node, target: Node, data: EdgeData = PLAIN) -> None:
        target.sources[source] = data
        source.targets[target] = None

    def disconnect(self, source: Node, target: Node) -> None:
        del target.sources[source]
        del source.targets[target]

    def remove(self, node: Node) -> None:
        for source in list(node.sources):
            self.disconnect(source, node)
        for target in list(node.targets):
            self.disconnect(node, target)
        del self.nodes[node]

    def copy(self, parent: Node | None = None) -> tuple[Graph, dict[Node, Node]]:
        """A copy with embedded graphs copied too, and which node became which."""
        graph = Graph(self.device, parent)
        became = graph.take(self)
        graph.conditionals = list(self.conditionals)
        return graph, became

    def take(self, other: Graph) -> dict[Node, Node]:
        """Adds copies of the nodes of ``other`` and their edges; which node became which."""
        became = {node: self.append(_copied(node.payload)) for node in other.nodes}
        for node, twin in became.items():
            for source, data in node.sources.items():
                self.connect(became[source], twin, data)
        return became


def _is_programmatic(params: NodeParams) -> bool:
    return isinstance(params, KernelParams) and params.config.programmatic


def settled(payload: Payload) -> Payload:
    """The payload as a node keeps it: programmatic launch becomes the data of its edges."""
    params = payload.params
    if not isinstance(params, KernelParams) or not params.config.programmatic:
        return payload
    config = replace(params.config, programmatic=False)
    return replace(payload, params=replace(params, config=config))


def _copied(payload: Payload) -> Payload:
    if payload.child is not None:
        return replace(payload, child=payload.child.copy()[0])
    if payload.bodies:
        return replace(payload, bodies=tuple(body.copy()[0] for body in payload.bodies))
    return payload


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """``nodes`` and everything they depend on."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.sources)
    return found


class Graphs:
    """The graphs and nodes of a machine that have handles callers may use."""

    def __init__(self) -> None:
        self._graphs: Table[Graph] = Table("graph", "CUDA_ERROR_INVALID_VALUE")
        self._nodes: Table[Node] = Table("graph node", "CUDA_ERROR_INVALID_VALUE")

    def create(self, device: int, parent: Node | None = None) -> Graph:
        graph = Graph(device, parent)
        self._graphs.add(graph)
        return graph

    def register(self, graph: Graph) -> None:
        """Makes a copied graph and all in it reachable by handle."""
        self._graphs.add(graph)
        for node in graph.nodes:
            self.register_node(node)

    def register_node(self, node: Node) -> None:
        self._nodes.add(node)
        for inner in node.payload.inner_graphs:
            self.register(inner)

    def find(self, handle: int) -> Graph:
        return self._graphs.find(handle)

    def find_node(self, handle: int) -> Node:
        return self._nodes.find(handle)

    def find_in(self, graph: Graph, handles: Iterable[int]) -> list[Node]:
        """Nodes of ``graph``; INVALID_VALUE for another graph's, or one named twice."""
        nodes = []
        for handle in handles:
            node = self.find_node(handle)
            if node.graph is not graph:
                raise invalid(f"node {handle:#x} belongs to another graph", node=handle)
            if node in nodes:
                raise invalid(f"node {handle:#x} is named twice", node=handle)
            nodes.append(node)
        return nodes

    def forget(self, graph: Graph) -> None:
        """The graph's handle and those of all in it die."""
        self._graphs.remove(graph.handle)
        for node in graph.nodes:
            self.forget_node(node)

    def forget_node(self, node: Node) -> None:
        self._nodes.remove(node.handle)
        for inner in node.payload.inner_graphs:
            self.forget(inner)

    def find_edges(self, graph: Graph, edges: Iterable[Edge]) -> list[tuple[Node, Node, EdgeData]]:
        """The end nodes of ``edges``, checked to lie in ``graph``."""
        found = []
        for edge in edges:
            (source,) = self.find_in(graph, [edge.source])
            (target,) = self.find_in(graph, [edge.target])
            if source is target:
                raise invalid(f"node {edge.source:#x} cannot depend on itself", node=edge.source)
            found.append((source, target, edge.data))
        return found


def add_edges(graph: Graph, edges: list[tuple[Node, Node, EdgeData]]) -> None:
    """Adds all of ``edges`` or none."""
    seen = set()
    for source, target, _ in edges:
        if source in target.sources or (source, target) in seen:
            raise invalid(f"there is an edge from {source.handle:#x} to {target.handle:#x} already")
        seen.add((source, target))
    for source, target, data in edges:
        graph.connect(source, target, data)


def remove_edges(graph: Graph, edges: list[tuple[Node, Node, EdgeData]]) -> None:
    """Removes all of ``edges`` or none; their data must match too."""
    refuse_edit_with_memory(graph)
    seen = set()
    for source, target, data in edges:
        is_twice = (source, target) in seen
        seen.add((source, target))
        if is_twice or target.sources.get(source) != data:
            raise invalid(f"there is no such edge from {source.handle:#x} to {target.handle:#x}")
    for source, target, _ in edges:
        graph.disconnect(source, target)


def refuse_edit_with_memory(graph: Graph) -> None:
    """Nodes and edges of a graph with allocation or free nodes cannot be taken away."""
    if any(node.kind in _MEMORY_KINDS for node in graph.nodes):
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED", "the graph has allocation or free nodes: it only grows"
        )
