"""The emulated driver's calls about graphs and executables: resolve, ask the rules, do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from graphcore.driver.api import Driver
from graphcore.driver.emulated import rules
from graphcore.driver.emulated.calls import Refused, entry, invalid
from graphcore.driver.emulated.conditional import Conditional
from graphcore.driver.emulated.execution import Executable, Observer
from graphcore.driver.emulated.faults import Faults
from graphcore.driver.emulated.graph import (
    Graph,
    Node,
    add_edges,
    refuse_edit_with_memory,
    remove_edges,
    settled,
)
from graphcore.driver.emulated.machine import Machine
from graphcore.driver.emulated.nodes import make_payload
from graphcore.driver.emulated.operation import MakesMemory
from graphcore.driver.records import (
    ConditionalHandle,
    Edge,
    ExecHandle,
    GraphHandle,
    NodeHandle,
    NodeKind,
    NodeParams,
    RawUpdate,
    StreamHandle,
    UpdateResult,
)


class GraphCalls(Driver):
    """The half of :class:`EmulatedDriver` that is about graphs and executables."""

    _machine: Machine
    _closed: bool

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called: only giving things back still works."""
        return self._closed

    @property
    def faults(self) -> Faults:
        """Faults to inject, shared by the drivers of one machine."""
        return self._machine.faults

    # ---- graphs -------------------------------------------------------------------------------

    @entry("cuGraphCreate")
    def create_graph(self) -> GraphHandle:
        return self._machine.graphs.create(self.device).handle

    @entry("cuGraphDestroy", when_closed=True)
    def destroy_graph(self, graph: GraphHandle) -> None:
        found = self._graph(graph)
        if found.parent is not None:
            raise invalid("an embedded graph dies with its node")
        if found.is_being_captured:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE", "the graph is being captured into")
        self._machine.graphs.forget(found)

    @entry("cuGraphClone")
    def clone_graph(self, graph: GraphHandle) -> GraphHandle:
        found = self._graph(graph)
        if found.has_memory_nodes or found.has_conditional_nodes:
            raise Refused(
                "CUDA_ERROR_NOT_SUPPORTED",
                "graphs with allocation, free or conditional nodes cannot be cloned",
            )
        clone, _ = found.copy()
        self._machine.graphs.register(clone)
        return clone.handle

    @entry("cuGraphAddNode")
    def add_node(
        self, graph: GraphHandle, dependencies: Iterable[NodeHandle], params: NodeParams
    ) -> NodeHandle:
        found = self._graph(graph)
        sources = self._machine.graphs.find_in(found, dependencies)
        payload = make_payload(self._machine, found, params)
        node = found.append(payload, sources)
        self._machine.graphs.register_node(node)
        return node.handle

    @entry("cuGraphDestroyNode")
    def destroy_node(self, node: NodeHandle) -> None:
        found = self._machine.graphs.find_node(node)
        refuse_edit_with_memory(found.graph)
        if found.graph.is_being_captured:
            raise invalid("the graph is being captured into", node=node)
        self._machine.graphs.forget_node(found)
        found.graph.remove(found)

    @entry("cuGraphAddDependencies")
    def add_edges(self, graph: GraphHandle, edges: Iterable[Edge]) -> None:
        found = self._graph(graph)
        add_edges(found, self._machine.graphs.find_edges(found, edges))

    @entry("cuGraphRemoveDependencies")
    def remove_edges(self, graph: GraphHandle, edges: Iterable[Edge]) -> None:
        found = self._graph(graph)
        remove_edges(found, self._machine.graphs.find_edges(found, edges))

    @entry("cuGraphGetNodes")
    def nodes(self, graph: GraphHandle) -> list[NodeHandle]:
        return [node.handle for node in self._graph(graph).nodes]

    @entry("cuGraphGetEdges")
    def edges(self, graph: GraphHandle) -> list[Edge]:
        return self._graph(graph).edges()

    @entry("cuGraphGetNodes")
    def private_memory(self, graph: GraphHandle) -> list[tuple[int, int]]:
        functions = (node.payload.function for node in self._graph(graph).all_nodes())
        operations = (function.operation for function in functions if function is not None)
        makers = (each for each in operations if isinstance(each, MakesMemory))
        return list(dict.fromkeys(piece for each in makers for piece in each.private_memory))

    @entry("cuGraphNodeGetType")
    def node_kind(self, node: NodeHandle) -> NodeKind:
        return self._machine.graphs.find_node(node).kind

    @entry("cuGraphNodeGetParams")
    def node_params(self, node: NodeHandle) -> NodeParams:
        return self._machine.graphs.find_node(node).params

    @entry("cuGraphNodeSetParams")
    def set_node_params(self, node: NodeHandle, params: NodeParams) -> None:
        found = self._machine.graphs.find_node(node)
        # a child's graph changes in an executable only
        fixed = rules.FIXED_KINDS | {NodeKind.CHILD}
        rules.check_kind(found.payload, params.kind, fixed)
        found.payload = settled(make_payload(self._machine, found.graph, params))

    @entry("cuGraphConditionalHandleCreate")
    def create_conditional(
        self, graph: GraphHandle, default: int = 0, *, assign_at_launch: bool = True
    ) -> ConditionalHandle:
        if not 0 <= default < 2**32:
            raise invalid(f"default: expected a 32-bit unsigned integer, got {default}")
        conditional = Conditional(default, assign_at_launch=assign_at_launch)
        self._graph(graph).conditionals.append(conditional)
        return conditional.handle

    # ---- executables --------------------------------------------------------------------------

    @entry("cuGraphInstantiateWithParams")
    def instantiate(
        self, graph: GraphHandle, *, auto_free: bool = False, use_node_priority: bool = False
    ) -> ExecHandle:
        found = self._graph(graph)
        if found.parent is not None and found.parent.kind is NodeKind.CONDITIONAL:
            raise Refused(
                "CUDA_ERROR_NOT_SUPPORTED", "a conditional body is instantiated with its parent"
            )
        rules.check_instantiate(found)
        self._machine.captures.refuse_unsafe("instantiating a graph")
        executable = Executable(found, auto_free=auto_free)
        self._machine.memory.charge(executable.device, executable.size)
        found.was_instantiated = True
        found.executables.add(executable)
        self._machine.executables.add(executable)
        return executable.handle

    @entry("cuGraphExecDestroy", when_closed=True)
    def destroy_exec(self, executable: ExecHandle) -> None:
        found = self._executable(executable)
        self._machine.captures.refuse_unsafe("destroying an executable")
        self._machine.executables.remove(executable)
        found.is_destroyed = True
        self._machine.memory.discharge(found.device, found.size)

    @entry("cuGraphLaunch")
    def launch_graph(self, executable: ExecHandle, stream: StreamHandle) -> None:
        found = self._executable(executable)
        state = self._machine.streams.find(stream, self.device)
        if self._machine.captures.target(state) is not None:
            # an executable is captured by nobody: embed its graph as a child node
            self._machine.captures.refuse_capturing(state)
        self._machine.runner.launch(found)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Tells ``observer`` of every node that a graph runs inside the block, on any device."""
        runner = self._machine.runner
        before, runner.observer = runner.observer, observer
        try:
            yield
        finally:
            runner.observer = before

    @entry("cuGraphLaunch")
    def bind_launch(self, executable: ExecHandle, stream: StreamHandle) -> Callable[[], object]:
        """A closure over :meth:`launch_graph`; it raises by itself and returns None."""
        self._executable(executable)
        self._machine.streams.find(stream, self.device)

        def launch() -> None:
            self.launch_graph(executable, stream)

        return launch

    def raise_launch(self, result: object) -> None:
        """Raises the exception a bound launch raised; its results are never failures here."""
        if isinstance(result, BaseException):
            raise result

    @entry("cuGraphUpload")
    def upload(self, executable: ExecHandle, stream: StreamHandle) -> None:
        found = self._executable(executable)
        self._machine.captures.refuse_capturing(self._machine.streams.find(stream, self.device))
        found.is_uploaded = True

    @entry("cuGraphExecUpdate")
    def update_exec(self, executable: ExecHandle, graph: GraphHandle) -> RawUpdate:
        found = self._executable(executable)
        new = self._graph(graph)
        if new.has_memory_nodes and any(one is not found for one in new.live_executables()):
            raise Refused(
                "CUDA_ERROR_NOT_SUPPORTED",
                "the graph has allocation or free nodes and another executable",
            )
        pairs = rules.pair_graphs(found.graph, new)
        if isinstance(pairs, rules.UpdateRefusal):
            return RawUpdate(pairs.result, _handle(pairs.node), _handle(pairs.from_node))
        found.take(pairs)
        if new.has_memory_nodes:
            new.executables.add(found)  # it has the one executable that it may have
        return RawUpdate(UpdateResult.SUCCESS)

    @entry("cuGraphExecNodeSetParams")
    def set_exec_node_params(
        self, executable: ExecHandle, node: NodeHandle, params: NodeParams
    ) -> None:
        found, target = self._exec_node(executable, node)
        rules.check_kind(target.payload, params.kind)
        payload = settled(make_payload(self._machine, found.graph, params))
        pairs = rules.pair_node(target, payload)
        for old, new in pairs:
            old.payload = rules.merged(old.payload, new.payload)
        target.payload = rules.merged_alone(target.payload, payload)

    @entry("cuGraphNodeSetEnabled")
    def set_node_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        self._switchable(executable, node).is_enabled = bool(enabled)

    @entry("cuGraphNodeGetEnabled")
    def node_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool:
        return self._switchable(executable, node).is_enabled

    def _switchable(self, executable: ExecHandle, node: NodeHandle) -> Node:
        _, target = self._exec_node(executable, node)
        if target.kind not in rules.SWITCHABLE_KINDS:
            raise invalid(
                f"nodes of kind {target.kind.value} cannot be switched off and on", node=node
            )
        return target

    def _exec_node(self, executable: ExecHandle, node: NodeHandle) -> tuple[Executable, Node]:
        found = self._executable(executable)
        # a node handle dies with the graph it came from, though the executable lives on
        self._machine.graphs.find_node(node)
        return found, found.node(node)

    def _graph(self, handle: int) -> Graph:
        return self._machine.graphs.find(handle)

    def _executable(self, handle: int) -> Executable:
        return self._machine.executables.find(handle)


def _handle(node: Node | None) -> NodeHandle | None:
    return None if node is None else node.handle
