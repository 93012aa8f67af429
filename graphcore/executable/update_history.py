"""UpdateHistory: what became of the updates of one executable, and what to do where they repeat.

A refusal that comes back at every step is a mistake in how executables are kept, which no single
outcome shows.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from graphcore.driver.pairing import Outline

if TYPE_CHECKING:
    from graphcore.executable.update import Refusal

_log = logging.getLogger("graphcore")

_MANY = 3
_REMEMBERED = 6


class UpdateHistory:
    """Counts of one executable's updates.

    Attributes:
        updated: In place.
        reinstantiated: By a new executable.
        refused: Not at all.
        in_a_row: How many of the newest were not in place.
    """

    __slots__ = ("_shapes", "in_a_row", "refused", "reinstantiated", "updated")

    def __init__(self) -> None:
        self.updated = self.reinstantiated = self.refused = self.in_a_row = 0
        self._shapes: deque[Outline] = deque(maxlen=_REMEMBERED)

    def note_success(self) -> None:
        """An update in place."""
        self.updated += 1
        self.in_a_row = 0

    def note(self, refusal: Refusal, *, is_built: bool) -> str | None:
        """An update that was not in place; what to do, where this repeats.

        Logged as a warning when it is first said, and whenever the number has doubled.
        """
        if is_built:
            self.reinstantiated += 1
        else:
            self.refused += 1
        self.in_a_row += 1
        advice = self._advice(refusal)
        count = self.reinstantiated + self.refused
        if advice is not None and (count <= _MANY or count & (count - 1) == 0):
            _log.warning("updates: %s", advice)
        return advice

    def _advice(self, refusal: Refusal) -> str | None:
        if refusal.shapes is not None and refusal.shapes[0] != refusal.shapes[1]:
            old, new = refusal.shapes
            came_back = new in self._shapes
            self._shapes.append(old)
            if came_back:
                return (
                    f"the topology alternates (now {len(new.kinds)} nodes, before "
                    f"{len(old.kinds)}): keep an executable for each, as a GraphCache does"
                )
        if self.in_a_row < _MANY:
            return None
        what = f"{refusal.field} ({refusal.rule})" if refusal.field else refusal.rule
        return (
            f"{self.in_a_row} updates in a row could not be done in place, this one because of "
            f"{what}: keep that the same from graph to graph, or an executable for each variant, "
            "as a GraphCache does"
        )

    def __repr__(self) -> str:
        return (
            f"<UpdateHistory {self.updated} in place, {self.reinstantiated} re-instantiated, "
            f"{self.refused} refused>"
        )
