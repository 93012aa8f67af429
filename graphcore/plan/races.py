"""Data races: two nodes of one level, a byte both touch and one writes, and no path between them.

Exact for strided views (see shared_bytes for the bound). What a body touches counts for its
conditional node, what an embedded plan touches for its node, through the bindings. Memory of
allocation nodes has rules of its own, in lifetimes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from graphcore.plan.accesses import Access, accesses_of, through
from graphcore.plan.embedding import Bindings, translate
from graphcore.plan.levels import Level
from graphcore.plan.order import Order
from graphcore.plan.records import (
    Allocate,
    Condition,
    Deallocate,
    Embed,
    PlanBuffer,
    PlanNode,
    PlanProblem,
    View,
)
from graphcore.plan.shared_bytes import share_bytes, shared_range
from graphcore.plan.touches import Touch, Touches


@dataclass(frozen=True, slots=True)
class Race:
    """Two unordered nodes of one level by index, and what they touch of one buffer or condition."""

    first: int
    second: int
    resource: PlanBuffer | Condition
    pairs: tuple[tuple[Access, Access], ...]

    @property
    def byte_range(self) -> tuple[str, int, int] | None:
        """(buffer, first byte, past the last byte) of what both touch; None for a condition."""
        if not isinstance(self.resource, PlanBuffer):
            return None
        ranges = [
            shared_range(one.view, other.view)
            for one, other in self.pairs
            if one.view is not None and other.view is not None
        ]
        return self.resource.name, min(r[0] for r in ranges), max(r[1] for r in ranges)


def find_races(level: Level) -> Iterator[Race]:
    """The races of one level, by node; nodes of a cycle, and what waits for them, are left out."""
    return _races_under(level, {})


def race_problems(level: Level) -> Iterator[PlanProblem]:
    """Races of a level, and those that the bindings of its embedded plans make inside them."""
    for race in find_races(level):
        yield _problem(race, level.nodes, level.path)
    for node in level.nodes:
        if isinstance(node.work, Embed):
            yield from _races_of_bindings(level, node, node.work, dict(node.work.bindings), {})


def races_among(
    nodes: Sequence[PlanNode],
    order: Order,
    touches: Callable[[PlanNode], Sequence[Access]],
) -> Iterator[Race]:
    """Races between nodes; ``touches`` says what a node touches."""
    found: list[Race] = []
    for touched in _by_resource(nodes, touches):
        found += _races_of(touched, order)
    yield from sorted(found, key=lambda race: (race.first, race.second, race.resource.name))


def _races_of(touched: Sequence[tuple[int, list[Access]]], order: Order) -> Iterator[Race]:
    """Races for one resource; ``touched`` are (node, its accesses of it), in program order."""
    known, earlier_ones = Touches(), 0
    for index, accesses in touched:
        mine = [Touch(index, access) for access in accesses]
        # on a chain, the usual case, nothing is left to compare with
        if earlier_ones & ~order.ancestors[index]:
            for other in sorted(set().union(*map(known.near, mine))):
                if order.is_ordered(other, index):
                    continue
                earlier = known.of(other)
                pairs = tuple((a.access, b.access) for a in earlier for b in mine if a.conflicts(b))
                if pairs:
                    yield Race(other, index, _resource(pairs), pairs)
        for touch in mine:
            known.add(touch)
        earlier_ones |= 1 << index


def _by_resource(
    nodes: Sequence[PlanNode], touches: Callable[[PlanNode], Sequence[Access]]
) -> Iterable[list[tuple[int, list[Access]]]]:
    """Per buffer and condition: (node, its accesses of it), in program order."""
    found: dict[int, list[tuple[int, list[Access]]]] = {}
    for node in nodes:
        if isinstance(node.work, (Allocate, Deallocate)):
            continue
        own: dict[int, list[Access]] = {}
        for access in touches(node):
            if isinstance(access.resource, (PlanBuffer, Condition)):
                own.setdefault(id(access.resource), []).append(access)
        for key, accesses in own.items():
            found.setdefault(key, []).append((node.index, accesses))
    return found.values()


def _resource(pairs: Sequence[tuple[Access, Access]]) -> PlanBuffer | Condition:
    resource = pairs[0][0].resource
    assert isinstance(resource, (PlanBuffer, Condition))
    return resource


def _races_of_bindings(
    level: Level, node: PlanNode, work: Embed, bindings: Bindings, known_by: Bindings
) -> Iterator[PlanProblem]:
    """Races inside an embedded plan that are there because two bindings are one memory.

    Args:
        level: Where the plan is embedded.
        node: Its node.
        work: The embedded plan.
        bindings: Its bindings, in terms of the outermost plan that binds one memory twice.
        known_by: Bindings under which the races are told already.
    """
    if not _has_aliases(bindings):
        return
    inside = Level(work.plan, f"{level.path}{node.name}/")
    known = {(race.first, race.second) for race in _races_under(inside, known_by)}
    for race in _races_under(inside, bindings):
        if (race.first, race.second) not in known:
            names = _names_of(race, bindings)
            yield _problem(race, inside.nodes, inside.path, f"bindings {names} share this memory; ")
    for inner in inside.nodes:
        if isinstance(inner.work, Embed):
            own = dict(inner.work.bindings)
            placed = {name: translate(view, bindings) or view for name, view in own.items()}
            yield from _races_of_bindings(inside, inner, inner.work, placed, own)


def _has_aliases(bindings: Bindings) -> bool:
    return any(
        one.buffer is other.buffer and share_bytes(one, other)
        for one, other in combinations(bindings.values(), 2)
    )


def _races_under(level: Level, bindings: Bindings) -> Iterator[Race]:
    return races_among(
        level.ordered_nodes, level.order, lambda node: through(accesses_of(node), bindings)
    )


def _names_of(race: Race, bindings: Bindings) -> str:
    views: list[View | None] = [access.view for pair in race.pairs for access in pair]
    return " and ".join(
        repr(name)
        for name, bound in bindings.items()
        if any(
            view is not None and view.buffer is bound.buffer and share_bytes(view, bound)
            for view in views
        )
    )


def _problem(race: Race, nodes: Sequence[PlanNode], path: str, cause: str = "") -> PlanProblem:
    names = tuple(f"{path}{nodes[index].name}" for index in (race.first, race.second))
    first, second = (
        _does(name, [pair[side] for pair in race.pairs]) for side, name in enumerate(names)
    )
    advice = "neither comes after the other: give one of them after=, or let both be derived"
    if race.byte_range is None:
        return PlanProblem(
            "condition",
            f"condition {race.resource.name!r}: {first} and {second} it, and {advice}",
            names,
        )
    name, low, high = race.byte_range
    return PlanProblem(
        "race",
        f"{first} and {second} bytes {low} to {high - 1} of buffer {name!r}; {cause}{advice}",
        names,
        race.byte_range,
    )


def _does(name: str, accesses: Sequence[Access]) -> str:
    verb = "writes" if any(access.writes for access in accesses) else "reads"
    if isinstance(accesses[0].resource, Condition):
        verb = "sets" if verb == "writes" else "is decided by"
    inner = next((access.origin for access in accesses if access.origin), "")
    return f"{name!r} (in {inner!r}) {verb}" if inner else f"{name!r} {verb}"
