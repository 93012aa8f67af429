"""The contract suite comes out the same on both drivers: the outcomes on file, side by side.

The files are written where the suite runs (`make outcomes`); cuda.json on a machine with a device.
A test that is newer than the last such run stands in awaited.json until the next one.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.repository import ROOT

from graphcore.testing import outcome_differences
from graphcore.testing.outcomes import split_driver

FOLDER = ROOT / "tests" / "driver" / "outcomes"
SUITE = "tests/driver/contract"


def on_file(driver: str) -> dict[str, str]:
    path = FOLDER / f"{driver}.json"
    if not path.exists():
        pytest.skip(f"needs {path.relative_to(ROOT)}, which `make outcomes` writes")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["driver"] == driver
    tests: dict[str, str] = content["tests"]
    return tests


def awaited(driver: str) -> set[str]:
    """Tests that have not run on ``driver`` yet."""
    content = json.loads((FOLDER / "awaited.json").read_text(encoding="utf-8"))
    return set(content.get(driver, ()))


def test_every_contract_test_ended_alike_on_both_drivers() -> None:
    cuda = on_file("cuda")
    emulated = {name: ended for name, ended in on_file("emulated").items() if name in cuda}
    assert outcome_differences(emulated, cuda) == []


def test_few_tests_are_awaited_and_none_of_them_has_run() -> None:
    assert awaited("emulated") == set()
    assert len(awaited("cuda")) <= 5
    assert not awaited("cuda") & on_file("cuda").keys()


@pytest.mark.parametrize("driver", ["emulated", "cuda"])
def test_no_contract_test_on_file_failed(driver: str) -> None:
    # alike is not enough: both could fail
    assert {test for test, outcome in on_file(driver).items() if outcome != "passed"} == set()


@pytest.mark.parametrize("driver", ["emulated", "cuda"])
def test_the_outcomes_on_file_are_those_of_the_tests_there_are(driver: str) -> None:
    recorded = on_file(driver).keys()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, SUITE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    tests = [split_driver(line) for line in done.stdout.splitlines() if "::" in line]
    assert recorded | awaited(driver) == {test for name, test in tests if name == driver}
