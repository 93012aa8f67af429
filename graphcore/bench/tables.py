"""Tables in a document, generated from result files, so that no figure is ever typed by hand.

Replaces what stands between two markers of the document; everything else stays as it is. A figure
carries the device and the date of its file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphcore.errors import ConfigurationError

BEGIN = "<!-- bench-tables:begin -->"
END = "<!-- bench-tables:end -->"

_NONE_YET = "No figures have been recorded yet."
_LEGEND = (
    "`of floor` and `vs best peer` are medians of ratios taken within each round, with the "
    "smallest and the largest: 1.00 is as good as the floor (or as the best of the others), larger "
    "is better."
)
_NO_RESULTS = ("tests*.json", "sanitizer.json", "soak.json")
_FIELDS = ("suite", "device", "driver", "versions", "commit", "date", "rows", "notes")

Result = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the tables of a folder of results into a document.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        0; with ``--check`` 1 where the document is not up to date (it is not written then).
    """
    parser = argparse.ArgumentParser(prog="python -m graphcore.bench.tables", description=__doc__)
    parser.add_argument("document", type=Path, help="a text with the two markers")
    parser.add_argument("results", type=Path, help="folder of result files, subfolders too")
    parser.add_argument(
        "--rows-only", action="store_true", help="leave out what is compared with nothing"
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say whether it fits")
    options = parser.parse_args(argv)
    before = options.document.read_text(encoding="utf-8")
    after = replaced(before, tables(read_results(options.results), rows_only=options.rows_only))
    if options.check:
        return int(after != before)
    options.document.write_text(after, encoding="utf-8")
    return 0


def read_results(folder: Path) -> list[Result]:
    """The results below ``folder``, by path; those of the emulated driver are left out.

    ``tests.json`` is what came of the last test run on a device, ``tests-NAME.json`` of a later one
    of a part of the tests, ``sanitizer.json`` of one under compute-sanitizer, and ``soak.json`` of
    many random operations; none is a result.

    Raises:
        ConfigurationError: A file that is not a result; names it and what it lacks.
    """
    paths = sorted(folder.rglob("*.json"))
    found = [_read(path) for path in paths if not any(map(path.match, _NO_RESULTS))]
    return [result for result in found if "meaningless" not in result]


def tables(results: Sequence[Result], *, rows_only: bool = False) -> str:
    """The text for ``results``: a heading, a table and where it comes from, for each.

    Args:
        results: Of suites.
        rows_only: Whether figures that are compared with nothing are left out, and with them the
            suites that have no other.
    """
    shown = [result for result in results if result["rows"] or not rows_only]
    if not shown:
        return _NONE_YET
    return "\n\n".join([_LEGEND, *(_section(result, rows_only=rows_only) for result in shown)])


def replaced(document: str, text: str) -> str:
    """``document`` with ``text`` between its markers.

    Raises:
        ConfigurationError: The document has not each marker once, in order.
    """
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in head + tail:
        raise ConfigurationError(f"document: expected {BEGIN} and {END}, once each and in order")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def _read(path: Path) -> Result:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: expected JSON: {error}") from error
    missing = [name for name in _FIELDS if not isinstance(content, dict) or name not in content]
    if missing:
        raise ConfigurationError(f"{path}: expected a result of a suite, got one without {missing}")
    result: Result = content
    return result


def _section(result: Result, *, rows_only: bool) -> str:
    parts = [f"### {result['suite']}: {result['device']}, {result['date']}"]
    if result["rows"]:
        parts.append(_rows(result["rows"]))
    figures = [note for note in result["notes"] if "case" in note]
    if figures and not rows_only:
        parts.append(_table(["not compared", "unit", "ours"], [_note(note) for note in figures]))
    parts += [
        f"Left out: {note['left out']} ({note['reason']})."
        for note in result["notes"]
        if "left out" in note
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts.append(f"Commit {result['commit'][:12]}; {versions}.")
    return "\n\n".join(parts)


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    # not every row has every peer
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    head = ["case", "unit", "ours", "floor", *peers, "of floor", "vs best peer"]
    lines = [
        [
            row["case"],
            row["unit"],
            f"**{_number(row['ours'])}**",
            _number(row["floor"]),
            *(_number(row["peers"].get(name)) for name in peers),
            _ratio(row, "of_floor"),
            _ratio(row, "vs_best_peer"),
        ]
        for row in rows
    ]
    return _table(head, lines)


def _note(note: Mapping[str, Any]) -> list[str]:
    return [note["case"], note["unit"], _number(note["ours"])]


def _ratio(row: Mapping[str, Any], name: str) -> str:
    bounds = row["spread"].get(name)
    between = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    return f"{row[name]:.2f}{between}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if name in ("case", "not compared", "unit") else "---:" for name in head]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


if __name__ == "__main__":
    raise SystemExit(main())
