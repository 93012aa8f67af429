"""The cases of a result as bars: ours, the floor and every peer, side by side.

Bars of one case share a scale, and cases do not: what counts is the relation within a case.
"""

from __future__ import annotations

from typing import Any

from graphcore.bench import svg
from graphcore.errors import ConfigurationError

_LABEL, _LONGEST, _GAP = 222, 378, 14
_LARGER_IS_BETTER = {"tokens/s", "GB/s", "TFLOP/s", "TB/s", "%"}
Bar = tuple[str, str, float]  # class, name, value


def bars_of(row: dict[str, Any]) -> list[Bar]:
    """Ours, the floor and the peers of one case, in that order; what was not measured is left out.

    Args:
        row: Of a result file: ``ours``, ``floor``, ``peers``.
    """
    found: list[tuple[str, str, Any]] = [("ours", "graphcore", row["ours"])]
    found.append(("floor", "floor", row["floor"]))
    found += [("peer", name, value) for name, value in row["peers"].items()]
    return [(kind, name, float(value)) for kind, name, value in found if value is not None]


def bars(result: dict[str, Any]) -> str:
    """All rows of a result.

    Args:
        result: Content of a result file, with at least one row.

    Raises:
        ConfigurationError: No rows.
    """
    if not result["rows"]:
        raise ConfigurationError(f"plots: {result['suite']}: expected rows, got none")
    body, top = [], svg.HEAD
    for row in result["rows"]:
        lines, top = _case(row, top)
        body += lines
    better = "; ".join(
        f"{unit}: {'larger' if unit in _LARGER_IS_BETTER else 'smaller'} is better"
        for unit in dict.fromkeys(row["unit"] for row in result["rows"])
    )
    title = f"{result['suite']}: {result['device']}, {result['date']}"
    under = f"bars of a case share a scale; {better}; commit {result['commit'][:12]}"
    return svg.chart(title, under, body, top)


def _case(row: dict[str, Any], top: int) -> tuple[list[str], int]:
    found = bars_of(row)
    most = max(value for _, _, value in found) or 1.0
    lines = [svg.text(0, top + 12, row["case"], "strong")]
    for kind, name, value in found:
        width = max(1.0, _LONGEST * value / most)
        lines.append(svg.bar(_LABEL, top + 2, width, kind))
        words = f"{value:,.4g} {row['unit']} {name}"
        emphasis = "strong" if kind == "ours" else "faint"
        lines.append(svg.text(_LABEL + width + 8, top + 12, words, emphasis))
        top += svg.LINE
    return lines, top + _GAP
