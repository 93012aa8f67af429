"""Building: a plan as nodes of a graph, with the order that the plan says.

The same walk adds nodes to a graph by hand or captures them on a stream; bodies and child graphs
are always added by hand. The graph of an allocation chooses its address, so views of it are lowered
when their node is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphcore.driver import Driver, Event, active
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalHandle,
    ConditionalParams,
    EmptyParams,
    GraphHandle,
    NodeHandle,
)
from graphcore.errors import CudaError, PlanError
from graphcore.executable.handles import GraphResource
from graphcore.graph.reading import Annotation
from graphcore.plan.binding import Binding
from graphcore.plan.calls import BoundCall
from graphcore.plan.inner_graphs import embeddable, refuse_collectives, without_copies
from graphcore.plan.issuing import CapturedNodes, GraphNodes
from graphcore.plan.lowering import Lowering, named
from graphcore.plan.real_events import make_events
from graphcore.plan.records import (
    Allocate,
    Call,
    Callback,
    Conditional,
    Embed,
    EmbedGraph,
    Launch,
    Memcpy,
    PlanNode,
    View,
)
from graphcore.plan.walking import (
    every_node,
    has_calls,
    refuse_in_a_child,
    sequence_of,
    uses_what_comes,
)
from graphcore.resources.lifetime import Owner, collect

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan

_Handles = dict[int, tuple[NodeHandle, ...]]
"""What each node of a plan became, by its index."""


@dataclass(frozen=True)
class Scope:
    """Where nodes of a plan are lowered.

    Args:
        binding: Where the buffers lie.
        events: The real events by name.
        conditions: Handles of conditions by name, those of graphs around this one too.
        in_body: Whether the graph is, or lies in, a conditional body.
        owns_memory: Whether allocation nodes make memory.
    """

    binding: Binding
    events: Mapping[str, Event]
    conditions: Mapping[str, ConditionalHandle]
    in_body: bool = False
    owns_memory: bool = True


class Builder:
    """Builds one graph of a plan; collects what the graph must own.

    Args:
        driver: The driver.
        given: The events that were given, by name.
        copy_kernel: What does copies that no memcpy node does, or None.

    Attributes:
        rows_by_kernel: Whether that does copies of float32 rows, too.
    """

    def __init__(self, driver: Driver, given: Mapping[str, Event], copy_kernel: Any) -> None:
        self.driver = driver
        self.copy_kernel = copy_kernel
        self.rows_by_kernel = False
        self.owners: list[Owner] = []
        self.annotations: list[Annotation] = []
        self.names: dict[str, tuple[NodeHandle, ...]] = {}
        self._given = given
        # made ahead of a capture, by id of the plan node: child graphs that are captures of their
        # own, and the arguments of calls (making tensors would be captured too)
        self._ready: dict[int, GraphResource] = {}
        self._calls: dict[int, BoundCall] = {}

    def scope(self, plan: GraphPlan, binding: Binding, **changes: Any) -> Scope:
        """The scope of a plan that is no body; it takes the plan's allocations."""
        return Scope(binding.copy(), self.events_of(plan), {}, **changes)

    def events_of(self, plan: GraphPlan) -> dict[str, Event]:
        """The real events of one plan; the graph owns them."""
        events = make_events(plan, self._given, self.driver)
        self.owners += [Owner(event, f"event {name}") for name, event in events.items()]
        return events

    def build(self, plan: GraphPlan, place: GraphNodes, scope: Scope) -> None:
        """Adds the plan's nodes to ``place``, with owners, labels and names.

        Raises:
            PlanError: A node that cannot be lowered; names it.
            CudaError: The driver's refusal, with the node in a note.
        """
        self.owners += scope.binding.owners()
        handles = self.fill(plan, place, scope, sequence_of(plan), self.annotations)
        self.names = {plan.nodes[index].name: made for index, made in handles.items()}
        if isinstance(place, CapturedNodes):
            sources = {index for node in plan.nodes for index in plan.after_of(node)}
            last = [each for index, made in handles.items() if index not in sources
                    for each in made]  # fmt: skip
            place.come_after(list(dict.fromkeys(last)) or place.roots)

    def fill(
        self,
        plan: GraphPlan,
        place: GraphNodes,
        scope: Scope,
        sequence: Sequence[int],
        annotations: list[Annotation] | None = None,
    ) -> _Handles:
        """Adds the nodes ``sequence`` of a plan or body; what comes before them counts as done."""
        nodes = [plan.nodes[index] for index in sequence]
        lowering = self._lowering(scope, place.graph, nodes)
        handles: _Handles = {}
        for node in nodes:
            sources = [one for index in plan.after_of(node) for one in handles.get(index, ())]
            after = tuple(dict.fromkeys(sources)) or place.roots
            first = place.count
            try:
                handles[node.index] = self._add(node, place, after, lowering, scope)
            except CudaError as error:
                error.add_note(f"while adding node {node.name!r} of plan {plan.name!r}")
                raise
            if annotations is not None and node.label:
                _annotate(annotations, first, place.count, node.label)
        return handles

    def _lowering(self, scope: Scope, graph: GraphHandle, nodes: Sequence[PlanNode]) -> Lowering:
        conditions = dict(scope.conditions)
        for node in nodes:
            if isinstance(node.work, Conditional):
                condition = node.work.condition
                conditions[condition.name] = self.driver.create_conditional(
                    graph,
                    condition.default or 0,
                    assign_at_launch=condition.default is not None,
                )
        return Lowering(
            scope.binding,
            events=scope.events,
            conditions=conditions,
            copy_kernel=self.copy_kernel,
            in_body=scope.in_body,
            owns_memory=scope.owns_memory,
            rows_by_kernel=self.rows_by_kernel,
        )

    def _add(
        self,
        node: PlanNode,
        place: GraphNodes,
        after: tuple[NodeHandle, ...],
        lowering: Lowering,
        scope: Scope,
    ) -> tuple[NodeHandle, ...]:
        work = node.work
        if isinstance(work, Call) and isinstance(place, CapturedNodes):
            return self._capture_call(node, place, after, lowering)
        if isinstance(work, (Embed, EmbedGraph, Call)):
            child = self._child(node, lowering, scope)
            return place.add(ChildParams(child.handle) if child else EmptyParams(), after)
        params = lowering.params(node)
        made = place.add(params, after)
        if isinstance(work, Allocate) and isinstance(params, AllocParams):
            found = self.driver.node_params(made[0])
            assert isinstance(found, AllocParams)
            scope.binding.allocated(work.buffer, found.address)
        elif isinstance(work, Conditional):
            with named(node):
                self._fill_bodies(work, made[0], lowering, scope)
        elif isinstance(work, Launch):
            self.owners.append(Owner(work.kernel, f"kernel {work.kernel.name}"))
        elif isinstance(work, Callback):
            self.owners.append(Owner(work.function, node.name))
        return made

    def _fill_bodies(
        self, work: Conditional, node: NodeHandle, lowering: Lowering, scope: Scope
    ) -> None:
        found = self.driver.node_params(node)
        assert isinstance(found, ConditionalParams)
        inner = replace(scope, conditions=lowering.conditions, in_body=True)
        for body, graph in zip(work.bodies, found.bodies, strict=True):
            self.fill(body, GraphNodes(self.driver, graph), inner, sequence_of(body))

    # ---- graphs in the graph -------------------------------------------------------------------

    def prepare(self, plan: GraphPlan, scope: Scope) -> list[BoundCall]:
        """Makes ahead what cannot be made inside a capture; the calls that are to be warmed up."""
        lowering = self._lowering(scope, GraphHandle(0), ())
        waiting = []
        for node, in_body in every_node(plan):
            work = node.work
            comes = uses_what_comes(node)
            if isinstance(work, Call) and not in_body:
                call = BoundCall(work, scope.binding, {})
                if not comes:
                    with named(node):
                        call = self._calls[id(node)] = call.with_arguments()
                waiting.append(call)
            elif isinstance(work, Launch):
                self.driver.function(work.kernel)  # loading one inside a capture may allocate
            elif isinstance(work, Memcpy) and not comes:
                lowering.in_body = in_body
                lowering.params(node)  # which loads the kernel of those that one does
            elif isinstance(work, (Call, Embed)) and not comes and has_calls(node):
                lowering.in_body = in_body
                child = self._child(node, lowering, replace(scope, in_body=in_body))
                if child is not None:
                    self._ready[id(node)] = child
        return waiting

    def _child(self, node: PlanNode, lowering: Lowering, scope: Scope) -> GraphResource | None:
        """The graph of a node that becomes a child node; None where it is empty.

        Raises:
            PlanError: It cannot be embedded here.
        """
        ready = self._ready.get(id(node))
        if ready is not None:
            return ready
        with named(node):
            return self._make_child(node, lowering, scope)

    def _make_child(self, node: PlanNode, lowering: Lowering, scope: Scope) -> GraphResource | None:
        work = node.work
        if isinstance(work, Embed):
            resource = GraphResource(self.driver, self.driver.create_graph(), owned=True)
            refuse_in_a_child(work.plan)
            binding = scope.binding.inner(work.bindings)
            inner = Scope(binding, self.events_of(work.plan), {}, in_body=scope.in_body)
            place = GraphNodes(self.driver, resource.handle)
            self.fill(work.plan, place, inner, sequence_of(work.plan))
            return resource
        if isinstance(work, EmbedGraph):
            graph = embeddable(work.graph, self.driver)
        else:
            assert isinstance(work, Call)
            if active.current() is not None:
                raise PlanError(
                    "expected a call that can be captured before this capture began, got one in "
                    "a body or an embedded plan that works on memory the plan allocates, or in a "
                    "capture of your own; build the plan instead"
                )
            self._own_call(node, work)
            graph = BoundCall(work, scope.binding, lowering.conditions).capture()
        self.owners += graph.owners
        if not self.driver.nodes(graph.handle):
            return None
        if not scope.in_body:
            return graph.resource
        refuse_collectives(graph.owners)
        return without_copies(graph.handle, lowering) or graph.resource

    def _capture_call(
        self,
        node: PlanNode,
        place: CapturedNodes,
        after: tuple[NodeHandle, ...],
        lowering: Lowering,
    ) -> tuple[NodeHandle, ...]:
        """Captures a call where it stands; its nodes are the last ones that it left."""
        work = node.work
        assert isinstance(work, Call)
        place.come_after(after)
        self._own_call(node, work)
        call = self._calls.get(id(node))
        if call is None:
            with named(node):
                call = BoundCall(work, lowering.binding, lowering.conditions).with_arguments()
        call.run()
        place.recount()
        return place.frontier()

    def _own_call(self, node: PlanNode, call: Call) -> None:
        self.owners.append(Owner(call.function, node.name))
        for index, value in enumerate(call.arguments):
            if not isinstance(value, View):
                self.owners += collect(value, f"{node.name} argument {index}")


def _annotate(annotations: list[Annotation], start: int, stop: int, label: str) -> None:
    """Notes a label; neighbours with the same one share a range."""
    if annotations and annotations[-1][1:] == (start, label):
        start = annotations.pop()[0]
    annotations.append((start, stop, label))
