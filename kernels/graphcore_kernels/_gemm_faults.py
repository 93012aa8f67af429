"""The error word of the grouped product: what the device found wrong, and with which expert.

The word is int32, 0 where nothing was wrong. The kernels only ever raise it to the greatest fault
of all (expert * 256 + fault): clearing it is its owner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Fault(IntEnum):
    """What the device can find; the word's low byte."""

    BAD_OFFSETS = 1
    NO_SLOT = 2
    SLOT_OUT_OF_RANGE = 3
    BAD_GATHER = 4
    BAD_SCATTER = 5


_SAYS = {
    Fault.BAD_OFFSETS: "offsets: expected 0 <= begin <= end <= rows, got others",
    Fault.NO_SLOT: "slots: expected a slot for an expert that has rows, got none (below 0)",
    Fault.SLOT_OUT_OF_RANGE: "slots: expected a slot below n_slots, got one beyond",
    Fault.BAD_GATHER: "gather: expected rows of x, got one outside",
    Fault.BAD_SCATTER: "scatter: expected every route once, got one outside or twice",
}


@dataclass(frozen=True, slots=True)
class GemmFault:
    """One fault, and the expert it was found with (the greatest, where there are several)."""

    fault: Fault
    expert: int

    def __str__(self) -> str:
        return f"expert {self.expert}: {_SAYS[self.fault]}"


def read_fault(word: int) -> GemmFault | None:
    """What an error word says; None for 0."""
    return GemmFault(Fault(word & 0xFF), word >> 8) if word else None
