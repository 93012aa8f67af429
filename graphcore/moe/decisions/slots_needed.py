"""How many slots the experts of a step may need, known before its router has run. Pure."""

from __future__ import annotations


def slots_needed(routes: int, experts: int) -> int:
    """Slots that any choice of ``routes`` experts among ``experts`` finds enough.

    An expert that several routes choose takes one slot, so where every expert has one, any number
    of routes fits.
    """
    return min(routes, experts)
