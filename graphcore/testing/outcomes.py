"""What came of a test run: per test and driver, and as counts with reasons.

The outcomes of both drivers are kept side by side, so that a test that passes on one and not on the
other shows (``outcome_differences``).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphcore.driver import open_driver
from graphcore.errors import DriverUnavailable

if TYPE_CHECKING:
    import pytest

_DRIVER_IN_ID = re.compile(r"(?<=[\[-])(emulated|cuda)(?=[\]-])")


def split_driver(test_id: str) -> tuple[str | None, str]:
    """(driver, the test's id without it); (None, id) for a test of no driver."""
    head, bracket, parameters = test_id.partition("[")
    found = _DRIVER_IN_ID.search(bracket + parameters)
    if found is None:
        return None, test_id
    rest = [part for part in parameters.rstrip("]").split("-") if part]
    rest.remove(found[1])
    return found[1], f"{head}[{'-'.join(rest)}]" if rest else head


def outcome_differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Tests that only one side has, or that ended otherwise; empty where the sides agree."""
    lines = [f"{test}: only on the first driver" for test in sorted(one.keys() - other.keys())]
    lines += [f"{test}: only on the second driver" for test in sorted(other.keys() - one.keys())]
    lines += [
        f"{test}: {one[test]} on the first driver, {other[test]} on the second"
        for test in sorted(one.keys() & other.keys())
        if one[test] != other[test]
    ]
    return lines


class Recorder:
    """A pytest plugin object that collects reports and writes them when the session ends."""

    def __init__(self, outcomes: Path | None, summary: Path | None) -> None:
        self._outcomes = outcomes
        self._summary = summary
        self._tests: dict[str, str] = {}
        self._reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst of set-up, call and teardown."""
        if report.when == "call" or report.outcome != "passed":
            before = self._tests.get(report.nodeid)
            if before != "failed":
                self._tests[report.nodeid] = str(report.outcome)
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self) -> None:
        if self._outcomes is not None:
            self._write_outcomes(self._outcomes)
        if self._summary is not None:
            _write(self._summary, self._counts())

    def _write_outcomes(self, folder: Path) -> None:
        drivers: dict[str, dict[str, str]] = {}
        for test_id, outcome in self._tests.items():
            driver, test = split_driver(test_id)
            if driver is not None:
                drivers.setdefault(driver, {})[test] = outcome
        for driver, tests in drivers.items():
            if set(tests.values()) != {"skipped"}:  # a driver that is not here says nothing
                _write(folder / f"{driver}.json", {"driver": driver, "tests": tests})

    def _counts(self) -> dict[str, Any]:
        counts = Counter(self._tests.values())
        return {
            "commit": os.environ.get("GRAPHCORE_COMMIT", "unknown"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": _device(),
            "python": platform.python_version(),
            "passed": counts["passed"],
            "failed": counts["failed"],
            "failed_tests": sorted(test for test, end in self._tests.items() if end == "failed"),
            "skipped": counts["skipped"],
            "skip_reasons": dict(self._reasons),
            "passed_functions": self._passed_functions(),
        }

    def _passed_functions(self) -> list[str]:
        """Test functions of which a case passed and none failed."""
        ends: dict[str, set[str]] = {}
        for test_id, outcome in self._tests.items():
            ends.setdefault(test_id.partition("[")[0], set()).add(outcome)
        return sorted(
            name for name, found in ends.items() if "passed" in found and "failed" not in found
        )


def _device() -> str:
    try:
        driver = open_driver("cuda")
    except DriverUnavailable:
        return "none"
    name = driver.device_info().name
    driver.close()
    return name


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
