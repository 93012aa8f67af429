"""What can be wrong with one node by itself: buffers, bounds, layouts, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphcore.plan.embedding import misfits, unmatched_names
from graphcore.plan.levels import Level
from graphcore.plan.records import (
    Allocate,
    Call,
    Callback,
    Conditional,
    Deallocate,
    Embed,
    Launch,
    Memcpy,
    Memset,
    PlanNode,
    PlanProblem,
    RecordEvent,
    View,
    WaitEvent,
)
from graphcore.plan.rows import dense_rows
from graphcore.plan.shared_bytes import overlaps_itself, share_bytes
from graphcore.resources.dtypes import DTYPES

# why the driver refuses these in the body of a conditional node
_NOT_IN_A_BODY = {
    Allocate: "memory nodes",
    Deallocate: "memory nodes",
    Callback: "host callbacks",
    RecordEvent: "event nodes",
    WaitEvent: "event nodes",
}
_NOT_IN_A_CHILD = {
    Allocate: "memory nodes",
    Deallocate: "memory nodes",
    Conditional: "conditional nodes",
}


def node_problems(level: Level, node: PlanNode) -> Iterator[PlanProblem]:
    """Problems of one node that need no other node to be seen."""
    name = level.name(node)
    yield from _place_problems(level, node, name)
    for view in _views(node):
        yield from _view_problems(level, view, name)
    work = node.work
    if isinstance(work, Memcpy):
        yield from _copy_problems(work, name)
    elif isinstance(work, Memset):
        yield from _fill_problems(work, name)
    elif isinstance(work, Embed):
        for message in unmatched_names(work):
            yield PlanProblem("argument", f"{name!r}: {message}", (name,))
        for message in misfits(work):
            yield PlanProblem("strides", f"{name!r}: {message}", (name,))


def _place_problems(level: Level, node: PlanNode, name: str) -> Iterator[PlanProblem]:
    kind = _NOT_IN_A_BODY.get(type(node.work)) if level.in_body else None
    if kind is not None:
        yield PlanProblem(
            "body", f"{name!r}: the body of a conditional node cannot hold {kind}", (name,)
        )
    kind = _NOT_IN_A_CHILD.get(type(node.work)) if level.is_embedded else None
    if kind is not None and not (level.in_body and type(node.work) in _NOT_IN_A_BODY):
        yield PlanProblem("body", f"{name!r}: a child graph cannot hold {kind}", (name,))


def _views(node: PlanNode) -> Iterable[View]:
    """Every view a node names, once."""
    work = node.work
    found: dict[View, None] = {}
    if isinstance(work, (Launch, Call)):
        found.update((value, None) for value in work.arguments if isinstance(value, View))
    if isinstance(work, Embed):
        return dict.fromkeys(view for _, view in work.bindings)
    if isinstance(work, Conditional):  # its bodies are levels of their own
        return ()
    found.update(dict.fromkeys((*node.reads, *node.writes)))
    return found


def _view_problems(level: Level, view: View, name: str) -> Iterator[PlanProblem]:
    buffer = view.buffer
    if level.plan._registry.buffers.get(buffer.name) is not buffer:
        yield PlanProblem(
            "unknown buffer", f"{name!r}: buffer {buffer.name!r} belongs to another plan", (name,)
        )
        return
    known = DTYPES.get(view.dtype)
    if known is None or known.itemsize != view.itemsize or view.offset % view.itemsize:
        yield PlanProblem(
            "dtype",
            f"{name!r}: view of {buffer.name!r}: byte {view.offset} begins no element of "
            f"{view.itemsize} bytes of type {view.dtype}",
            (name,),
        )
    low, high = view.extent
    first, last = buffer.whole.extent
    if view.size and not first <= low <= high <= last:
        yield PlanProblem(
            "out of bounds",
            f"{name!r}: a view touches bytes {low} to {high - 1} of buffer {buffer.name!r}, which "
            f"has bytes {first} to {last - 1}",
            (name,),
        )


def _copy_problems(work: Memcpy, name: str) -> Iterator[PlanProblem]:
    dst, src = work.dst, work.src
    if dst.dtype != src.dtype:
        yield PlanProblem(
            "dtype",
            f"{name!r}: a copy changes no type: dst {dst.buffer.name!r} is {dst.dtype}, src "
            f"{src.buffer.name!r} is {src.dtype}",
            (name,),
        )
    if dst.shape != src.shape:
        yield PlanProblem(
            "strides",
            f"{name!r}: dst {dst.buffer.name!r} has shape {list(dst.shape)}, src "
            f"{src.buffer.name!r} has {list(src.shape)}",
            (name,),
        )
    if overlaps_itself(dst):
        yield PlanProblem(
            "strides",
            f"{name!r}: elements of dst {dst.buffer.name!r} share memory (shape {list(dst.shape)}, "
            f"strides {list(dst.strides)})",
            (name,),
        )
    if dst.buffer is src.buffer and share_bytes(dst, src):
        yield PlanProblem(
            "strides", f"{name!r}: dst and src overlap in buffer {dst.buffer.name!r}", (name,)
        )


def _fill_problems(work: Memset, name: str) -> Iterator[PlanProblem]:
    dst = work.dst
    if not dst.size:
        return
    rows = dense_rows(dst.shape, (dst.strides,), dst.itemsize, least=1)
    if rows is None or rows.depth > 1:
        yield PlanProblem(
            "strides",
            f"{name!r}: a memset node fills rows with one step between them, which shape "
            f"{list(dst.shape)} with strides {list(dst.strides)} has not; fill its parts, or use a "
            "kernel",
            (name,),
        )
