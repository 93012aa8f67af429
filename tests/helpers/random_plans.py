"""Random programs over small buffers: as a plan, and by NumPy as an oracle that knows no plan.

Values stay small integers, so that no way of rounding can differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from helpers.kernels import ONE_BLOCK, add_one, axpy, count_down, fill_value, scale, set_value
from hypothesis import strategies as st

from graphcore import GraphPlan

ROWS, COLUMNS = 4, 6
NAMES = ("a", "b", "c")
Arrays = dict[str, numpy.ndarray[Any, Any]]


def fresh_arrays() -> Arrays:
    """What every program begins with."""
    values = numpy.arange(ROWS * COLUMNS, dtype="float32").reshape(ROWS, COLUMNS)
    arrays: Arrays = {name: values % (3 + index) - 1 for index, name in enumerate(NAMES)}
    arrays["n"] = numpy.full(ROWS, -7, "int32")
    return arrays


@dataclass(frozen=True)
class Part:
    """A rectangle of a buffer."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int]

    def of(self, buffers: Any) -> Any:
        return buffers[self.name][slice(*self.rows), slice(*self.columns)]


@dataclass(frozen=True)
class Span:
    """Neighbouring elements of one row of a buffer."""

    name: str
    row: int
    columns: tuple[int, int]

    @property
    def count(self) -> int:
        return self.columns[1] - self.columns[0]

    def of(self, buffers: Any) -> Any:
        return buffers[self.name][self.row, slice(*self.columns)]


@dataclass(frozen=True)
class Step:
    """One step: what it adds to a plan, what it does to arrays; ``text`` shows it."""

    text: str
    plan: Callable[[GraphPlan, Any], object]
    numpy: Callable[[Arrays], object]

    def __repr__(self) -> str:
        return self.text


Program = list[Step]


def write_plan(program: Program, name: str = "random") -> GraphPlan:
    """The program as a plan."""
    plan = GraphPlan(name)
    buffers: dict[str, Any] = {
        each: plan.buffer(each, (ROWS, COLUMNS), "float32") for each in NAMES
    }
    buffers["n"] = plan.buffer("n", (ROWS,), "int32")
    for step in program:
        step.plan(plan, buffers)
    return plan


def run_numpy(program: Program) -> Arrays:
    """What the program does, step after step."""
    arrays = fresh_arrays()
    for step in program:
        step.numpy(arrays)
    return arrays


# ---- plain steps --------------------------------------------------------------------------------


def _bounds(size: int) -> st.SearchStrategy[tuple[int, int]]:
    pairs = [(low, high) for low in range(size) for high in range(low + 1, size + 1)]
    return st.sampled_from(pairs)


_spans = st.builds(Span, st.sampled_from(NAMES), st.integers(0, ROWS - 1), _bounds(COLUMNS))


@st.composite
def _pairs_of_spans(draw: Any) -> tuple[Span, Span]:
    """Two of one length, in different buffers: a kernel's threads know no order."""
    first = draw(_spans)
    name = draw(st.sampled_from([each for each in NAMES if each != first.name]))
    start = draw(st.integers(0, COLUMNS - first.count))
    row = draw(st.integers(0, ROWS - 1))
    return first, Span(name, row, (start, start + first.count))


@st.composite
def _pairs_of_parts(draw: Any) -> tuple[Part, Part]:
    first = Part(draw(st.sampled_from(NAMES)), draw(_bounds(ROWS)), draw(_bounds(COLUMNS)))
    name = draw(st.sampled_from([each for each in NAMES if each != first.name]))
    height, width = (high - low for low, high in (first.rows, first.columns))
    row, column = draw(st.integers(0, ROWS - height)), draw(st.integers(0, COLUMNS - width))
    return first, Part(name, (row, row + height), (column, column + width))


def _add_one(x: Span) -> Step:
    def change(arrays: Arrays) -> None:
        x.of(arrays)[:] += 1

    return Step(
        f"add_one({x})",
        lambda plan, buffers: plan.launch(add_one, ONE_BLOCK, x.of(buffers), x.count),
        change,
    )


def _scale(x: Span, factor: int) -> Step:
    def change(arrays: Arrays) -> None:
        x.of(arrays)[:] *= factor

    return Step(
        f"scale({x}, {factor})",
        lambda plan, buffers: plan.launch(scale, ONE_BLOCK, x.of(buffers), float(factor), x.count),
        change,
    )


def _axpy(pair: tuple[Span, Span], factor: int) -> Step:
    x, y = pair

    def change(arrays: Arrays) -> None:
        y.of(arrays)[:] += factor * x.of(arrays)

    return Step(
        f"axpy({factor}, {x}, {y})",
        lambda plan, buffers: plan.launch(
            axpy, ONE_BLOCK, float(factor), x.of(buffers), y.of(buffers), x.count
        ),
        change,
    )


def _copy(pair: tuple[Part, Part]) -> Step:
    dst, src = pair

    def change(arrays: Arrays) -> None:
        dst.of(arrays)[:] = src.of(arrays)

    return Step(
        f"copy({dst}, {src})",
        lambda plan, buffers: plan.memcpy(dst.of(buffers), src.of(buffers)),
        change,
    )


def _turned_copy(pair: tuple[Part, Part]) -> Step:
    """A copy with both axes of the source backwards in place of each other: never dense rows."""
    dst, src = pair

    def change(arrays: Arrays) -> None:
        dst.of(arrays)[:] = src.of(arrays)[::-1, ::-1]

    return Step(
        f"turned({dst}, {src})",
        lambda plan, buffers: plan.memcpy(dst.of(buffers), src.of(buffers)[::-1, ::-1]),
        change,
    )


