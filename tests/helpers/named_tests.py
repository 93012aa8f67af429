"""Tests that a page names must have run somewhere: here, on a device, or in a browser.

``NamedTests`` is a plugin object of the test session: at the end of a run of the whole suite it
looks for named tests of which every case was skipped and that no run on file has passed either.
"""

import json
from collections import defaultdict

import pytest
from helpers import browser_run, documents
from helpers.repository import ROOT

PAGE = "docs/features.md"
# the last run of the whole suite, and later ones of a part of it
DEVICE_RUNS = "benchmarks/results/*/tests*.json"


def function_of(test_id):
    """``tests/x.py::test_y`` of a test's id, without its case."""
    return test_id.partition("[")[0]


def passed_on_a_device():
    """The test functions of which the last run on a device passed a case and failed none."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob(DEVICE_RUNS)]
    return {function for run in runs for function in run.get("passed_functions", ())}


def never_run(named, outcomes, elsewhere):
    """Those of ``named`` that were met, skipped in every case, and not passed ``elsewhere``.

    A name without ``::`` is a file, and stands for all of its tests together. ``outcomes`` has the
    set of outcomes of each function.
    """
    found = []
    for name in sorted(named):
        met = [function for function in outcomes if function == name or _holds(name, function)]
        skipped = bool(met) and all(outcomes[function] == {"skipped"} for function in met)
        if skipped and not any(function in elsewhere for function in met):
            found.append(name)
    return found


def _holds(name, function):
    return "::" not in name and function.startswith(name + "::")


class NamedTests:
    """Collects outcomes, and fails the session of a whole run where a named test never ran."""

    def __init__(self):
        self._outcomes = defaultdict(set)
        self._lines = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome == "skipped":
            self._outcomes[function_of(report.nodeid)].add(report.outcome)

    def pytest_sessionfinish(self, session):
        named = documents.named_tests(documents.read(PAGE))
        elsewhere = passed_on_a_device() | browser_run.passed_in_a_browser()
        self._lines = never_run(named, self._outcomes, elsewhere)
        if self._lines and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for name in self._lines:
            terminalreporter.write_line(
                f"{PAGE} names {name}: skipped here, and no run on file passed it", red=True
            )
