"""Asks a driver about every update pair and writes its answers.

``PYTHONPATH=.:kernels:tests python3 tests/helpers/ask_update_pairs.py --driver cuda --out FILE``

Each family runs in a process of its own that writes line by line: where one dies or hangs, the pair
it was at is recorded as crashed, and a new process takes the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers.update_pairs import Pair, ask, every_pair, families
from helpers.update_specs import Workshop

from graphcore.bench.provenance import commit, today, versions
from graphcore.driver import open_driver

_SECONDS = 120


def main() -> None:
    options = _options()
    if options.family is not None:
        _ask_family(options)
        return
    driver = open_driver(options.driver)
    device, found = driver.device_info().name, versions(driver)
    driver.close()
    answers: list[dict[str, Any]] = []
    for family in families():
        rows = _answers_of(options.driver, [p for p in every_pair() if p.family == family])
        answers += rows
        print(f"{family}: {len(rows)} pairs, {_summary(rows)}", flush=True)
    head = {"device": device, "date": today(), "commit": commit(), "versions": found}
    lines = ",\n".join(json.dumps(row) for row in answers)
    text = json.dumps(head, indent=1)[:-2] + ',\n "answers": [\n' + lines + "\n]}\n"
    Path(options.out).write_text(text, encoding="utf-8")
    print(f"{len(answers)} pairs: {_summary(answers)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", default="cuda")
    parser.add_argument("--out", required=True)
    parser.add_argument("--family", help="ask only about this one, in this process")
    parser.add_argument("--skip", type=int, default=0, help="leave out its first pairs")
    return parser.parse_args()


def _summary(rows: list[dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        said = row["error"] or row["result"]
        counts[said] = counts.get(said, 0) + 1
    return ", ".join(f"{count} {said}" for said, count in sorted(counts.items()))


def _answers_of(driver: str, pairs: list[Pair]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(rows) < len(pairs):
            out = Path(folder) / f"{len(rows)}.jsonl"
            why = _run(driver, pairs[0].family, len(rows), out)
            if out.exists():
                lines = out.read_text(encoding="utf-8").splitlines()
                rows += [json.loads(line) for line in lines]
            if len(rows) < len(pairs) and why:
                rows.append(_crashed(pairs[len(rows)], why))
    return rows


def _crashed(pair: Pair, why: str) -> dict[str, Any]:
    return {"id": pair.id, "result": None, "stage": "crashed", "error": why}


def _run(driver: str, family: str, skip: int, out: Path) -> str:
    """Asks in a new process; why it ended badly, or nothing."""
    command = [sys.executable, __file__, "--driver", driver, "--out", str(out)]
    command += ["--family", family, "--skip", str(skip)]
    try:
        done = subprocess.run(
            command, timeout=_SECONDS, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS} s"
    if done.returncode:
        return f"exit status {done.returncode}: {done.stderr[-300:].strip()}"
    return ""


def _ask_family(options: argparse.Namespace) -> None:
    pairs = [pair for pair in every_pair() if pair.family == options.family][options.skip :]
    workshop = Workshop(open_driver(options.driver))
    with Path(options.out).open("w", encoding="utf-8") as file:
        for pair in pairs:
            row = ask(workshop, pair)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["stage"] == "run":  # a launch failed: the context may be lost
                sys.exit(0)


if __name__ == "__main__":
    main()