def _fill(pair: tuple[Part, Part], value: int) -> Step:
    part = pair[0]

    def change(arrays: Arrays) -> None:
        part.of(arrays)[:] = value

    return Step(
        f"fill({part}, {value})",
        lambda plan, buffers: plan.memset(part.of(buffers), float(value)),
        change,
    )


_NOTHING = st.just(Step("join", lambda plan, _: plan.join(), lambda _: None))
_factors = st.sampled_from([-1, 0, 2])
BODY_STEPS = st.one_of(
    st.builds(_add_one, _spans),
    st.builds(_scale, _spans, _factors),
    st.builds(_axpy, _pairs_of_spans(), st.sampled_from([-1, 1, 2])),
    st.builds(_copy, _pairs_of_parts()),
    st.builds(_turned_copy, _pairs_of_parts()),
    st.builds(_fill, _pairs_of_parts(), st.integers(-2, 2)),
)
_bodies = st.lists(BODY_STEPS, min_size=1, max_size=3)


# ---- steps of several nodes ---------------------------------------------------------------------


def _do(program: Program, arrays: Arrays) -> None:
    for step in program:
        step.numpy(arrays)


def _branch(form: str, bodies: list[Program], value: int) -> Step:
    def add(plan: GraphPlan, buffers: Any) -> None:
        chosen = plan.condition(f"chosen {len(plan.conditions)}")
        plan.launch(set_value, ONE_BLOCK, chosen, value)
        opened: Any = {
            1: lambda: plan.if_then(chosen),
            2: lambda: plan.if_else(chosen),
            3: lambda: plan.switch(chosen, 3),
        }[len(bodies)]()
        with opened as made:
            for program, body in zip(bodies, (made,) if len(bodies) == 1 else made, strict=True):
                for step in program:
                    step.plan(body, buffers)

    def change(arrays: Arrays) -> None:
        index = value if len(bodies) == 3 else int(not value)
        if index < len(bodies):
            _do(bodies[index], arrays)

    return Step(f"{form}({value}, {bodies})", add, change)


def _branches() -> st.SearchStrategy[Step]:
    values = st.integers(0, 3)
    return st.one_of(
        st.builds(_branch, st.just("if"), st.lists(_bodies, min_size=1, max_size=1), values),
        st.builds(_branch, st.just("if_else"), st.lists(_bodies, min_size=2, max_size=2), values),
        st.builds(_branch, st.just("switch"), st.lists(_bodies, min_size=3, max_size=3), values),
    )


def _loop(program: Program, row: int, times: int) -> Step:
    def add(plan: GraphPlan, buffers: Any) -> None:
        more = plan.condition(f"more {len(plan.conditions)}", default=1)
        counter = buffers["n"][row : row + 1]
        plan.memset(counter, times)
        with plan.while_loop(more) as body:
            for step in program:
                step.plan(body, buffers)
            body.launch(count_down, ONE_BLOCK, more, counter)

    def change(arrays: Arrays) -> None:
        for _ in range(times):
            _do(program, arrays)
        arrays["n"][row] = 0

    return Step(f"while({times}, {program})", add, change)


def _scratch(first: tuple[Span, Span], second: tuple[Span, Span], value: int) -> Step:
    """Memory of the graph's own: filled, added to, copied out."""
    source, target = first[0], second[0]
    count = min(source.count, target.count)

    def add(plan: GraphPlan, buffers: Any) -> None:
        scratch = plan.allocate(f"scratch {len(plan.buffers)}", (COLUMNS,))
        plan.launch(fill_value, ONE_BLOCK, scratch, float(value), COLUMNS)
        plan.launch(axpy, ONE_BLOCK, 1.0, source.of(buffers)[:count], scratch[:count], count)
        plan.memcpy(target.of(buffers)[:count], scratch[:count])
        plan.deallocate(scratch)

    def change(arrays: Arrays) -> None:
        target.of(arrays)[:count] = source.of(arrays)[:count] + numpy.float32(value)

    return Step(f"scratch({source}, {target}, {value})", add, change)


def _embedded(pair: tuple[Span, Span], factor: int) -> Step:
    """A plan in the plan, over rows of two buffers."""
    x, y = pair

    def add(plan: GraphPlan, buffers: Any) -> None:
        inner = GraphPlan("inner")
        given, taken = inner.buffer("given", (COLUMNS,)), inner.buffer("taken", (COLUMNS,))
        inner.launch(axpy, ONE_BLOCK, float(factor), given, taken, COLUMNS)
        inner.launch(add_one, ONE_BLOCK, taken[1:], COLUMNS - 1)
        inner.memcpy(given[:2], taken[2:4])
        plan.embed(inner, {"given": buffers[x.name][x.row], "taken": buffers[y.name][y.row]})

    def change(arrays: Arrays) -> None:
        given, taken = arrays[x.name][x.row], arrays[y.name][y.row]
        taken += factor * given
        taken[1:] += 1
        given[:2] = taken[2:4]

    return Step(f"embed({x}, {y}, {factor})", add, change)


def _signal() -> Step:
    def add(plan: GraphPlan, _: Any) -> None:
        event = plan.event(f"event {len(plan.events)}")
        plan.record(event)
        plan.wait(event)

    return Step("signal", add, lambda _: None)


STEPS = st.one_of(
    BODY_STEPS,
    BODY_STEPS,
    _branches(),
    st.builds(_loop, _bodies, st.integers(0, ROWS - 1), st.integers(1, 3)),
    st.builds(_scratch, _pairs_of_spans(), _pairs_of_spans(), st.integers(-2, 2)),
    st.builds(_embedded, _pairs_of_spans(), st.sampled_from([-1, 1])),
    st.builds(_signal),
    _NOTHING,
)
PROGRAMS = st.lists(STEPS, min_size=1, max_size=7)
"""Whole programs."""
