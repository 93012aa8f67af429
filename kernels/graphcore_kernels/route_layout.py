"""What ``route_plan`` works on, by name: the tables of one group's slots, and a step's outputs.

The tables are the memory of a group between its steps. The outputs belong to one shape of step.
All of them lie at fixed addresses, so that which expert sits where is data and not graph.

Legend: E experts, S slots, R routes (rows * top_k); a route is one (row, choice).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

EPOCH_STEPS = 16
"""Steps after which a slot's counter counts half."""
MOST_FREQUENCY = 2**31 - 1
"""Where the counter of a slot stops."""
CLOCK_BOUND = 2**62
"""The clock is not let past this: ages are renumbered in their order, on the device."""
STEP_BOUND = 2**34
"""The same for the number of the step; a multiple of EPOCH_STEPS, so that epochs fit 32 bits."""


class RouteStatus(IntEnum):
    """What became of the plan of a step; after any but OK the tables are as before."""

    OK = 0
    CLOSED = 1
    TOO_MANY_ROUTES = 2
    INVALID_ROUTE = 3
    INVALID_STATE = 4

    @property
    def reason(self) -> str:
        """In words."""
        return _REASONS[self]


_REASONS = {
    RouteStatus.OK: "every route has a slot",
    RouteStatus.CLOSED: "admission is closed",
    RouteStatus.TOO_MANY_ROUTES: "more experts than slots that they may take",
    RouteStatus.INVALID_ROUTE: "an expert that does not exist",
    RouteStatus.INVALID_STATE: "the tables contradict each other",
}

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (element type, shape)."""


def table_shapes(experts: int, slots: int) -> Shapes:
    """The tables of a group.

    * ``slot_for_expert``, ``expert_for_slot``: each other's inverse; -1: none.
    * ``last_used``: the clock when the slot was last used. ``frequency``: steps that used its
      expert, halved with each epoch since ``frequency_epoch``. Empty slots have 0 in all three.
    * ``clock``: routes so far. ``step``: steps so far.
    * ``pinned``: nonzero for experts whose slot is nobody's victim.
    * ``is_open``: 0 closes admission.
    * ``pending``: what the newest step decided, and the next one commits: (is there any, unique
      experts, routes, misses); ``pending_expert`` and ``pending_slot`` in the order in which the
      routes first name the experts.
    * ``miss_expert``, ``miss_slot``, ``miss_count``: what the newest step must copy.
    * ``totals``: steps, routes, hits, misses (unique experts of a step each).
    * ``fault``: status and detail of the first step that failed since the host cleared it, and how
      many did.
    """
    return {
        "slot_for_expert": ("int32", (experts,)),
        "expert_for_slot": ("int32", (slots,)),
        "last_used": ("int64", (slots,)),
        "frequency": ("int32", (slots,)),
        "frequency_epoch": ("int32", (slots,)),
        "clock": ("int64", (1,)),
        "step": ("int64", (1,)),
        "pinned": ("int32", (experts,)),
        "is_open": ("int32", (1,)),
        "pending": ("int32", (4,)),
        "pending_expert": ("int32", (slots,)),
        "pending_slot": ("int32", (slots,)),
        "miss_expert": ("int32", (slots,)),
        "miss_slot": ("int32", (slots,)),
        "miss_count": ("int32", (1,)),
        "totals": ("int64", (4,)),
        "fault": ("int32", (3,)),
    }


def output_shapes(experts: int, rows: int, top_k: int) -> Shapes:
    """What the plan of one step writes; after a failure no route counts.

    * ``route_slots``: the slot of each route; -1 after a failure.
    * ``offsets``: where the rows of each expert begin in the grouped product; all 0 after a
      failure. ``slots``: the slot of each expert of this step, -1 of any other.
    * ``gather``: the token (row of ids) of each row of the product. ``scatter``: its route.
      Rows are sorted by expert, those of one expert by route; -1 after a failure.
    * ``scale``: the weight of each row's route, where weights were given; 0 after a failure.
    * ``report``: status (:class:`RouteStatus`), unique experts, misses, detail: the first bad route
      of INVALID_ROUTE, the slots needed of TOO_MANY_ROUTES, else -1.
    """
    routes = rows * top_k
    return {
        "route_slots": ("int32", (rows, top_k)),
        "offsets": ("int32", (experts + 1,)),
        "slots": ("int32", (experts,)),
        "gather": ("int32", (routes,)),
        "scatter": ("int32", (routes,)),
        "scale": ("float32", (routes,)),
        "report": ("int32", (4,)),
    }


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """How victims are chosen.

    Args:
        uses_frequency: The least frequently used slot goes first, the least recently used among
            those; False: recency alone.
        clock_bound: See CLOCK_BOUND. A smaller one renumbers sooner, which no decision can tell.
        step_bound: See STEP_BOUND.
    """

    uses_frequency: bool = True
    clock_bound: int = CLOCK_BOUND
    step_bound: int = STEP_BOUND
