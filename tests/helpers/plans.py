"""Random plans of kernels on strided views, and what their nodes touch, by brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from helpers.kernels import ONE_BLOCK
from hypothesis import strategies as st

from graphcore import GraphPlan
from graphcore.driver import kernel
from graphcore.plan.records import PlanBuffer, PlanNode, View

touch = kernel("touch", "void* dst, const void* src", "", lambda _config, _dst, _src: None)
set_condition = kernel("set_condition", "u64 handle, u32 value", "", lambda _c, _h, _v: None)


@lru_cache(maxsize=4096)
def bytes_of(view: View) -> frozenset[int]:
    """Every byte that a view touches, one by one."""
    places = {view.offset}
    for size, stride in zip(view.shape, view.strides, strict=True):
        places = {p + k * stride * view.itemsize for p in places for k in range(size)}
    return frozenset(p + byte for p in places for byte in range(view.itemsize))


def conflict(first: PlanNode, second: PlanNode, buffer: PlanBuffer | None = None) -> frozenset[int]:
    """The bytes (of ``buffer``, or of any) that two nodes touch and one of them writes."""
    found: set[int] = set()
    for one, other in ((first, second), (second, first)):
        for written in one.writes:
            for touched in (*other.reads, *other.writes):
                if written.buffer is touched.buffer and buffer in (None, written.buffer):
                    found |= bytes_of(written) & bytes_of(touched)
    return frozenset(found)


def closure(plan: GraphPlan) -> list[set[int]]:
    """Per node, all that comes before it, by walking the edges."""
    before: list[set[int]] = []
    for node in plan.nodes:
        direct = plan.after_of(node)
        before.append(set(direct).union(*(before[index] for index in direct)))
    return before


@st.composite
def views_of(draw: st.DrawFn, buffer: PlanBuffer) -> View:
    """A strided view: slices with steps (backwards too), some transposed or re-typed."""
    index = tuple(
        draw(st.slices(size).filter(lambda cut, n=size: len(range(*cut.indices(n))) > 0))
        for size in buffer.shape
    )
    view = buffer[index]
    if draw(st.booleans()):
        view = view.T
    if view.strides[-1] == 1 and draw(st.integers(0, 3)) == 0:
        view = view.view("uint8")
    return view


@st.composite
def plans(draw: st.DrawFn, most: int = 8) -> GraphPlan:
    """Kernels that read one view and write another, of two small buffers."""
    plan = GraphPlan("random")
    buffers = [plan.buffer("x", (4, 6), "int16"), plan.buffer("y", (5,), "float32")]
    for _ in range(draw(st.integers(1, most))):
        dst = draw(views_of(draw(st.sampled_from(buffers))))
        src = draw(views_of(draw(st.sampled_from(buffers))))
        plan.launch(touch, ONE_BLOCK, dst, src, reads=[src], writes=[dst])
    return plan


def rebuilt(plan: GraphPlan, after: dict[int, tuple[int, ...]]) -> GraphPlan:
    """The plan again, with the order of some nodes given."""
    again = GraphPlan(plan.name)
    buffers = {
        old.name: again.buffer(old.name, old.shape, old.dtype) for old in plan.buffers.values()
    }

    def moved(view: View) -> View:
        return replace(view, buffer=buffers[view.buffer.name])

    for node in plan.nodes:
        reads, writes = [moved(v) for v in node.reads], [moved(v) for v in node.writes]
        arguments = (*writes, *reads)
        order = after.get(node.index)
        again.launch(touch, ONE_BLOCK, *arguments, reads=reads, writes=writes, after=order)
    return again
