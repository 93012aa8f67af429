"""What a row is to reach, and a note that says whether it did. A missed target is told, not raised.

Targets are figures of the project's own plan; times on other machines say nothing about them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphcore.bench.results import Row


@dataclass(frozen=True, slots=True)
class Target:
    """What a row is to reach at least; None: nothing.

    Args:
        of_floor: As in the row.
        vs_best_peer: As in the row.
        most: The most that ``ours`` may be, in the row's unit.
        error: The largest error.
    """

    of_floor: float | None = None
    vs_best_peer: float | None = None
    most: float | None = None
    error: float | None = None

    def told(self, row: Row) -> Mapping[str, Any]:
        """A note on ``row``: each target, what came of it, and whether all are reached."""
        parts, is_reached = [], True
        for what, wanted, found in (
            ("of the floor", self.of_floor, row.of_floor),
            ("of the best peer", self.vs_best_peer, row.vs_best_peer),
        ):
            if wanted is not None:
                parts.append(f"{wanted:.2f} {what} (got {found:.2f})")
                is_reached &= round(found, 2) >= wanted
        if self.most is not None:
            parts.append(f"{self.most:g} {row.unit} at most (got {row.ours:.2f})")
            is_reached &= round(row.ours, 2) <= self.most
        if self.error is not None and row.error is not None:
            parts.append(f"error {self.error:g} at most (got {row.error:.1e})")
            is_reached &= row.error <= self.error
        verdict = "reached" if is_reached else "MISSED"
        return {"about": f"{row.case}: target {', '.join(parts)}: {verdict}"}


_TOLD = re.compile(r"(.+): target (.+): (?:reached|MISSED)")
_SHARE = re.compile(r"([\d.]+) of the floor")
_MOST = re.compile(r"([\d.e+-]+) us at most")


def target_share(note: Mapping[str, Any], case: str, floor: float) -> float | None:
    """The target in a note of :meth:`Target.told`, as a share of the floor.

    Args:
        note: Any note of a result.
        case: Of the row that is asked for.
        floor: Of that row, in us: where the target is a time.

    Returns:
        None where the note is no target of ``case``, or one of something else.
    """
    told = _TOLD.fullmatch(note.get("about", ""))
    if told is None or told[1] != case:
        return None
    share, most = _SHARE.search(told[2]), _MOST.search(told[2])
    if share:
        return float(share[1])
    return floor / float(most[1]) if most else None
