"""What a launch costs against the number of nodes, as lines: ours, the floor, and each peer.

Both axes are logarithmic. Names stand at the ends of their lines, apart from each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Any

from graphcore.bench import svg
from graphcore.errors import ConfigurationError

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 640, svg.HEAD + 26, svg.HEAD + 26 + 400
_NAMES, _APART = 674, 17
_CASE = re.compile(r"n=(\d+)( guarded)?")
_TICKS = (1, 1.5, 2, 3, 5, 7)
_SHAPES = ("square", "diamond", "triangle", "circle")


@dataclass
class _Line:
    name: str
    kind: str
    shape: str
    style: str = "line"
    values: dict[int, float] = field(default_factory=dict)


def launch_lines(result: dict[str, Any]) -> str | None:
    """The chart of suite launch; None where it has fewer than two numbers of nodes.

    Args:
        result: Content of a result file.

    Raises:
        ConfigurationError: A case that is no number of nodes, or no time above 0.
    """
    lines = _lines(result["rows"])
    counts = sorted({count for each in lines for count in each.values})
    if len(counts) < 2:
        return None
    times = [value for each in lines for value in each.values.values()]
    if min(times) <= 0:
        raise ConfigurationError(f"plots: launch: expected times above 0, got {min(times)}")
    low, high = log10(min(times)) - 0.03, log10(max(times)) + 0.03
    first, last = log10(counts[0]), log10(counts[-1])

    def place(count: int, value: float) -> tuple[float, float]:
        x = _LEFT + (_RIGHT - _LEFT) * (log10(count) - first) / (last - first)
        return x, _BOTTOM - (_BOTTOM - _TOP) * (log10(value) - low) / (high - low)

    body = [svg.text(0, svg.HEAD + 10, "us for a launch")]
    for value in _ticks(10**low, 10**high):
        y = place(counts[0], value)[1]
        body.append(svg.line([(_LEFT, y), (_RIGHT, y)], "rule", "thin"))
        body.append(svg.text(_LEFT - 10, y + 4, f"{value:g}", anchor="end"))
    for count in counts:
        x = place(count, 10**low)[0]
        body.append(svg.line([(x, _TOP), (x, _BOTTOM)], "rule", "thin"))
        body.append(svg.text(x, _BOTTOM + 18, f"{count:,}", anchor="middle"))
    body.append(svg.text(_NAMES, _BOTTOM + 18, "kernel nodes, one after another"))
    heights = _apart([place(*_end(each))[1] for each in lines])
    for each, height in zip(lines, heights, strict=True):
        points = [place(count, value) for count, value in sorted(each.values.items())]
        body.append(svg.line(points, each.kind, each.style))
        body += [svg.mark(x, y, each.kind, each.shape) for x, y in points]
        x, y = points[-1]
        body.append(svg.line([(x + 7, y), (_NAMES - 6, height)], each.kind, "thin"))
        words = f"{_end(each)[1]:,.2f} us {each.name}"
        emphasis = "strong" if each.kind == "ours" else "faint"
        body.append(svg.text(_NAMES, height + 4, words, emphasis))
    title = f"launch against nodes: {result['device']}, {result['date']}"
    under = f"what a launch costs the CPU; smaller is better; commit {result['commit'][:12]}"
    return svg.chart(title, under, body, _BOTTOM + 30)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[_Line]:
    ours = _Line("graphcore", "ours", "circle")
    guarded = _Line("graphcore, guarded", "ours", "ring", "dashed")
    beneath = _Line("loop in C (the floor)", "floor", "circle")
    peers: dict[str, _Line] = {}
    for row in rows:
        found = _CASE.fullmatch(row["case"])
        if found is None or row["unit"] != "us":
            raise ConfigurationError(
                f"plots: launch: expected cases n=COUNT and n=COUNT guarded in us, got "
                f"{row['case']!r} in {row['unit']}"
            )
        count = int(found[1])
        if found[2]:
            guarded.values[count] = float(row["ours"])
            continue
        ours.values[count], beneath.values[count] = float(row["ours"]), float(row["floor"])
        for name, value in row["peers"].items():
            at = len(peers) % len(svg.PEERS)
            new = _Line(name, svg.PEERS[at], _SHAPES[at])
            peers.setdefault(name, new).values[count] = float(value)
    return [each for each in (beneath, *peers.values(), guarded, ours) if each.values]


def _end(line: _Line) -> tuple[int, float]:
    count = max(line.values)
    return count, line.values[count]


def _ticks(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    every = [step * 10.0**decade for decade in decades for step in _TICKS]
    return [value for value in every if low <= value <= high]


def _apart(heights: Sequence[float]) -> list[float]:
    """The heights of names: those of their lines, but moved until none is on another."""
    order = sorted(range(len(heights)), key=lambda each: heights[each])
    groups: list[tuple[float, list[int]]] = []  # (middle, those that stand side by side)
    for each in order:
        groups.append((heights[each], [each]))
        while len(groups) > 1 and _are_near(groups[-2], groups[-1]):
            (_, below), (_, above) = groups[-2:]
            members = [*below, *above]
            groups[-2:] = [(sum(heights[k] for k in members) / len(members), members)]
    found = [0.0] * len(heights)
    for middle, members in groups:
        for at, each in enumerate(members):
            found[each] = middle + (at - (len(members) - 1) / 2) * _APART
    return found


def _are_near(one: tuple[float, list[int]], other: tuple[float, list[int]]) -> bool:
    return other[0] - one[0] < _APART * (len(one[1]) + len(other[1])) / 2
