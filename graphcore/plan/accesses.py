"""What a node touches: bytes of buffers, events, conditions, the host; inner plans included.

A body's accesses are its conditional node's; an embedded plan's are those of its node, seen through
the bindings, without the memory it allocates for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from graphcore.plan.contents import PlanContents
from graphcore.plan.embedding import Bindings, translate
from graphcore.plan.records import (
    Call,
    Callback,
    Condition,
    Conditional,
    Embed,
    EmbedGraph,
    Join,
    Launch,
    PlanBuffer,
    PlanEvent,
    PlanNode,
    RecordEvent,
    View,
    WaitEvent,
    Work,
)


class Host:
    """What host callbacks share: they run one after the other."""


HOST = Host()


@dataclass(frozen=True, slots=True)
class Access:
    """One touch: ``view`` of a buffer, or all of ``resource`` where it is something else.

    ``origin`` is the path of the inner node that makes it, "" for the node itself.
    """

    resource: PlanBuffer | PlanEvent | Condition | Host
    view: View | None
    writes: bool
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Effects:
    """What the nodes of a plan or body touch together, and whether one may touch anything."""

    accesses: tuple[Access, ...]
    are_unknown: bool


def accesses_of(node: PlanNode) -> tuple[Access, ...]:
    """What a node touches, in terms of its own plan's buffers, each once."""
    return _distinct(_accesses(node))


def effects_of(plan: PlanContents) -> Effects:
    """The effects of a plan or body; found once for all places where it stands."""
    revisions = plan._registry.revisions()
    if plan._effects is None or plan._effects[0] != revisions:
        accesses = _distinct(
            access
            for inner in plan.nodes
            for access in _inside(f"{plan.name or 'plan'}/{inner.name}", accesses_of(inner))
        )
        effects = Effects(accesses, any(map(has_unknown_effects, plan.nodes)))
        plan._effects = revisions, effects
    return plan._effects[1]


def _distinct(accesses: Iterable[Access]) -> tuple[Access, ...]:
    found: dict[tuple[int, View | None, bool], Access] = {}
    for access in accesses:
        found.setdefault((id(access.resource), access.view, access.writes), access)
    return tuple(found.values())


def _inside_of(work: Work) -> tuple[PlanContents, ...]:
    """The plan that a node embeds, or the bodies of a conditional one."""
    if isinstance(work, Embed):
        return (work.plan,)
    return work.bodies if isinstance(work, Conditional) else ()


def through(accesses: Iterable[Access], bindings: Bindings) -> tuple[Access, ...]:
    """Accesses of an embedded plan in terms of the plan around it; its own memory as it is."""
    return tuple(_placed(access, bindings) for access in accesses)


def memory_of(plan: PlanContents, bindings: Bindings) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """(reads, writes) of a whole plan in terms of the plan around it."""
    reads: dict[View, None] = {}
    writes: dict[View, None] = {}
    for access in _embedded(plan, bindings):
        if access.view is not None:
            (writes if access.writes else reads)[access.view] = None
    return tuple(reads), tuple(writes)


def has_unknown_effects(node: PlanNode) -> bool:
    """Whether a node may touch anything, so that only program order orders it."""
    work = node.work
    if isinstance(work, (Callback, Call, EmbedGraph)):
        return not (node.reads or node.writes)
    return any(effects_of(plan).are_unknown for plan in _inside_of(work))


def comes_after_all(node: PlanNode) -> bool:
    """Whether a node without ``after`` comes after everything before it."""
    return isinstance(node.work, (Join, RecordEvent)) or has_unknown_effects(node)


def comes_before_all(node: PlanNode) -> bool:
    """Whether all later nodes without ``after`` come after this node."""
    if isinstance(node.work, Join):
        return node.after is None
    return isinstance(node.work, WaitEvent) or has_unknown_effects(node)


def conditions_set_by(node: PlanNode) -> tuple[Condition, ...]:
    """The conditions whose handle a kernel or callable gets."""
    if not isinstance(node.work, (Launch, Call)):
        return ()
    return tuple(value for value in node.work.arguments if isinstance(value, Condition))


def _accesses(node: PlanNode) -> Iterator[Access]:
    work = node.work
    if isinstance(work, Embed):
        yield from _embedded(work.plan, dict(work.bindings))
    elif isinstance(work, Conditional):
        yield Access(work.condition, None, writes=False)
        for body in work.bodies:
            yield from effects_of(body).accesses
    else:
        yield from _own(node)


def _own(node: PlanNode) -> Iterator[Access]:
    for view in node.reads:
        yield Access(view.buffer, view, writes=False)
    for view in node.writes:
        yield Access(view.buffer, view, writes=True)
    for condition in conditions_set_by(node):
        yield Access(condition, None, writes=True)
    if isinstance(node.work, (RecordEvent, WaitEvent)):
        yield Access(node.work.event, None, writes=isinstance(node.work, RecordEvent))
    if isinstance(node.work, Callback):
        yield Access(HOST, None, writes=True)


def _embedded(plan: PlanContents, bindings: Bindings) -> Iterator[Access]:
    """What leaves an embedded plan: its argument buffers' memory, and the host."""
    for access in effects_of(plan).accesses:
        if access.view is None:
            if access.resource is HOST:
                yield access
        elif translate(access.view, bindings) is not None:
            yield _placed(access, bindings)


def _placed(access: Access, bindings: Bindings) -> Access:
    view = None if access.view is None else translate(access.view, bindings)
    return access if view is None else replace(access, resource=view.buffer, view=view)


def _inside(path: str, accesses: Iterable[Access]) -> Iterator[Access]:
    for access in accesses:
        yield replace(access, origin=access.origin or path)
