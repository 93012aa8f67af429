"""Suites in parts: each case in a process of its own, the result written after every one.

Models, compiled code and graphs of one case would otherwise stay for the next, and a case that dies
would take the others' figures with it. Results of parts that were run apart can be joined:
``python -m graphcore.bench.parts WHOLE.json PART.json ...``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphcore.bench.results import Report, Row
from graphcore.errors import ConfigurationError

_SAME = ("suite", "device", "driver", "versions")


def main(argv: Sequence[str] | None = None) -> int:
    """Joins results of parts into one, and prints its table.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m graphcore.bench.parts", description=__doc__)
    parser.add_argument("whole", type=Path, help="result file that is written")
    parser.add_argument("parts", type=Path, nargs="+", help="result files of one suite")
    options = parser.parse_args(argv)
    whole = joined([read(path) for path in options.parts])
    whole.write(options.whole)
    print(whole.table())
    return 0


def run_parts(
    cases: Sequence[str], arguments: Sequence[str], keep: Callable[[Report], None]
) -> Report:
    """Runs ``graphcore bench`` once for each of ``cases``.

    Args:
        cases: Given to ``--only`` one at a time.
        arguments: What else the command is given: the suite, its options.
        keep: Called with what there is after each case.

    Raises:
        ConfigurationError: No case gave a result.
    """
    done: list[Report] = []
    lost: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            path = Path(folder) / f"{case}.json"
            print(f"---- {case}", flush=True)
            command = [sys.executable, "-m", "graphcore", "bench", *arguments]
            ended = subprocess.run([*command, "--only", case, "--out", str(path)], check=False)
            if path.exists():
                done.append(read(path))
            else:
                lost.append({"left out": case, "reason": f"exit status {ended.returncode}"})
            if done:
                whole = joined(done)
                keep(replace(whole, notes=[*whole.notes, *lost]))
    if not done:
        raise ConfigurationError(f"bench: expected a result of one case at least, got {lost}")
    return replace(joined(done), notes=[*joined(done).notes, *lost])


def read(path: Path) -> Report:
    """A result file as it was written.

    Raises:
        ConfigurationError: No result.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_meaningless = bool(content.pop("meaningless", ""))
        rows = [Row(**row) for row in content.pop("rows")]
        return Report(**content, rows=rows, is_meaningless=is_meaningless)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: expected a result of a suite: {error!r}") from error


def joined(parts: Sequence[Report]) -> Report:
    """Rows and notes of ``parts`` in their order, under the last one's commit and date.

    Parts of other commits are told in notes: figures of a suite may be measured over some days.

    Raises:
        ConfigurationError: Parts of several suites, devices, drivers or versions.
    """
    last = parts[-1]
    for field in _SAME:
        found = [getattr(part, field) for part in parts]
        if any(each != found[-1] for each in found):
            raise ConfigurationError(f"parts: expected one {field}, got {found}")
    older = [
        {"about": f"{row.case}: of commit {part.commit[:12]}, {part.date}"}
        for part in parts
        for row in part.rows
        if part.commit != last.commit
    ]
    return replace(
        last,
        rows=[row for part in parts for row in part.rows],
        notes=[*(note for part in parts for note in part.notes), *older],
    )


if __name__ == "__main__":
    raise SystemExit(main())
