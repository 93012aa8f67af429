"""Executables: a private copy of a graph, and running it node by node.

A run is sequential: ``order="program"`` runs nodes in creation order as far as dependencies allow,
``order="adversarial"`` draws another topological order for every launch, so that a result that
needs a missing dependency changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal

from graphcore.driver import active
from graphcore.driver.emulated.calls import invalid
from graphcore.driver.emulated.graph import Graph, Node
from graphcore.driver.emulated.handles import draw_handle
from graphcore.driver.emulated.memory import Memory, run_copy, run_fill
from graphcore.driver.emulated.rules import Pairs, merged, topological
from graphcore.driver.records import (
    AllocParams,
    ConditionalParams,
    ExecHandle,
    FreeParams,
    HostParams,
    KernelParams,
    NodeKind,
)

Order = Literal["program", "adversarial"]
ORDERS: tuple[Order, ...] = ("program", "adversarial")
# what an H200 takes of device memory for each node of an executable, rounded
BYTES_PER_NODE = 2560


class Executable:
    """An executable.

    ``by_source`` finds its nodes by the handles of the graph it was made from, inner graphs' too.
    """

    def __init__(self, graph: Graph, *, auto_free: bool) -> None:
        self.handle = ExecHandle(draw_handle())
        self.auto_free = auto_free
        self.is_destroyed = False
        # launched or uploaded: from then on CUDA keeps more of it than it says
        self.is_uploaded = False
        self.device = graph.device
        self.graph, _ = graph.copy()
        pairs = zip(graph.all_nodes(), self.graph.all_nodes(), strict=True)
        self.by_source: dict[int, Node] = {node.handle: twin for node, twin in pairs}
        self.size = BYTES_PER_NODE * sum(1 for _ in self.graph.all_nodes())
        self.orders = {inner: topological(inner) for inner in _all_graphs(self.graph)}

    @property
    def allocations(self) -> dict[int, int]:
        """Size of each graph-owned allocation by address."""
        return {
            node.payload.params.address: node.payload.params.size
            for node in self.graph.nodes
            if isinstance(node.payload.params, AllocParams)
        }

    def node(self, source: int) -> Node:
        """The node made from the graph's node ``source``."""
        node = self.by_source.get(source)
        if node is None:
            raise invalid(f"node {source:#x} is not of the executable's graph", node=source)
        return node

    def take(self, pairs: Pairs) -> None:
        """Makes an accepted whole-graph update."""
        for old, new in pairs:
            old.payload = merged(old.payload, new.payload, is_uploaded=self.is_uploaded)


def _all_graphs(graph: Graph) -> list[Graph]:
    inner = [one for node in graph.nodes for one in node.payload.inner_graphs]
    return [graph, *(found for one in inner for found in _all_graphs(one))]


Observer = Callable[[Executable, Node, float, float], None]
"""Told of every node that ran: its executable, itself, and when it began and ended (seconds)."""


class Runner:
    """Runs executables on the memory of a machine."""

    def __init__(self, memory: Memory, order: Order, seed: int) -> None:
        self._memory = memory
        self._order = order
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret
        self.observer: Observer | None = None

    def launch(self, executable: Executable) -> None:
        """Runs ``executable`` once; refuses before anything runs."""
        self._start_allocations(executable)
        executable.is_uploaded = True
        for node in executable.graph.all_nodes():
            if node.payload.conditional is not None:
                node.payload.conditional.start_launch()
        self._run(executable, executable.graph)

    def _start_allocations(self, executable: Executable) -> None:
        if not executable.graph.has_memory_nodes:
            return
        allocations = executable.allocations
        live = [address for address in allocations if self._memory.is_live(address)]
        if live and not executable.auto_free:
            names = ", ".join(f"{address:#x}" for address in live)
            raise invalid(f"the previous launch's allocations are not freed: {names}")
        for address in live:
            self._memory.free_reserved(address)
        self._memory.check_free(executable.device, sum(allocations.values()))

    def _run(self, executable: Executable, graph: Graph) -> None:
        order = executable.orders[graph]
        if self._order == "adversarial":
            order = self._shuffled(order)
        for node in order:
            if not node.is_enabled:
                continue
            start = time.perf_counter()
            try:
                self._run_node(executable, node)
            except Exception as error:
                error.add_note(f"while running {_described(node)}")
                raise
            if self.observer is not None:
                self.observer(executable, node, start, time.perf_counter())

    def _run_node(self, executable: Executable, node: Node) -> None:
        payload = node.payload
        params = payload.params
        if isinstance(params, KernelParams):
            assert payload.function is not None
            payload.function.operation.run(params.config, params.arguments)
        elif isinstance(params, ConditionalParams):
            self._run_conditional(executable, node, params.form)
        elif payload.child is not None:
            self._run(executable, payload.child)
        elif isinstance(params, HostParams):
            assert params.callback is not None
            with active.host_callback():
                params.callback()
        elif isinstance(params, AllocParams):
            self._memory.start_reserved(params.address)
        elif isinstance(params, FreeParams):
            self._memory.free_reserved(params.address)
        elif params.kind is NodeKind.EVENT_RECORD:
            assert payload.event is not None
            payload.event.record_now()
        else:
            _RUN_AT_ONCE.get(params.kind, _do_nothing)(params)

    def _run_conditional(self, executable: Executable, node: Node, form: str) -> None:
        conditional, bodies = node.payload.conditional, node.payload.bodies
        assert conditional is not None
        if form == "while":
            while conditional.value:
                self._run(executable, bodies[0])
            return
        chosen = conditional.value if form == "switch" else int(not conditional.value)
        if chosen < len(bodies):
            self._run(executable, bodies[chosen])

    def _shuffled(self, nodes: list[Node]) -> list[Node]:
        """A topological order drawn at random."""
        waiting = {node: len(node.sources) for node in nodes}
        ready = [node for node in nodes if not waiting[node]]
        order = []
        while ready:
            node = ready.pop(self._random.randrange(len(ready)))
            order.append(node)
            for target in node.targets:
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
        return order


def _described(node: Node) -> str:
    function = node.payload.function
    name = f" {function.operation.name}" if function else ""
    return f"{node.kind.value} node{name} {node.handle:#x}"


def _do_nothing(_params: object) -> None:
    """Empty nodes and event waits: a sequential run has waited already."""


_RUN_AT_ONCE: dict[NodeKind, Callable[[Any], None]] = {
    NodeKind.MEMCPY: run_copy,
    NodeKind.MEMSET: run_fill,
}
