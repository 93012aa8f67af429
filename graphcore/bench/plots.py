"""Results as pictures: for each case ours, the floor and every peer, side by side.

``python -m graphcore.bench.plots FOLDER RESULTS`` writes one SVG for each result file into FOLDER.
Bars of one case share a scale, and cases do not: what counts is the relation within a case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from graphcore.errors import ConfigurationError

WIDTH, LABEL, BAR, LINE, GAP = 900, 170, 430, 17, 14
# light, dark; ours stands out, the floor is what nobody can pass
COLOURS = {
    "ink": ("#1c2433", "#e6e9ef"),
    "faint": ("#5b6577", "#9aa4b5"),
    "ours": ("#2a6bd8", "#6ea2ff"),
    "floor": ("#0e8a78", "#4fd1b8"),
    "peer": ("#b9c2d0", "#4a5364"),
}
LARGER_IS_BETTER = {"tokens/s", "GB/s", "TFLOP/s", "TB/s", "%"}
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


def picture(result: dict[str, Any]) -> str:
    """The rows of a result as one SVG that stands on its own, light and dark.

    Args:
        result: Content of a result file, with at least one row.

    Raises:
        ConfigurationError: No rows.
    """
    if not result["rows"]:
        raise ConfigurationError(f"plots: {result['suite']}: expected rows, got none")
    body, top = [], 56
    for row in result["rows"]:
        lines, top = _case(row, top)
        body += lines
    better = "; ".join(
        f"{unit}: {'larger' if unit in LARGER_IS_BETTER else 'smaller'} is better"
        for unit in dict.fromkeys(row["unit"] for row in result["rows"])
    )
    title = f"{result['suite']}: {result['device']}, {result['date']}"
    head = [
        f'<text x="0" y="18" class="title">{escape(title)}</text>',
        f'<text x="0" y="38" class="faint">bars of a case share a scale; {better}; '
        f"commit {escape(result['commit'][:12])}</text>",
    ]
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            _style(),
            *head,
            *body,
            "</svg>\n",
        ]
    )


def _case(row: dict[str, Any], top: int) -> tuple[list[str], int]:
    bars = bars_of(row)
    most = max(value for _, _, value in bars) or 1.0
    lines = [f'<text x="0" y="{top + 12}" class="case">{escape(row["case"])}</text>']
    for kind, name, value in bars:
        width = max(1.0, BAR * value / most)
        words = f"{value:,.4g} {row['unit']}  {name}"
        lines.append(
            f'<rect x="{LABEL}" y="{top + 2}" width="{width:.1f}" height="{LINE - 4}" rx="2" '
            f'class="{kind}"/>'
        )
        lines.append(
            f'<text x="{LABEL + width + 8:.1f}" y="{top + 12}" '
            f'class="{"case" if kind == "ours" else "faint"}">{escape(words)}</text>'
        )
        top += LINE
    return lines, top + GAP


def _style() -> str:
    def fills(column: int) -> str:
        ink, faint = COLOURS["ink"][column], COLOURS["faint"][column]
        texts = f".title,.case{{fill:{ink}}}.faint{{fill:{faint}}}"
        kinds = (f".{kind}{{fill:{COLOURS[kind][column]}}}" for kind in ("ours", "floor", "peer"))
        return texts + "".join(kinds)

    fonts = "text{font:12px ui-sans-serif,system-ui,sans-serif}.title{font-size:15px}"
    bold = ".title,.case{font-weight:600}"
    return f"<style>{fonts}{bold}{fills(0)}@media (prefers-color-scheme:dark){{{fills(1)}}}</style>"


def pictures(results: Path) -> dict[str, str]:
    """File name -> picture, of every result under ``results`` that has rows.

    Raises:
        ConfigurationError: A file that is no result of a suite.
    """
    made = {}
    for path in sorted(results.glob("*/*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("rows"):
                made[f"bench-{content['suite']}.svg"] = picture(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{path}: expected a result of a suite: {error!r}") from error
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
