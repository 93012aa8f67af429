"""Running: a plan directly on a stream, node by node, without a graph.

The nodes go in an order that keeps the plan's, so a valid plan gives the bytes of its graph. What
only a graph can do (conditional nodes) is built as a small graph of the nodes that use the
condition, and launched in their place. All is checked and made ready before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from graphcore.driver import Stream
from graphcore.driver.records import ConditionalHandle
from graphcore.executable import Graph
from graphcore.interop import use_stream
from graphcore.plan.binding import Binding
from graphcore.plan.build import Builder, Scope
from graphcore.plan.calls import BoundCall
from graphcore.plan.inner_graphs import embeddable
from graphcore.plan.issuing import GraphNodes, issue
from graphcore.plan.lowering import Lowering, named
from graphcore.plan.records import (
    Call,
    Condition,
    Conditional,
    Embed,
    EmbedGraph,
    Launch,
    PlanNode,
)
from graphcore.plan.walking import refuse_in_a_child, sequence_of
from graphcore.resources.buffer import Buffer

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan

_Step = Callable[[], object]


class Runner:
    """Runs plans on one stream.

    Args:
        builder: Lowers what has to be a graph.
        stream: Where the work goes.
    """

    def __init__(self, builder: Builder, stream: Stream) -> None:
        self._builder = builder
        self._driver = builder.driver
        self._stream = stream
        self._memory: list[Buffer] = []

    def run(self, plan: GraphPlan, binding: Binding) -> None:
        """Runs ``plan``; returns when its work is on the stream.

        Where the plan allocates, the memory goes back when the work is done, which is waited for.

        Raises:
            PlanError: A node cannot be lowered; nothing was launched.
            CudaError: The driver refused a launch; what came before it runs.
        """
        steps = self._steps(plan, self._builder.scope(plan, binding, owns_memory=False))
        try:
            for step in steps:
                step()
        finally:
            if self._memory:
                self._stream.synchronize()

    def _steps(self, plan: GraphPlan, scope: Scope) -> list[_Step]:
        for buffer in plan.buffers.values():
            if buffer.origin == "allocated":
                memory = Buffer.allocate((buffer.nbytes,), "uint8", driver=self._driver)
                self._memory.append(memory)
                scope.binding.allocated(buffer, memory.address, memory)
        lowering = Lowering(
            scope.binding,
            events=scope.events,
            conditions=_NO_CONDITIONS,
            copy_kernel=self._builder.copy_kernel,
            owns_memory=False,
        )
        sequence = sequence_of(plan)
        nodes = [plan.nodes[index] for index in sequence]
        steps: list[_Step] = []
        done = 0
        for start, stop in _spans(nodes):
            steps += [self._step(node, lowering, scope) for node in nodes[done:start]]
            steps.append(self._graph_step(plan, sequence[start:stop], scope))
            done = stop
        return steps + [self._step(node, lowering, scope) for node in nodes[done:]]

    def _step(self, node: PlanNode, lowering: Lowering, scope: Scope) -> _Step:
        work = node.work
        with named(node):
            if isinstance(work, Embed):
                return self._plan_step(work, scope)
            if isinstance(work, EmbedGraph):
                executable = embeddable(work.graph, self._driver).instantiate()
                return partial(executable.launch, self._stream)
            if isinstance(work, Call):
                call = BoundCall(work, scope.binding, _NO_CONDITIONS).with_arguments()
                return partial(self._call, call)
        params = lowering.params(node)
        return partial(issue, self._driver, params, self._stream.handle, captured=False)

    def _plan_step(self, work: Embed, scope: Scope) -> _Step:
        refuse_in_a_child(work.plan)
        events = self._builder.events_of(work.plan)
        inner = Scope(scope.binding.inner(work.bindings), events, {}, owns_memory=False)
        return partial(_run_all, self._steps(work.plan, inner))

    def _graph_step(self, plan: GraphPlan, sequence: Sequence[int], scope: Scope) -> _Step:
        """A graph of neighbouring nodes, ready to be launched."""
        handle = self._driver.create_graph()
        graph = Graph(self._driver, handle)
        self._builder.fill(plan, GraphNodes(self._driver, handle), scope, sequence)
        executable = graph.instantiate()
        return partial(executable.launch, self._stream)

    def _call(self, call: BoundCall) -> None:
        with use_stream(self._driver, self._stream):
            call.run()


_NO_CONDITIONS: dict[str, ConditionalHandle] = {}


def _run_all(steps: Sequence[_Step]) -> None:
    for step in steps:
        step()


def _spans(nodes: Sequence[PlanNode]) -> list[tuple[int, int]]:
    """Ranges of ``nodes`` that are graphs: from the first to the last use of each condition."""
    found: dict[str, tuple[int, int]] = {}
    decided = {node.work.condition.name for node in nodes if isinstance(node.work, Conditional)}
    for position, node in enumerate(nodes):
        for name in _conditions_of(node) & decided:
            start, _ = found.get(name, (position, 0))
            found[name] = start, position + 1
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(found.values()):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _conditions_of(node: PlanNode) -> set[str]:
    """Names of the conditions that a node, or one inside it, uses."""
    work = node.work
    if isinstance(work, (Launch, Call)):
        return {value.name for value in work.arguments if isinstance(value, Condition)}
    if not isinstance(work, Conditional):
        return set()
    inner = (_conditions_of(each) for body in work.bodies for each in body.nodes)
    return {work.condition.name}.union(*inner)
