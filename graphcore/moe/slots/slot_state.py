"""SlotState: a copy on the host of the tables of one group, and what can be done to it. Pure.

The tables are read whole and written whole, so that a failure between the two leaves the device
with one state or with the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphcore_kernels.route_layout import RouteStatus, table_shapes

Words = dict[str, list[int]]
_PER_SLOT = {
    "expert_for_slot": -1,
    "last_used": 0,
    "frequency": 0,
    "frequency_epoch": 0,
    "pending_expert": 0,
    "pending_slot": 0,
    "miss_expert": 0,
    "miss_slot": 0,
}
"""Tables with a word for each slot, and what stands there for a new one."""


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """What the steps of a group came to; an expert counts once in a step."""

    steps: int
    routes: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Of the experts that were asked for; 1.0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


@dataclass(frozen=True, slots=True)
class SlotFault:
    """What went wrong since it was last cleared.

    Args:
        status: Of the first step that was refused; OK: none was.
        detail: The first bad route of INVALID_ROUTE, the slots needed of TOO_MANY_ROUTES, else -1.
        count: Steps that were refused.
    """

    status: RouteStatus
    detail: int
    count: int


@dataclass(slots=True)
class SlotState:
    """The tables of a group of ``experts`` experts and ``slots`` slots, by name."""

    experts: int
    slots: int
    words: Words = field(default_factory=dict)

    @classmethod
    def empty(cls, experts: int, slots: int) -> SlotState:
        """No expert is resident; admission is open, and nothing is pinned."""
        shapes = table_shapes(experts, slots)
        words = {name: [_PER_SLOT.get(name, 0)] * shape[0] for name, (_, shape) in shapes.items()}
        words["slot_for_expert"] = [-1] * experts
        words["is_open"] = [1]
        return cls(experts, slots, words)

    def residents(self) -> dict[int, int]:
        """Expert -> slot, in the order of the experts, what the newest step admits included."""
        held = list(self.words["expert_for_slot"])
        for expert, slot in self.pending():
            held[slot] = expert
        return dict(sorted((expert, slot) for slot, expert in enumerate(held) if expert >= 0))

    def pending(self) -> list[tuple[int, int]]:
        """(expert, slot) of the newest step, which the next one commits."""
        is_pending, unique, _, _ = self.words["pending"]
        lists = (self.words[name][:unique] for name in ("pending_expert", "pending_slot"))
        return list(zip(*lists, strict=True)) if is_pending else []

    @property
    def totals(self) -> SlotTotals:
        return SlotTotals(*self.words["totals"])

    @property
    def fault(self) -> SlotFault:
        status, detail, count = self.words["fault"]
        return SlotFault(RouteStatus(status), detail, count)

    def emptied(self) -> SlotState:
        """Nobody resident, clock and counters at their beginning; pins and admission stay."""
        fresh = SlotState.empty(self.experts, self.slots)
        fresh.words |= {name: list(self.words[name]) for name in ("pinned", "is_open")}
        return fresh

    def grown(self, slots: int) -> SlotState:
        """The same with more slots, which are empty."""
        more = slots - self.slots
        words = {
            name: [*values, *[_PER_SLOT[name]] * more] if name in _PER_SLOT else list(values)
            for name, values in self.words.items()
        }
        return SlotState(self.experts, slots, words)

    def without_pending(self) -> SlotState:
        """As if the newest step had not been, but that the slots of its misses are empty.

        Their rows may have been overwritten, in part or whole.
        """
        words = {name: list(values) for name, values in self.words.items()}
        for expert, slot in self.pending():
            if words["slot_for_expert"][expert] == slot:
                continue
            old = words["expert_for_slot"][slot]
            if old >= 0:
                words["slot_for_expert"][old] = -1
            for name in ("expert_for_slot", "last_used", "frequency", "frequency_epoch"):
                words[name][slot] = _PER_SLOT[name]
        words["pending"] = [0, 0, 0, 0]
        words["miss_count"] = [0]
        return SlotState(self.experts, self.slots, words)

    def changed(self, words: Mapping[str, list[int]]) -> SlotState:
        """The same with some tables replaced."""
        return SlotState(self.experts, self.slots, {**self.words, **words})
