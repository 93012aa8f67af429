"""Results as pictures: bars of every case, and charts of what a suite is about.

``python -m graphcore.bench.plots FOLDER RESULTS`` writes SVGs for each result file into FOLDER:
``bench-SUITE.svg`` has ours, the floor and every peer of each case; further ones, where the file
has what they show, are launches against nodes, and copies, products and decoding against their
ceilings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphcore.bench.plot_bars import bars
from graphcore.bench.plot_launches import launch_lines
from graphcore.bench.plot_shares import of_floor, of_reading
from graphcore.errors import ConfigurationError

CHARTS: Mapping[str, Mapping[str, Callable[[dict[str, Any]], str | None]]] = {
    "copy": {"ceiling": of_floor},
    "decode": {"roofline": of_reading},
    "grouped": {"ceiling": of_floor},
    "launch": {"nodes": launch_lines},
}
"""Suite -> what is behind its name in the file's -> the chart; None: the result lacks it."""


def pictures(results: Path) -> dict[str, str]:
    """File name -> picture, of every result under ``results`` that has rows.

    Raises:
        ConfigurationError: A file that is no result of a suite.
    """
    made: dict[str, str] = {}
    for path in sorted(results.glob("*/*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("rows"):
                made |= _of_result(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{path}: expected a result of a suite: {error!r}") from error
    return made


def _of_result(content: dict[str, Any]) -> dict[str, str]:
    suite = content["suite"]
    made = {f"bench-{suite}.svg": bars(content)}
    for name, chart in CHARTS.get(suite, {}).items():
        drawn = chart(content)
        if drawn is not None:
            made[f"bench-{suite}-{name}.svg"] = drawn
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pictures, or, with ``--check``, tells those that differ.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        0, or 1 where ``--check`` found a picture that is not that of its results.
    """
    parser = argparse.ArgumentParser(prog="python -m graphcore.bench.plots", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures are")
    parser.add_argument("results", type=Path, help="folder of result files")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where they differ")
    options = parser.parse_args(argv)
    different = 0
    for name, made in pictures(options.results).items():
        path = options.folder / name
        if options.check:
            is_same = path.exists() and path.read_text(encoding="utf-8") == made
            different += not is_same
            if not is_same:
                print(f"{path}: not the picture of the results; `make bench-tables` writes it")
        else:
            path.write_text(made, encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
