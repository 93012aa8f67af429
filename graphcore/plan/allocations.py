"""Memory that a plan allocates itself: each allocation has its end, and all uses lie between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphcore.plan.accesses import accesses_of
from graphcore.plan.levels import Level
from graphcore.plan.records import Allocate, Deallocate, PlanBuffer, PlanNode, PlanProblem


@dataclass(slots=True)
class _Lifetime:
    """One allocated buffer in one level."""

    buffer: PlanBuffer
    begins: list[PlanNode] = field(default_factory=list)
    ends: list[PlanNode] = field(default_factory=list)
    uses: list[PlanNode] = field(default_factory=list)


def allocation_problems(level: Level) -> Iterator[PlanProblem]:
    """Unpaired allocations of one level, and uses outside of them."""
    for lifetime in _lifetimes(level).values():
        yield from _pairing_problems(level, lifetime)
        yield from _use_problems(level, lifetime)


def _lifetimes(level: Level) -> dict[int, _Lifetime]:
    found: dict[int, _Lifetime] = {}
    for node in level.nodes:
        work = node.work
        if isinstance(work, (Allocate, Deallocate)):
            lifetime = found.setdefault(id(work.buffer), _Lifetime(work.buffer))
            (lifetime.begins if isinstance(work, Allocate) else lifetime.ends).append(node)
            continue
        for buffer in {id(a.resource): a.resource for a in accesses_of(node)}.values():
            if isinstance(buffer, PlanBuffer) and buffer.origin == "allocated":
                found.setdefault(id(buffer), _Lifetime(buffer)).uses.append(node)
    return found


def _pairing_problems(level: Level, lifetime: _Lifetime) -> Iterator[PlanProblem]:
    name, begins, ends = lifetime.buffer.name, lifetime.begins, lifetime.ends
    if lifetime.buffer.origin != "allocated":
        message = f"buffer {name!r} is given, so that the plan neither begins nor ends it"
        yield _problem(level, message, (*begins, *ends)[0])
        return
    for nodes, verb in ((begins, "allocated"), (ends, "deallocated")):
        for again in nodes[1:]:
            yield _problem(level, f"{name!r} is {verb} twice", nodes[0], again)
    if begins and not ends:
        yield _problem(level, f"{name!r} is never deallocated", begins[0])
    if ends and not begins:
        yield _problem(level, f"{name!r} is deallocated, and not allocated here", ends[0])
    # a body may use what the plan around it allocates, which sees the body's uses as its own
    if lifetime.uses and not begins and not level.plan.is_body:
        yield _problem(level, f"{name!r} has no allocation node here", lifetime.uses[0])


def _use_problems(level: Level, lifetime: _Lifetime) -> Iterator[PlanProblem]:
    order, name = level.order, lifetime.buffer.name
    known = set(order.sequence)  # nodes of a cycle have no order to speak of
    for begin in lifetime.begins[:1]:
        for node in (*lifetime.uses, *lifetime.ends):
            if node.index in known and not order.is_before(begin.index, node.index):
                verb = "deallocated" if node in lifetime.ends else "used"
                message = f"{name!r} may be {verb} before it is allocated"
                yield _problem(level, message, begin, node)
    for end in lifetime.ends[:1]:
        for node in lifetime.uses:
            if end.index in known and not order.is_before(node.index, end.index):
                yield _problem(level, f"{name!r} may be used after its end", end, node)


def _problem(level: Level, message: str, *nodes: PlanNode) -> PlanProblem:
    names = tuple(level.name(node) for node in nodes)
    return PlanProblem("allocation", f"{names[-1]!r}: {message}", names)
