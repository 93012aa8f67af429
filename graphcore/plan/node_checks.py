"""What can be wrong with one node by itself: buffers, bounds, layouts, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphcore.plan.embedding import Bindings, misfits, translate, unmatched_names
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
    PlanBuffer,
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
        yield from _copies_of_bindings(name, work, dict(work.bindings), {})


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


def _copies_of_bindings(
    path: str, work: Embed, bindings: Bindings, told: Bindings
) -> Iterator[PlanProblem]:
    """Copies of an embedded plan whose two sides overlap because two bindings are one memory.

    Args:
        path: The node that embeds it.
        work: What it embeds.
        bindings: Its bindings, in terms of the outermost plan.
        told: Bindings under which an overlap is told already.
    """
    if len({id(view.buffer) for view in bindings.values()}) == len(bindings):
        return
    for inner in work.plan.nodes:
        name = f"{path}/{inner.name}"
        if isinstance(inner.work, Embed):
            own = dict(inner.work.bindings)
            placed = {each: translate(view, bindings) or view for each, view in own.items()}
            yield from _copies_of_bindings(name, inner.work, placed, own)
        if not isinstance(inner.work, Memcpy):
            continue
        shared = _shared_buffer(inner.work, bindings)
        if shared is not None and _shared_buffer(inner.work, told) is None:
            one, other = inner.work.dst.buffer.name, inner.work.src.buffer.name
            yield PlanProblem(
                "strides",
                f"{name!r}: dst and src overlap in buffer {shared.name!r}, which bindings "
                f"{one!r} and {other!r} share",
                (name,),
            )


def _shared_buffer(work: Memcpy, bindings: Bindings) -> PlanBuffer | None:
    """The buffer in which the sides of a copy overlap, seen through bindings."""
    dst, src = (translate(view, bindings) or view for view in (work.dst, work.src))
    return dst.buffer if dst.buffer is src.buffer and share_bytes(dst, src) else None


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
