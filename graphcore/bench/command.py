"""The command ``graphcore bench``: which suite, how long, where the result goes."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from graphcore.bench import provenance
from graphcore.bench.harness import MIN_ROUNDS
from graphcore.bench.parts import run_parts
from graphcore.bench.results import Report
from graphcore.bench.suites import BY_CASE, PARTS, SUITES, Request, load_suite
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
        if options.only and options.suite not in BY_CASE:
            raise ConfigurationError(f"--only: suite {options.suite} is measured as a whole")
        parts = PARTS.get(options.suite, ())
        cases = parts and (options.only or parts)
        if len(cases) > 1:
            report = run_parts(cases, _of_a_part(options), functools.partial(_keep, options.out))
        else:
            driver = open_driver(options.driver, device=options.device)
            wanted = {"without": options.without, "only": options.only}
            report = run(options.suite, driver, rounds=options.rounds, **wanted)
    except GraphcoreError as error:
        print(f"graphcore bench: {error}", file=sys.stderr)
        return 2
    _keep(options.out, report)
    if options.out is not None:
        print(f"written to {options.out}")
    print(report.table())
    return 0


def _keep(out: Path | None, report: Report) -> None:
    if out is not None:
        report.write(out)


def _of_a_part(options: argparse.Namespace) -> list[str]:
    """The arguments that a process for one case gets, beside that case and its file."""
    arguments = [options.suite, "--rounds", str(options.rounds)]
    for name in ("driver", "device"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", str(getattr(options, name))]
    for peer in options.without:
        arguments += ["--without", peer]
    return arguments


def run(
    suite: str,
    driver: Driver,
    *,
    rounds: int = MIN_ROUNDS,
    without: Sequence[str] = (),
    only: Sequence[str] = (),
) -> Report:
    """Runs ``suite`` on ``driver`` and says where the numbers come from.

    Args:
        suite: Its name.
        driver: What it runs on.
        rounds: Of A B B A.
        without: Peers that are left out.
        only: Cases that are measured; none named: all.

    Raises:
        ConfigurationError: Fewer rounds than a result may rest on (on a device).
    """
    if rounds < MIN_ROUNDS and not driver.is_emulated:
        raise ConfigurationError(f"rounds: expected at least {MIN_ROUNDS}, got {rounds}")
    request = Request(rounds=rounds, without=frozenset(without), only=frozenset(only))
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
    parser = argparse.ArgumentParser(
        prog="graphcore bench", description="Measures graphcore against floors and peers."
    )
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
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CASE",
        help="measure this case only (" + ", ".join(sorted(BY_CASE)) + "); repeatable. Several "
        "cases of a suite whose cases hold models (" + ", ".join(sorted(PARTS)) + ") run in "
        "processes of their own",
    )
    return parser
