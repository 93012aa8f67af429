"""Result files: rows, notes and where they come from; the schema that tables are made from.

``of_floor`` and ``vs_best_peer`` say how good a row is: 1.0 is as good as the floor or the best
peer, larger is better. What has no floor or no peer is a note, not a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphcore.bench.timings import Timings

_DIGITS = 4


@dataclass(frozen=True)
class Row:
    """One case of a suite: ours against the floor and the peers, in ``unit``."""

    case: str
    unit: str
    ours: float
    floor: float
    peers: Mapping[str, float]
    of_floor: float
    vs_best_peer: float
    spread: Mapping[str, Sequence[float]]
    error: float | None = None

    def as_json(self) -> dict[str, Any]:
        found = dict(vars(self))
        for name in ("ours", "floor", "of_floor", "vs_best_peer"):
            found[name] = round(found[name], _DIGITS)
        found["peers"] = {name: round(value, _DIGITS) for name, value in self.peers.items()}
        found["spread"] = {name: list(bounds) for name, bounds in self.spread.items()}
        return found


@dataclass(frozen=True)
class Report:
    """What one run of a suite gave. ``notes`` are plain JSON objects."""

    suite: str
    device: str
    driver: str
    versions: Mapping[str, str]
    commit: str
    date: str
    rows: Sequence[Row]
    notes: Sequence[Mapping[str, Any]] = field(default=())
    is_meaningless: bool = False

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "suite": self.suite,
            "device": self.device,
            "driver": self.driver,
            "versions": dict(self.versions),
            "commit": self.commit,
            "date": self.date,
            "rows": [row.as_json() for row in self.rows],
            "notes": [dict(note) for note in self.notes],
        }
        if self.is_meaningless:
            found["meaningless"] = "emulated driver: these times say nothing about CUDA"
        return found

    def write(self, path: Path) -> None:
        """Writes the file, its folder too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """A short table for people: a line a row, then the notes."""
        lines = [_line("case", "unit", "ours", "floor", "of floor", "vs best peer", "peers")]
        lines += [
            _line(
                row.case,
                row.unit,
                f"{row.ours:.2f}",
                f"{row.floor:.2f}",
                f"{row.of_floor:.2f}",
                f"{row.vs_best_peer:.2f}",
                "  ".join(f"{name} {value:.2f}" for name, value in row.peers.items()),
            )
            for row in self.rows
        ]
        lines += ["note: " + ", ".join(f"{k} {v}" for k, v in note.items()) for note in self.notes]
        if self.is_meaningless:
            lines.append("emulated driver: these times say nothing about CUDA")
        return "\n".join(lines)


_UNITS: Mapping[str, Callable[[float], float]] = {
    "us": lambda seconds: seconds * 1e6,
    "tokens/s": lambda seconds: 1 / seconds,
}


def row_of(
    case: str,
    timings: Timings,
    *,
    ours: str,
    floor: str,
    peers: Sequence[str],
    allowance: float,
    unit: str = "us",
    error: float | None = None,
) -> Row:
    """The row of a timed case.

    Args:
        case: The stable name of the case.
        timings: Of the arms named by the other arguments.
        ours: The arm that is ours.
        floor: The arm nothing can beat.
        peers: The arms of others; at least one.
        allowance: Seconds that the floor has on top (what a guarded launch may cost, say).
        unit: "us" a call, or "tokens/s", where a call is a token.
        error: Of ours, as the suite says.
    """
    shown = _UNITS[unit]
    best = timings.fastest(peers)
    assert best is not None  # a case without a peer is a note
    of_floor = timings.speed(ours, floor, allowance)
    against = timings.speed(ours, best)
    return Row(
        case=case,
        unit=unit,
        ours=shown(timings.seconds(ours).median),
        floor=shown(timings.seconds(floor).median + allowance),
        peers={name: shown(timings.seconds(name).median) for name in peers},
        of_floor=of_floor.median,
        vs_best_peer=against.median,
        spread={
            "of_floor": of_floor.bounds(),
            "vs_best_peer": against.bounds(),
            "ours_against_ours": timings.same_against_same(ours).bounds(),
        },
        error=error,
    )


def _line(case: str, unit: str, *cells: str) -> str:
    *numbers, peers = cells
    return f"{case:<30}{unit:<9}" + "".join(f"{cell:>13}" for cell in numbers) + f"  {peers}"
