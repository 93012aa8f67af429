"""What a plan holds, and the one way it grows: names, nodes, and the order given to them.

A body of a conditional node is a plan of its own that shares buffers, events and conditions with
its parent. Names of later nodes may be used in ``after``; they are filled in when the node comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphcore.errors import ConfigurationError, PlanError
from graphcore.plan.integers import as_int, items_of
from graphcore.plan.records import (
    Condition,
    PlanBuffer,
    PlanEvent,
    PlanNode,
    PlanProblem,
    View,
    Work,
)

if TYPE_CHECKING:
    from graphcore.plan.accesses import Effects
    from graphcore.plan.order import Order
    from graphcore.plan.plan import GraphPlan


@dataclass(slots=True, weakref_slot=True)
class Registry:
    """What a plan and its bodies share. ``revision`` counts changes of any of them."""

    buffers: dict[str, PlanBuffer] = field(default_factory=dict)
    events: dict[str, PlanEvent] = field(default_factory=dict)
    conditions: dict[str, Condition] = field(default_factory=dict)
    embedded: list[GraphPlan] = field(default_factory=list)
    revision: int = 0
    height: int = 0
    """How many levels of bodies and embedded plans lie inside of each other."""
    around: list[tuple[weakref.ref[Registry], int]] = field(default_factory=list)
    """The plans that embed this one, each with the level at which it does."""

    def reach_down(self, height: int) -> int:
        """Notes that the levels here reach down to ``height``; so do those of plans around it.

        Returns:
            The most levels of any of them; where these are too many, nothing was noted.
        """
        reached = {id(self): (self, max(self.height, height))}
        waiting = [self]
        while waiting:
            inner = waiting.pop()
            _, below = reached[id(inner)]
            for around, level in inner.around:
                outer = around()
                if outer is None:
                    continue
                _, known = reached.get(id(outer), (outer, outer.height))
                if level + 1 + below > known:
                    reached[id(outer)] = outer, level + 1 + below
                    waiting.append(outer)
        most = max(levels for _, levels in reached.values())
        if most <= _MOST_LEVELS:
            for registry, levels in reached.values():
                registry.height = levels
        return most

    def embed(self, plan: GraphPlan, level: int) -> None:
        """Notes that a node at ``level`` embeds ``plan``, which may go on growing."""
        self.embedded.append(plan)
        plan._registry.around.append((weakref.ref(self), level))

    def reached(self) -> list[Registry]:
        """This one and those of all plans that are embedded in it, each once."""
        found = {id(self): self}
        waiting = [self]
        while waiting:
            for plan in waiting.pop().embedded:
                inner = plan._registry
                if id(inner) not in found:
                    found[id(inner)] = inner
                    waiting.append(inner)
        return [*found.values()]

    def revisions(self) -> tuple[int, ...]:
        """Changes whenever this plan, or one embedded in it, does."""
        if not self.embedded:
            return (self.revision,)
        return tuple(each.revision for each in self.reached())


_MOST_LEVELS = 64


class PlanContents:
    """The nodes of a plan or body, and the names it shares with its bodies."""

    def __init__(self, name: str = "", *, around: PlanContents | None = None) -> None:
        if not isinstance(name, str):
            raise ConfigurationError(f"name: expected a str, got {name!r:.60}")
        self.name = name
        self._registry: Registry = Registry() if around is None else around._registry
        self._is_body = around is not None
        self._depth: int = 0 if around is None else around._depth + 1
        self._nodes: list[PlanNode] = []
        self._names: dict[str, int | None] = {}
        # by what names are made of: the number below which all are taken
        self._numbers: dict[str, int] = {}
        self._labels: list[str] = []
        # the conditional node whose bodies are being written now
        self._open = ""
        # name that no node has yet -> indices of the nodes that come after it
        self._awaited: dict[str, list[int]] = {}
        self._order: tuple[tuple[int, ...], Order] | None = None
        # what all nodes together touch, of the revisions it was found for
        self._effects: tuple[tuple[int, ...], Effects] | None = None

    @property
    def nodes(self) -> tuple[PlanNode, ...]:
        """The nodes in program order; those of bodies are in ``node.work.bodies``."""
        return tuple(self._nodes)

    @property
    def buffers(self) -> dict[str, PlanBuffer]:
        """The buffers by name, those of bodies and parent included."""
        return dict(self._registry.buffers)

    @property
    def events(self) -> dict[str, PlanEvent]:
        """The events by name."""
        return dict(self._registry.events)

    @property
    def conditions(self) -> dict[str, Condition]:
        """The conditions by name."""
        return dict(self._registry.conditions)

    @property
    def revision(self) -> tuple[int, ...]:
        """Another one after every change of the plan, its bodies, or a plan embedded in it.

        A node added in place counts, and no earlier revision ever comes back: what was captured of
        a plan is the plan as long as its revision is the same.
        """
        return self._registry.revisions()

    @property
    def is_body(self) -> bool:
        """Whether this is a body of a conditional node of another plan."""
        return self._is_body

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PlanNode]:
        return iter(tuple(self._nodes))

    def __bool__(self) -> bool:
        return True

    @contextmanager
    def annotate(self, label: str) -> Iterator[None]:
        """Names the nodes added in the block; blocks nest into paths "outer/inner".

        Raises:
            ConfigurationError: ``label`` is no str.
        """
        if not isinstance(label, str):
            raise ConfigurationError(f"label: expected a str, got {label!r:.60}")
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def index_of(self, node: PlanNode | str | int) -> int:
        """Position of a node of this plan, given itself, its name or its position.

        Raises:
            PlanError: It is no node of this plan (or only of a body of it).
        """
        if isinstance(node, PlanNode):
            if node.index < len(self._nodes) and self._nodes[node.index].work is node.work:
                return node.index
            raise PlanError(
                f"node {node.name!r} belongs to another plan or body than {self._title()}; what "
                "stands in a body can only come after nodes of the same body"
            )
        index = self._names.get(node) if isinstance(node, str) else as_int(node)
        if index is None or not 0 <= index < len(self._nodes):
            raise PlanError(f"{self._title()} has no node {node!r:.60}")
        return index

    def after_of(self, node: PlanNode | str | int) -> tuple[int, ...]:
        """Positions of what a node comes directly after: given or derived, the needed ones only.

        Raises:
            PlanError: It is no node of this plan.
        """
        return self._ordered().after[self.index_of(node)]

    def validate(self) -> list[PlanProblem]:
        """All that keeps the plan from being built; empty where nothing does.

        Nothing touches a GPU: cycles, unknown buffers, views out of bounds, layouts of copies that
        differ, data races (with the bytes), nodes that a body or child graph cannot hold, unpaired
        allocations, events and conditions, names given twice.
        """
        from graphcore.plan.validation import find_problems

        return find_problems(self)

    def check(self) -> None:
        """Raises what :meth:`validate` finds.

        Raises:
            PlanError: Something is wrong; ``problems`` lists all of it.
        """
        from graphcore.plan.validation import raise_problems

        raise_problems(self, self.validate())

    def _ordered(self) -> Order:
        from graphcore.plan.order import order_nodes

        revisions = self._registry.revisions()
        if self._order is None or self._order[0] != revisions:
            self._order = revisions, order_nodes(self._nodes)
        return self._order[1]

    def _deepen(self, levels: int) -> None:
        """Notes that a node has ``levels`` levels inside it.

        Raises:
            PlanError: That is too deep, here or in a plan that embeds this one.
        """
        depth = self._registry.reach_down(self._depth + levels)
        if depth > _MOST_LEVELS:
            raise PlanError(
                f"{self._title()}: expected at most {_MOST_LEVELS} levels of bodies and embedded "
                f"plans inside of each other, got {depth}"
            )

    def _add(
        self,
        work: Work,
        base: str,
        *,
        name: str | None,
        after: Any,
        reads: Sequence[View] = (),
        writes: Sequence[View] = (),
    ) -> PlanNode:
        """Appends a node; nothing has changed where it raises."""
        if self._open:
            raise PlanError(
                f"{self._title()}: the block of {self._open!r} is open; add what it runs to its "
                "body, and other nodes after the block"
            )
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"name: expected a str that is not empty, got {name!r:.60}")
        found, awaited = self._resolve(after)
        index = len(self._nodes)
        node = PlanNode(
            index,
            self._reserve(base) if name is None else name,
            work,
            tuple(reads),
            tuple(writes),
            found,
            "/".join(filter(None, self._labels)),
        )
        self._nodes.append(node)
        self._names[node.name] = index
        for label in awaited:
            self._awaited.setdefault(label, []).append(index)
        for waiting in self._awaited.pop(node.name, ()):
            earlier = self._nodes[waiting]
            self._nodes[waiting] = replace(earlier, after=(*(earlier.after or ()), index))
        self._registry.revision += 1
        return self._nodes[index]

    def _reserve(self, base: str) -> str:
        """``base``, or ``base 2`` and so on where it is taken."""
        number = self._numbers.get(base, 1)
        name = base if number == 1 else f"{base} {number}"
        while name in self._names or name in self._awaited:
            number += 1
            name = f"{base} {number}"
        self._names[name] = None
        self._numbers[base] = number
        return name

    def _release(self, name: str) -> None:
        """Gives a name up that was reserved."""
        self._names.pop(name, None)
        self._numbers.clear()

    def _resolve(self, after: Any) -> tuple[tuple[int, ...] | None, list[str]]:
        """(indices, names that no node has yet) of an ``after``; (None, []) where not given."""
        if after is None:
            return None, []
        found: dict[int, None] = {}
        awaited: dict[str, None] = {}
        for item in _flatten(after):
            if isinstance(item, str) and self._names.get(item) is None:
                awaited[item] = None
            else:
                found[self.index_of(item)] = None
        return tuple(found), list(awaited)

    def _title(self) -> str:
        sort = "body" if self._is_body else "plan"
        return f"{sort} {self.name!r}" if self.name else f"the {sort}"


def _flatten(after: Any, within: tuple[Any, ...] = ()) -> Iterator[PlanNode | str | int]:
    if isinstance(after, (PlanNode, str, bool)) or as_int(after) is not None:
        yield after
        return
    items = items_of(after)
    if items is None:
        raise ConfigurationError(
            f"after: expected nodes, their names, or a sequence of them; got {after!r:.60}"
        )
    if any(after is each for each in within):
        raise ConfigurationError("after: expected a sequence of nodes, got one that holds itself")
    for item in items:
        yield from _flatten(item, (*within, after))
