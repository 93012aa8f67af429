"""How many slots each group of a pool has, checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from graphcore.errors import ConfigurationError


def checked_slots(
    n_slots: int | Mapping[str, int],
    experts: Mapping[str, int],
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Slots by group.

    Args:
        n_slots: Of every group, or group -> slots; groups that are left out keep theirs.
        experts: Group -> experts: the most slots that it may have.
        least: Group -> slots that it has already; None: it has none, and none may be left out.

    Raises:
        ConfigurationError: A group that there is not, or a number that cannot be.
    """
    if isinstance(n_slots, Mapping):
        unknown = sorted(set(n_slots) - set(experts))
        if unknown:
            raise ConfigurationError(f"n_slots: expected names of groups, got {unknown}")
    slots: dict[str, int] = {}
    for name, most in experts.items():
        low = (least or {}).get(name, 1)
        count = n_slots.get(name, least and low) if isinstance(n_slots, Mapping) else n_slots
        if not isinstance(count, int) or isinstance(count, bool) or not low <= count <= most:
            raise ConfigurationError(
                f"n_slots: expected {low} to {most} slots for group {name}, got {count!r}"
            )
        slots[name] = count
    return slots
