"""A plan as a Drawing: a box per node, order as links, races as links of their own kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphcore.drawing import RACE, Box, Drawing, Link
from graphcore.drawing.model import node_count
from graphcore.graph.nodes import launch_shape
from graphcore.plan.levels import Level
from graphcore.plan.races import find_races
from graphcore.plan.records import (
    Allocate,
    Call,
    Callback,
    Condition,
    Conditional,
    Deallocate,
    Embed,
    EmbedGraph,
    Join,
    Launch,
    Memcpy,
    Memset,
    PlanNode,
    PlanProblem,
    RecordEvent,
    View,
    WaitEvent,
)

_Notes = Mapping[str, Sequence[str]]
"""What is wrong with a node, by its name with its path."""

_KINDS = {
    Launch: "kernel",
    Memcpy: "memcpy",
    Memset: "memset",
    Callback: "host",
    Embed: "child",
    EmbedGraph: "child",
    Call: "child",
    RecordEvent: "event record",
    WaitEvent: "event wait",
    Allocate: "alloc",
    Deallocate: "free",
    Conditional: "conditional",
    Join: "empty",
}


def draw_plan(level: Level, problems: Sequence[PlanProblem]) -> Drawing:
    """The drawing of one level and what is inside it; problems stand at their nodes."""
    notes: dict[str, list[str]] = {}
    for problem in problems:
        for name in problem.nodes:
            notes.setdefault(name, []).append(str(problem))
    boxes = tuple(_box(level, node, notes, problems) for node in level.nodes)
    order = level.order
    links = [Link(source, index) for index in range(len(boxes)) for source in order.after[index]]
    return Drawing(boxes, (*links, *_race_links(level, problems)))


def _race_links(level: Level, problems: Sequence[PlanProblem]) -> list[Link]:
    races = {(race.first, race.second) for race in find_races(level)}
    by_name = {level.name(node): node.index for node in level.nodes}
    for problem in problems:  # those that the bindings of this embedded plan make
        if problem.kind == "race" and all(name in by_name for name in problem.nodes):
            first, second = (by_name[name] for name in problem.nodes)
            races.add((first, second))
    place = {index: number for number, index in enumerate(level.order.sequence)}
    # drawn the way the nodes may run, so that no link closes a circle
    ends = (sorted(pair, key=lambda index: place.get(index, index)) for pair in sorted(races))
    return [Link(first, second, RACE) for first, second in ends]


def _box(
    level: Level,
    node: PlanNode,
    notes: Mapping[str, Sequence[str]],
    problems: Sequence[PlanProblem],
) -> Box:
    work = node.work
    inner: tuple[tuple[str, Drawing], ...] = ()
    if isinstance(work, Conditional):
        inner = tuple(
            (
                f"body {number}",
                draw_plan(Level(body, f"{level.path}{body.name}/", True), problems),
            )
            for number, body in enumerate(work.bodies)
        )
    elif isinstance(work, Embed):
        inside = Level(work.plan, f"{level.path}{node.name}/", level.in_body, True)
        inner = (("child graph", draw_plan(inside, problems)),)
    return Box(
        label=node.name,
        kind=_KINDS[type(work)],
        detail=_detail(node),
        group=node.label,
        title=level.name(node),
        lines=_lines(node),
        notes=tuple(notes.get(level.name(node), ())),
        inner=inner,
    )


def _detail(node: PlanNode) -> str:
    work = node.work
    if isinstance(work, Launch):
        return launch_shape(work.config)
    if isinstance(work, (Memcpy, Memset)):
        return f"{work.dst.size * work.dst.itemsize} B"
    if isinstance(work, (Allocate, Deallocate)):
        return f"{work.buffer.nbytes} B"
    if isinstance(work, Conditional):
        count = len(work.bodies)
        return f"{work.form} {work.condition.name}" + (f", {count} bodies" if count > 1 else "")
    if isinstance(work, Embed):
        return node_count(len(work.plan.nodes))
    return ""


def _lines(node: PlanNode) -> tuple[str, ...]:
    work = node.work
    if isinstance(work, Launch):
        pairs = zip(work.kernel.parameters, work.arguments, strict=True)
        return tuple(f"{parameter.name} = {_value(value)}" for parameter, value in pairs)
    if isinstance(work, Memcpy):
        return (f"dst {_value(work.dst)}", f"src {_value(work.src)}")
    if isinstance(work, Memset):
        return (f"dst {_value(work.dst)}", f"value {work.value:#x}")
    if isinstance(work, Embed):
        return tuple(f"{name} = {_value(view)}" for name, view in work.bindings)
    return tuple(
        f"{verb} {_value(view)}"
        for verb, views in (("reads", node.reads), ("writes", node.writes))
        for view in views
    )


def _value(value: object) -> str:
    if isinstance(value, View):
        return str(value)
    if isinstance(value, Condition):
        return f"condition {value.name}"
    return f"{value!r:.40}"
