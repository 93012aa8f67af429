"""Capturing: a plan's work captured on one stream, each node with exactly the plan's dependencies.

Kernels, copies, fills, callbacks, events and calls are captured as the stream calls they are; child
graphs, conditional and memory nodes are added to the graph under capture by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphcore.driver import active
from graphcore.driver.records import StreamHandle
from graphcore.executable import Graph, capture
from graphcore.plan.binding import Binding
from graphcore.plan.build import Builder
from graphcore.plan.issuing import CapturedNodes

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan


def capture_plan(
    plan: GraphPlan, binding: Binding, builder: Builder, capture_options: dict[str, Any]
) -> Graph:
    """A graph of one capture of ``plan``; raises as :func:`graphcore.capture` and the builder."""
    capturing = capture(driver=builder.driver, **capture_options)
    scope = builder.scope(plan, binding)
    for call in builder.prepare(plan, scope):
        call.warm_up(capturing)
    with capturing:
        builder.build(plan, CapturedNodes(builder.driver, capturing.stream.handle), scope)
        _keep(builder)
    graph = capturing.graph
    graph.annotations = tuple(builder.annotations)
    graph.plan_nodes = dict(builder.names)
    return graph


def add_to_capture(
    plan: GraphPlan, binding: Binding, builder: Builder, stream: StreamHandle
) -> None:
    """Adds ``plan`` to a capture that is under way on ``stream``, after what the stream has.

    Nothing is warmed up there: a call's function must have run before.
    """
    builder.build(plan, CapturedNodes(builder.driver, stream), builder.scope(plan, binding))
    _keep(builder)


def _keep(builder: Builder) -> None:
    for owner in builder.owners:
        active.keep(owner.object, owner.label)
