"""Events and conditions of a plan: who records, sets and is decided, and whether in time.

Both are known to a plan and its bodies alike: a family of levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphcore.plan.accesses import accesses_of, conditions_set_by
from graphcore.plan.contents import PlanContents
from graphcore.plan.levels import Level
from graphcore.plan.records import (
    Condition,
    Conditional,
    PlanEvent,
    PlanNode,
    PlanProblem,
    RecordEvent,
    WaitEvent,
)


def event_problems(family: list[Level]) -> Iterator[PlanProblem]:
    """Events of another plan, never recorded, or waited for without a record before."""
    places = [
        (level, node, node.work.event)
        for level in family
        for node in level.nodes
        if isinstance(node.work, (RecordEvent, WaitEvent))
    ]
    for level, node, event in places:
        message = ""
        if level.plan.events.get(event.name) is not event:
            message = f"event {event.name!r} belongs to another plan"
        elif isinstance(node.work, WaitEvent) and not event.external:
            records = [
                (place, other)
                for place, other, recorded in places
                if recorded is event and isinstance(other.work, RecordEvent)
            ]
            message = _wait_problem(event, level, node, records)
        if message:
            name = level.name(node)
            yield PlanProblem("event", f"{name!r}: {message}", (name,))


def _wait_problem(
    event: PlanEvent, level: Level, node: PlanNode, records: list[tuple[Level, PlanNode]]
) -> str:
    if not records:
        return (
            f"event {event.name!r} is never recorded (one that is recorded elsewhere is made with "
            "external=True)"
        )
    if any(
        place is level and level.order.is_before(other.index, node.index)
        for place, other in records
    ):
        return ""
    return f"no record of event {event.name!r} comes before it"


@dataclass(slots=True)
class _Use:
    """What is done with one condition, by names of nodes."""

    condition: Condition
    setters: list[tuple[Level, str]] = field(default_factory=list)
    decided: list[tuple[Level, str]] = field(default_factory=list)


def condition_problems(owner: PlanContents, family: list[Level]) -> Iterator[PlanProblem]:
    """Conditions of another plan, that nobody sets, that decide nothing, or more than one node."""
    uses = {id(condition): _Use(condition) for condition in owner.conditions.values()}
    for level in family:
        for node in level.nodes:
            name = level.name(node)
            used = [(condition, "setters") for condition in conditions_set_by(node)]
            if isinstance(node.work, Conditional):
                used.append((node.work.condition, "decided"))
            for condition, role in used:
                if id(condition) in uses:
                    getattr(uses[id(condition)], role).append((level, name))
                else:
                    message = f"{name!r}: condition {condition.name!r} belongs to another plan"
                    yield PlanProblem("condition", message, (name,))
            yield from _endless(node, name)
    for use in uses.values():
        yield from _use_problems(use)


def _endless(node: PlanNode, name: str) -> Iterator[PlanProblem]:
    """A loop in which nothing changes what it is decided by."""
    work = node.work
    if not isinstance(work, Conditional) or work.form != "while":
        return
    if not any(a.writes and a.resource is work.condition for a in accesses_of(node)):
        yield PlanProblem(
            "condition",
            f"{name!r}: nothing in its body sets condition {work.condition.name!r}, so that it "
            "would never end; pass it to a kernel of the body as a u64 argument",
            (name,),
        )


def _use_problems(use: _Use) -> Iterator[PlanProblem]:
    for message, names in _uses_told(use):
        yield PlanProblem("condition", f"{names[-1]!r}: {message}", names)


def _uses_told(use: _Use) -> Iterator[tuple[str, tuple[str, ...]]]:
    title = f"condition {use.condition.name!r}"
    if not use.decided:
        for _, setter in use.setters[:1]:
            yield f"{title} decides no conditional node, which the driver refuses", (setter,)
        return
    level, node = use.decided[0]
    if not use.setters:
        yield f"nobody sets {title}; pass it to a kernel as a u64 argument", (node,)
    for _, again in use.decided[1:]:
        message = f"{title} decides {node!r} already; each conditional node needs one of its own"
        yield message, (node, again)
    for place, setter in use.setters:
        if not place.path.startswith(level.path):
            yield (
                f"{title} cannot be set outside {level.plan.name!r}, which holds the node it "
                "decides",
                (node, setter),
            )
