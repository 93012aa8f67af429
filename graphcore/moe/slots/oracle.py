"""SlotOracle: which expert sits in which slot, decided in plain Python; the judge of the device.

The policy is that of llama.cpp's expert cache (branch moe-cache): the victim of a miss is the
minimum of (effective frequency, last use, slot) over the slots that this step does not use, and
what a step decided is committed when the next one is planned. Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore_kernels.route_layout import (
    EPOCH_STEPS,
    MOST_FREQUENCY,
    RoutePolicy,
    RouteStatus,
)

_FORGOTTEN_EPOCHS = 32


@dataclass(frozen=True, slots=True)
class SlotDecision:
    """What the plan of one step says; the fields as in ``route_layout.output_shapes``.

    Args:
        status: Whether there is a plan at all.
        detail: The first bad route, or the slots that were needed; else -1.
        unique: Experts of the step, in the order in which the routes first name them.
        misses: (expert, slot) of those that must be copied, in that order.
        evicted: Experts that lose their slot to a miss, in the order of ``misses``; -1: none did.
        route_slots: The slot of each route.
        offsets: Where the rows of each expert begin in the grouped product.
        slots: The slot of each expert of this step, -1 of any other.
        gather: The token of each row of the product.
        scatter: The route of each row of the product.
    """

    status: RouteStatus
    detail: int
    unique: tuple[int, ...]
    misses: tuple[tuple[int, int], ...]
    evicted: tuple[int, ...]
    route_slots: tuple[int, ...]
    offsets: tuple[int, ...]
    slots: tuple[int, ...]
    gather: tuple[int, ...]
    scatter: tuple[int, ...]


class SlotOracle:
    """The slots of one group on the host. Attributes have the names of the device's tables.

    Args:
        experts: How many there are.
        slots: How many can be resident.
        policy: How victims are chosen; fixed for good.
    """

    def __init__(self, experts: int, slots: int, policy: RoutePolicy | None = None) -> None:
        self.policy = policy or RoutePolicy()
        self.slot_for_expert = [-1] * experts
        self.expert_for_slot = [-1] * slots
        self.last_used = [0] * slots
        self.frequency = [0] * slots
        self.frequency_epoch = [0] * slots
        self.clock = self.step = 0
        self.pinned = [0] * experts
        self.is_open = True
        self.pending: list[tuple[int, int]] | None = None
        """(expert, slot) of the newest step that is not committed yet."""
        self.pending_routes = 0
        self.steps = self.routes = self.hits = self.misses = self.failures = 0

    # ---- a step --------------------------------------------------------------------------------

    def plan(self, ids: Sequence[int], top_k: int = 1) -> SlotDecision:
        """Commits the step before, and decides this one; a refusal changes nothing.

        Args:
            ids: The expert of each route, row by row.
            top_k: Routes of a row.
        """
        refusal = self._refusal(ids)
        if refusal is None:
            before = self._copy()
            self.commit()
            unique = list(dict.fromkeys(ids))
            missed = [expert for expert in unique if self.slot_for_expert[expert] < 0]
            victims = self._victims(unique)
            if len(missed) <= len(victims):
                return self._decide(ids, top_k, unique, dict(zip(missed, victims, strict=False)))
            self.__dict__.update(before)
            refusal = RouteStatus.TOO_MANY_ROUTES, len(missed)
        self.failures += 1
        return self._refused(*refusal, len(ids))

    def commit(self) -> None:
        """Makes what the newest step decided the state; nothing where that is done."""
        if self.pending is None:
            return
        self._refresh(self.pending_routes)
        epoch = self.step // EPOCH_STEPS
        for index, (expert, slot) in enumerate(self.pending):
            count = self.effective_frequency(slot)
            if self.slot_for_expert[expert] != slot:
                count = 0
                if self.expert_for_slot[slot] >= 0:
                    self.slot_for_expert[self.expert_for_slot[slot]] = -1
                self.slot_for_expert[expert], self.expert_for_slot[slot] = slot, expert
            self.frequency[slot] = min(count + 1, MOST_FREQUENCY)
            self.frequency_epoch[slot] = epoch
            self.last_used[slot] = self.clock + index + 1
        self.clock += self.pending_routes
        self.step += 1
        self.pending, self.pending_routes = None, 0

    def effective_frequency(self, slot: int) -> int:
        """The counter of a slot, halved with each epoch since it was written."""
        passed = self.step // EPOCH_STEPS - self.frequency_epoch[slot]
        return self.frequency[slot] >> passed if 0 <= passed < _FORGOTTEN_EPOCHS else 0

    def residents(self) -> dict[int, int]:
        """Expert -> slot, what the newest step admits included."""
        held = list(self.expert_for_slot)
        for expert, slot in self.pending or ():
            held[slot] = expert
        return dict(sorted((expert, slot) for slot, expert in enumerate(held) if expert >= 0))

    # ---- deciding ------------------------------------------------------------------------------

    def _refusal(self, ids: Sequence[int]) -> tuple[RouteStatus, int] | None:
        experts, slots = len(self.slot_for_expert), len(self.expert_for_slot)
        needed = min(len(ids), experts)
        if not self.is_open:
            return RouteStatus.CLOSED, -1
        if needed > slots:
            return RouteStatus.TOO_MANY_ROUTES, needed
        for route, expert in enumerate(ids):
            if not 0 <= expert < experts:
                return RouteStatus.INVALID_ROUTE, route
        if not self.is_reciprocal():
            return RouteStatus.INVALID_STATE, -1
        return None

    def is_reciprocal(self) -> bool:
        """Whether the two maps are each other's inverse, and what is pending fits them."""
        forth = {(e, s) for e, s in enumerate(self.slot_for_expert) if s != -1}
        back = {(e, s) for s, e in enumerate(self.expert_for_slot) if e != -1}
        pending = self.pending or []
        return (
            forth == back
            and len({slot for _, slot in pending}) == len(pending)
            and len({expert for expert, _ in pending}) == len(pending)
            and all(self.slot_for_expert[expert] in (-1, slot) for expert, slot in pending)
        )

    def _victims(self, unique: Sequence[int]) -> list[int]:
        """The slots that this step may take, the first one to go first."""
        free = []
        for slot, expert in enumerate(self.expert_for_slot):
            if expert < 0:
                free.append((0, 0, slot))
            elif expert not in unique and not self.pinned[expert]:
                count = self.effective_frequency(slot) if self.policy.uses_frequency else 0
                free.append((count, self.last_used[slot], slot))
        return [slot for _, _, slot in sorted(free)]

    def _decide(
        self, ids: Sequence[int], top_k: int, unique: Sequence[int], admitted: dict[int, int]
    ) -> SlotDecision:
        slot_of = {expert: admitted.get(expert, self.slot_for_expert[expert]) for expert in unique}
        evicted = tuple(self.expert_for_slot[slot] for slot in admitted.values())
        self.pending, self.pending_routes = list(slot_of.items()), len(ids)
        self.steps += 1
        self.routes += len(ids)
        self.hits += len(unique) - len(admitted)
        self.misses += len(admitted)
        order = sorted(range(len(ids)), key=lambda route: ids[route])  # stable
        experts = range(len(self.slot_for_expert))
        return SlotDecision(
            status=RouteStatus.OK,
            detail=-1,
            unique=tuple(unique),
            misses=tuple(admitted.items()),
            evicted=evicted,
            route_slots=tuple(slot_of[expert] for expert in ids),
            offsets=tuple(sum(each < e for each in ids) for e in (*experts, len(experts))),
            slots=tuple(slot_of.get(expert, -1) for expert in experts),
            gather=tuple(route // top_k for route in order),
            scatter=tuple(order),
        )

    def _refused(self, status: RouteStatus, detail: int, routes: int) -> SlotDecision:
        experts, none = len(self.slot_for_expert), (-1,) * routes
        return SlotDecision(
            status, detail, (), (), (), none, (0,) * (experts + 1), (-1,) * experts, none, none
        )

    # ---- the ends of numbers -------------------------------------------------------------------

    def _refresh(self, routes: int) -> None:
        """Renumbers ages or steps where they come to their bound; their order stays."""
        if self.step >= self.policy.step_bound:
            self.frequency = list(map(self.effective_frequency, range(len(self.frequency))))
            self.frequency_epoch = [0] * len(self.frequency)
            self.step %= EPOCH_STEPS
        if self.clock > self.policy.clock_bound - routes:
            ages = [
                age
                for age, expert in zip(self.last_used, self.expert_for_slot, strict=True)
                if expert >= 0
            ]
            self.last_used = [
                1 + sum(other < age for other in ages) if expert >= 0 else 0
                for age, expert in zip(self.last_used, self.expert_for_slot, strict=True)
            ]
            self.clock = len(self.last_used)

    def _copy(self) -> dict[str, object]:
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(self).items()
        }
