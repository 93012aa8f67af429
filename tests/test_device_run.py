"""The run of the gpu tests on a device: what it compiles ahead, and how it ends in time."""

import subprocess
import sys
import time
from collections import Counter

import pytest
from graphcore_kernels._catalogue import catalogue
from helpers import device_run
from helpers.repository import ROOT


def test_every_kernel_is_compiled_once():
    kernels = [kernel for module in device_run.modules("sm_90a") for kernel in module]
    assert Counter(kernels) == Counter({entry.kernel: 1 for entry in catalogue("sm_90a")})
    for module in device_run.modules("sm_90a"):
        assert len({(kernel.source, kernel.options) for kernel in module}) == 1


def first_kernel(architecture, index):
    """Stands in for a compilation."""
    return float(index), device_run.modules(architecture)[index][0].name


def test_every_module_is_given_to_a_process_of_its_own_interpreter():
    done = device_run.compile_all("sm_90a", 2, first_kernel)
    names = [module[0].name for module in device_run.modules("sm_90a")]
    assert done == sorted(((float(n), name) for n, name in enumerate(names)), reverse=True)


def test_a_device_takes_the_kernels_of_its_capability():
    assert device_run.architecture_of((9, 0)) == "sm_90a"
    with pytest.raises(SystemExit, match=r"no kernels are listed for a device of \(7, 5\)"):
        device_run.architecture_of((7, 5))


@pytest.mark.parametrize(("from_now", "outcome"), [(-1, "1 skipped"), (600, "1 passed")])
def test_tests_are_skipped_once_the_time_is_over(from_now, outcome, monkeypatch):
    monkeypatch.setenv(device_run.UNTIL, str(time.time() + from_now))
    chosen = "tests/test_device_run.py::test_a_device_takes_the_kernels_of_its_capability"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in done.stdout, done.stdout


@pytest.mark.parametrize(("slow", "marks"), [(False, "gpu and not slow"), (True, "gpu")])
def test_slow_tests_run_where_they_are_asked_for(slow, marks):
    command = device_run.pytest_command(4, "found.json", 3, ["tests/moe"], slow=slow)
    assert command[command.index("-rf") + 2] == marks
    assert command[-1] == "tests/moe"


def test_a_machine_without_a_device_is_told():
    done = subprocess.run(
        [sys.executable, "tests/helpers/device_run.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/tests", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode != 0
    assert "DriverUnavailable" in done.stderr
