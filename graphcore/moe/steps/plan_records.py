"""Records of a plan's nodes: all that a graph of it would have baked in, as values to compare."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from graphcore.moe.decisions.property_probe import Records
from graphcore.plan import GraphPlan, PlanNode, View
from graphcore.plan.records import (
    Allocate,
    Call,
    Callback,
    Condition,
    Conditional,
    Deallocate,
    Embed,
    EmbedGraph,
    Launch,
    Memcpy,
    Memset,
    RecordEvent,
    WaitEvent,
    Work,
)
from graphcore.resources.tensors import TensorRef

Refs = Mapping[str, TensorRef]
"""Where the buffers of a plan lie, by name; those that it allocates are left out."""


def plan_records(plan: GraphPlan, refs: Refs) -> Records:
    """One record for each node of ``plan``: order, work, addresses, shapes, parameters."""
    return tuple(_node(plan, node, refs) for node in plan.nodes)


def place_of(view: View, refs: Refs) -> tuple[int, int] | None:
    """First byte and past the last byte of a view; None in memory that the plan allocates."""
    ref = refs.get(view.buffer.name)
    if ref is None:
        return None
    low, high = view.extent
    return ref.address + low, ref.address + high


def _node(plan: GraphPlan, node: PlanNode, refs: Refs) -> Hashable:
    accesses = tuple(_view(each, refs) for each in (*node.reads, *node.writes))
    order = plan.after_of(node)
    return node.name, type(node.work).__name__, order, accesses, tuple(_work(node.work, refs))


def _view(view: View, refs: Refs) -> Hashable:
    ref = refs.get(view.buffer.name)
    where = view.buffer.name if ref is None else ref.address + view.offset
    return where, view.shape, view.strides, view.dtype


def _work(work: Work, refs: Refs) -> Iterator[Hashable]:
    match work:
        case Launch():
            # a kernel is told by itself: another one of the same name is another one
            yield from (id(work.kernel), work.kernel.name, work.config)
            yield tuple(_value(each, refs) for each in work.arguments)
        case Memcpy():
            yield from (_view(work.dst, refs), _view(work.src, refs))
        case Memset():
            yield from (_view(work.dst, refs), work.value)
        case Callback() | Call():
            arguments = () if isinstance(work, Callback) else work.arguments
            yield id(work.function)
            yield tuple(_value(each, refs) for each in arguments)
        case Embed():
            inner = {
                name: ref for name, view in work.bindings if (ref := _inner(view, refs)) is not None
            }
            yield plan_records(work.plan, inner)
        case EmbedGraph():
            yield from (id(work.graph), work.graph.handle)
        case RecordEvent() | WaitEvent():
            yield work.event.name
        case Allocate() | Deallocate():
            yield from (work.buffer.name, work.buffer.nbytes)
        case Conditional():
            yield from (work.form, work.condition)
            yield tuple(plan_records(body, refs) for body in work.bodies)


def _inner(view: View, refs: Refs) -> TensorRef | None:
    place = place_of(view, refs)
    if place is None:
        return None
    ref = refs[view.buffer.name]
    return TensorRef(
        ref.address + view.offset,
        view.shape,
        view.strides,
        view.dtype,
        view.itemsize,
        ref.device_kind,
        ref.device,
    )


def _value(value: Any, refs: Refs) -> Hashable:
    if isinstance(value, View):
        return _view(value, refs)
    if isinstance(value, Condition):
        return value.name
    if isinstance(value, (bool, int, float, str, bytes)):
        # NaN is no equal of itself, and 1 is one of 1.0
        return type(value).__name__, repr(value)
    return type(value).__name__, id(value)
