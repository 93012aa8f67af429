"""The plugin in a suite of its own: both drivers, skips with reasons, outcomes and counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.repository import ROOT

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


USERS_SUITE = """
import pytest
import torch

import graphcore
from graphcore.testing import (
    assert_no_growth, assert_replay_equals_eager, capture_errors, inject, run_isolated,
)

@pytest.fixture
def x(graphcore_driver):
    return torch.ones(4, device="cpu" if graphcore_driver.is_emulated else "cuda")

def test_a_step(x):
    assert_replay_equals_eager(lambda x: x * 2, [x])

def test_a_step_that_reads_the_host(graphcore_driver, x):
    with capture_errors("STREAM_CAPTURE_UNSUPPORTED"):
        graphcore.capture_function(lambda: x.sum().item(), driver=graphcore_driver)

def test_a_step_whose_graph_does_nothing(x):
    cached = []
    def step(x):
        cached.append(x * 2)
        return cached[0]
    assert_replay_equals_eager(step, [x])

def test_out_of_memory():
    driver = graphcore.open_driver("emulated")
    with inject(driver, "alloc", code="OUT_OF_MEMORY"), capture_errors("OUT_OF_MEMORY"):
        driver.alloc(4)

def test_growth():
    driver = graphcore.open_driver("emulated")
    assert_no_growth(lambda: driver.free(driver.alloc(4)), driver=driver)

def test_a_crash():
    assert run_isolated("import os; os.abort()").killed_by == "SIGABRT"

@pytest.mark.gpu
def test_for_a_device():
    pass
"""


def test_installing_graphcore_is_enough_for_a_users_suite(tmp_path: Path) -> None:
    suite, site = tmp_path / "suite", tmp_path / "site"
    suite.mkdir()
    (suite / "test_users.py").write_text(USERS_SUITE, encoding="utf-8")
    _install_into(site)
    path = os.pathsep.join([str(site), *(each for each in sys.path if each)])
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", f"--junitxml={report}"],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    outcomes = {
        case.get("name"): next((part.tag for part in case if part.tag != "properties"), "passed")
        for case in ElementTree.parse(report).iter("testcase")
    }
    device = "skipped" if why_no_gpu() else "passed"
    wrong = "skipped" if why_no_gpu() else "failure"
    assert outcomes == {
        "test_a_step[emulated]": "passed",
        "test_a_step[cuda]": device,
        "test_a_step_that_reads_the_host[emulated]": "passed",
        "test_a_step_that_reads_the_host[cuda]": device,
        "test_a_step_whose_graph_does_nothing[emulated]": "failure",
        "test_a_step_whose_graph_does_nothing[cuda]": wrong,
        "test_out_of_memory": "passed",
        "test_growth": "passed",
        "test_a_crash": "passed",
        "test_for_a_device": device,
    }, done.stdout


def _install_into(site: Path) -> None:
    """What an installation leaves for pytest to find: the distribution's name and entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"graphcore_cuda-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        encoding="utf-8",
    )
    lines = [f"{name} = {module}" for name, module in project["entry-points"]["pytest11"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]), encoding="utf-8")


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
