"""The command ``graphcore bench``: which suite, how long, where the result goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graphcore.bench import provenance
from graphcore.bench.harness import MIN_ROUNDS
from graphcore.bench.results import Report
from graphcore.bench.suites import SUITES, Request, load_suite
from graphcore.driver import Driver, open_driver
from graphcore.errors import ConfigurationError, GraphcoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a suite, writes its result where asked, prints a short table last.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        0, or 2 where the suite could not run (the reason is printed).
    """
    options = _parser().parse_args(argv)
    try:
        driver = open_driver(options.driver, device=options.device)
        report = run(options.suite, driver, rounds=options.rounds, without=options.without)
    except GraphcoreError as error:
        print(f"graphcore bench: {error}", file=sys.stderr)
        return 2
    if options.out is not None:
        report.write(options.out)
        print(f"written to {options.out}")
    print(report.table())
    return 0


def run(
    suite: str, driver: Driver, *, rounds: int = MIN_ROUNDS, without: Sequence[str] = ()
) -> Report:
    """Runs ``suite`` on ``driver`` and says where the numbers come from.

    Raises:
        ConfigurationError: Fewer rounds than a result may rest on (on a device).
    """
    if rounds < MIN_ROUNDS and not driver.is_emulated:
        raise ConfigurationError(f"rounds: expected at least {MIN_ROUNDS}, got {rounds}")
    request = Request(rounds=rounds, without=frozenset(without))
    measured = load_suite(suite)(driver, request)
    return Report(
        suite=suite,
        device=driver.device_info().name,
        driver=driver.name,
        versions=provenance.versions(driver),
        commit=provenance.commit(),
        date=provenance.today(),
        rows=measured.rows,
        notes=measured.notes,
        is_meaningless=driver.is_emulated,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphcore bench", description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES), help="what to measure")
    parser.add_argument("--out", type=Path, help="result file (JSON); none is written without it")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="rounds of A B B A")
    parser.add_argument("--driver", choices=("cuda", "emulated"), help="default: what there is")
    parser.add_argument("--device", type=int, help="device ordinal")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PEER",
        help="leave a peer out and do not import it (torch, cuda.core, CuPy); repeatable",
    )
    return parser
