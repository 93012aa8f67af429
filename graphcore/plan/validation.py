"""Everything that keeps a plan from being built, found before anything touches a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from graphcore.errors import PlanError
from graphcore.plan.allocations import allocation_problems
from graphcore.plan.contents import PlanContents
from graphcore.plan.levels import Level, family_of, levels_of
from graphcore.plan.node_checks import node_problems
from graphcore.plan.races import race_problems
from graphcore.plan.records import PlanProblem
from graphcore.plan.signals import condition_problems, event_problems


def find_problems(plan: PlanContents) -> list[PlanProblem]:
    """The problems of a plan, its bodies and the plans it embeds; each once, level by level."""
    levels = levels_of(plan)
    found: list[PlanProblem] = []
    owners: list[PlanContents] = []
    for level in levels:
        found += _level_problems(level)
        if all(owner._registry is not level.plan._registry for owner in owners):
            owners.append(level.plan)
    for owner in owners:
        family = family_of(levels, owner)
        found += event_problems(family)
        if not owner.is_body:  # a body alone does not know who else sets its conditions
            found += condition_problems(owner, family)
    return list(dict.fromkeys(found))


def raise_problems(plan: PlanContents, problems: Sequence[PlanProblem]) -> None:
    """Raises PlanError for problems, if there are any."""
    if not problems:
        return
    title = f"plan {plan.name!r}" if plan.name else "the plan"
    count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    shown = [f"  {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f"  and {len(problems) - _SHOWN} more, in .problems of this error")
    raise PlanError("\n".join((f"{title} has {count}:", *shown)), problems)


_SHOWN = 10


def _level_problems(level: Level) -> Iterator[PlanProblem]:
    for name, count in Counter(node.name for node in level.nodes).items():
        if count > 1:
            path = f"{level.path}{name}"
            yield PlanProblem("name", f"{count} nodes are called {path!r}", (path,))
    for node in level.nodes:
        yield from node_problems(level, node)
    for missing, waiting in level.plan._awaited.items():
        for index in waiting:
            name = level.name(index)
            message = f"{name!r} comes after {missing!r}, and no node is called that"
            yield PlanProblem("order", message, (name,))
    yield from _cycle_problems(level)
    yield from allocation_problems(level)
    yield from race_problems(level)


def _cycle_problems(level: Level) -> Iterator[PlanProblem]:
    cycle = level.order.cycle
    if not cycle:
        return
    names = tuple(level.name(index) for index in cycle)
    path = " -> ".join(names[:6]) + (" ..." if len(names) > 6 else "")
    derived = [level.name(index) for index in cycle if level.nodes[index].after is None]
    why = f"; the order of {', '.join(map(repr, derived[:3]))} is derived" if derived else ""
    yield PlanProblem("cycle", f"nodes wait for each other: {path} -> {names[0]}{why}", names)
