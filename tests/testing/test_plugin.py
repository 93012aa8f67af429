"""The plugin in a suite of its own: both drivers, skips with reasons, outcomes and counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphcore.testing import outcome_differences
from graphcore.testing.outcomes import split_driver
from graphcore.testing.plugin import why_no_gpu

SUITE = """
import pytest

def test_alloc(graphcore_driver):
    graphcore_driver.free(graphcore_driver.alloc(4))

@pytest.mark.parametrize("size", [1, 2])
def test_sizes(graphcore_driver, size):
    assert size < 2

def test_without_a_driver():
    pass

@pytest.mark.gpu
def test_device_only():
    pass
"""


def run_suite(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "graphcore.testing.plugin"]
    return subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=False
    )


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_outcomes_are_written_for_each_driver_that_is_here(tmp_path: Path) -> None:
    done = run_suite(tmp_path, "--graphcore-outcomes", "out")
    assert "2 failed" in done.stdout or "1 failed" in done.stdout, done.stdout
    emulated = read(tmp_path / "out" / "emulated.json")
    assert emulated == {
        "driver": "emulated",
        "tests": {
            "test_suite.py::test_alloc": "passed",
            "test_suite.py::test_sizes[1]": "passed",
            "test_suite.py::test_sizes[2]": "failed",
        },
    }
    if why_no_gpu() is None:
        cuda = read(tmp_path / "out" / "cuda.json")
        assert outcome_differences(emulated["tests"], cuda["tests"]) == []
    else:
        assert not (tmp_path / "out" / "cuda.json").exists()


@pytest.mark.skipif(why_no_gpu() is None, reason="needs a machine without a CUDA device")
def test_a_summary_counts_and_says_why_tests_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_COMMIT", "abc123")
    run_suite(tmp_path, "--graphcore-summary", "summary.json")
    summary = read(tmp_path / "summary.json")
    reason = why_no_gpu()
    assert (summary["passed"], summary["failed"], summary["skipped"]) == (3, 1, 4)
    assert summary["skip_reasons"] == {reason: 4}
    assert (summary["commit"], summary["device"]) == ("abc123", "none")


@pytest.mark.parametrize(
    ("test", "driver", "rest"),
    [
        ("a.py::t[emulated]", "emulated", "a.py::t"),
        ("a.py::t[cuda-x-1]", "cuda", "a.py::t[x-1]"),
        ("a.py::t[x-cuda]", "cuda", "a.py::t[x]"),
        ("a.py::t[barracuda]", None, "a.py::t[barracuda]"),
        ("a.py::cuda_t", None, "a.py::cuda_t"),
    ],
)
def test_the_driver_is_told_from_the_rest_of_a_tests_name(
    test: str, driver: str | None, rest: str
) -> None:
    assert split_driver(test) == (driver, rest)


def test_every_kind_of_difference_between_drivers_is_told() -> None:
    one = {"same": "passed", "other": "passed", "first": "passed"}
    two = {"same": "passed", "other": "failed", "second": "skipped"}
    assert outcome_differences(one, two) == [
        "first: only on the first driver",
        "second: only on the second driver",
        "other: passed on the first driver, failed on the second",
    ]
    assert outcome_differences(one, one) == []
