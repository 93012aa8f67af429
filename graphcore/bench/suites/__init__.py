"""The suites by name, and what they get and give. A suite is loaded when it is run.

A new suite is a module here with ``run(driver, request) -> Measured``, and a line in ``SUITES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphcore.bench.results import Row
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

SUITES: Mapping[str, str] = {
    name: f"graphcore.bench.suites.{name}"
    for name in ("copy", "decode", "grouped", "inspect", "launch", "memory", "moe", "update")
}

PARTS: Mapping[str, tuple[str, ...]] = {"decode": ("smollm2", "llama-1b", "qwen3-moe", "t5-base")}
"""Cases of suites whose cases run each in a process of its own, since they hold models and code."""

BY_CASE = frozenset({*PARTS, "copy", "grouped", "moe"})
"""Suites that measure the cases asked for only."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller wants: rounds of A B B A, peers left out, cases (none named: all)."""

    rounds: int
    without: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()

    def check_peers(self, known: Iterable[str]) -> None:
        """Raises ConfigurationError where a peer that is to be left out is none of ``known``."""
        unknown = sorted(self.without - set(known))
        if unknown:
            raise ConfigurationError(
                f"--without: expected peers of the suite, {sorted(known)}, got {unknown}"
            )

    def wants(self, case: str) -> bool:
        """Whether ``case`` is to be measured."""
        return not self.only or case in self.only

    def check_cases(self, known: Iterable[str]) -> None:
        """Raises ConfigurationError where a case that is asked for is none of ``known``."""
        cases = set(known)
        unknown = sorted(self.only - cases)
        if unknown:
            raise ConfigurationError(
                f"--only: expected cases of the suite, {sorted(cases)}, got {unknown}"
            )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a suite gives: rows, and notes on what has no floor or no peer."""

    rows: Sequence[Row]
    notes: Sequence[Mapping[str, Any]]


def load_suite(name: str) -> Callable[[Driver, Request], Measured]:
    """The ``run`` of a suite in ``SUITES``."""
    run: Callable[[Driver, Request], Measured] = importlib.import_module(SUITES[name]).run
    return run
