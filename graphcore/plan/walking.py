"""Walking plans: the order in which nodes are lowered, and what lies inside of what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphcore.errors import PlanError
from graphcore.plan.records import (
    Allocate,
    Call,
    Condition,
    Conditional,
    Deallocate,
    Embed,
    Memcpy,
    PlanNode,
    View,
)

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan


def sequence_of(plan: GraphPlan) -> Sequence[int]:
    """The indices of a plan's nodes so that each comes after what it depends on.

    Raises:
        PlanError: There is a cycle.
    """
    order = plan._ordered()
    if order.cycle:
        names = " -> ".join(plan.nodes[index].name for index in (*order.cycle, order.cycle[0]))
        raise PlanError(f"plan {plan.name!r}: expected an order of its nodes, got a cycle {names}")
    return order.sequence


def every_node(plan: GraphPlan) -> Iterator[tuple[PlanNode, bool]]:
    """Every node of a plan and of its bodies, with whether it lies in a body."""
    return _every_node(plan, False)


def _every_node(plan: GraphPlan, in_body: bool) -> Iterator[tuple[PlanNode, bool]]:
    for node in plan.nodes:
        yield node, in_body
        if isinstance(node.work, Conditional):
            for body in node.work.bodies:
                yield from _every_node(body, True)


def refuse_in_a_child(plan: GraphPlan) -> None:
    """Raises PlanError where ``plan`` has nodes that no child graph can hold."""
    for node in plan.nodes:
        if isinstance(node.work, (Conditional, Allocate, Deallocate)):
            raise PlanError(
                f"plan {plan.name!r}: node {node.name!r}: a plan that is embedded becomes a child "
                "graph, which can hold neither conditional nor memory nodes; add its nodes to the "
                "outer plan instead"
            )


def has_calls(node: PlanNode) -> bool:
    """Whether the node calls Python code, or embeds a plan that does."""
    if isinstance(node.work, Embed):
        return any(has_calls(inner) for inner, _ in every_node(node.work.plan))
    return isinstance(node.work, Call)


def uses_what_comes(node: PlanNode) -> bool:
    """Whether a node needs addresses or handles that the graph has only when it is built."""
    work = node.work
    values: tuple[Any, ...] = ()
    if isinstance(work, Embed):
        values = tuple(view for _, view in work.bindings)
    elif isinstance(work, Call):
        values = work.arguments
    elif isinstance(work, Memcpy):
        values = work.dst, work.src
    return any(
        isinstance(value, Condition)
        or (isinstance(value, View) and value.buffer.origin == "allocated")
        for value in values
    )
