"""The levels of a plan: the plan itself, bodies of conditional nodes, embedded plans; with paths.

Nodes are ordered and compared within one level. An embedded plan is one level however often it is
embedded; what its bindings add is looked at per node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphcore.plan.contents import PlanContents
from graphcore.plan.order import Order
from graphcore.plan.records import Conditional, Embed, PlanNode


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One list of nodes.

    Args:
        plan: The plan or body.
        path: What its nodes' names begin with, "" for the plan itself.
        in_body: Whether it runs under a conditional node.
        is_embedded: Whether it runs in a child graph.
    """

    plan: PlanContents
    path: str
    in_body: bool = False
    is_embedded: bool = False

    @property
    def nodes(self) -> tuple[PlanNode, ...]:
        return self.plan.nodes

    @property
    def order(self) -> Order:
        return self.plan._ordered()

    @property
    def ordered_nodes(self) -> tuple[PlanNode, ...]:
        """The nodes whose order is known: all of them, unless there is a cycle."""
        return tuple(self.nodes[index] for index in sorted(self.order.sequence))

    def name(self, node: PlanNode | int) -> str:
        """A node's name with its path, as problems give it."""
        found = self.nodes[node] if isinstance(node, int) else node
        return f"{self.path}{found.name}"


def levels_of(plan: PlanContents) -> list[Level]:
    """All levels, each before the levels inside it."""
    return list(_walk(Level(plan, ""), set()))


def family_of(levels: list[Level], owner: PlanContents) -> list[Level]:
    """The levels that share names with a plan: itself and its bodies."""
    return [level for level in levels if level.plan._registry is owner._registry]


def _walk(level: Level, seen: set[tuple[int, bool]]) -> Iterator[Level]:
    yield level
    for node in level.nodes:
        work = node.work
        if isinstance(work, Conditional):
            for body in work.bodies:
                path = f"{level.path}{body.name}/"
                yield from _walk(Level(body, path, True, level.is_embedded), seen)
        elif isinstance(work, Embed) and (id(work.plan), level.in_body) not in seen:
            seen.add((id(work.plan), level.in_body))
            path = f"{level.path}{node.name}/"
            yield from _walk(Level(work.plan, path, level.in_body, True), seen)
