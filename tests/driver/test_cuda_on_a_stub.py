"""graphcore.driver.cuda against a libcuda without a device: that every call is made as it must be.

What CUDA then does is for the contract suite on a device. Each driver version runs in one process
of its own, because the bindings load a libcuda once.
"""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import stub_cases

from graphcore.driver import open_driver
from graphcore.errors import DriverUnavailable

HELPERS = Path(stub_cases.__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    pytest.importorskip("cuda.bindings")
    if sys.platform != "linux":
        pytest.skip("the stub is a Linux library")
    if COMPILER is None:
        pytest.skip("no C compiler (cc, gcc or clang) to build the stub")
    folder = tmp_path_factory.mktemp("stub")
    source = HELPERS / "stub_libcuda.c"
    flags = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1"]
    target = folder / "libcuda.so.1"
    subprocess.run([COMPILER, *flags, "-o", target, source, "-ldl"], check=True)
    return functools.cache(functools.partial(_run, folder))


def _run(folder, version):
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "STUB_CUDA_VERSION": str(version),
    }
    done = subprocess.run(
        [sys.executable, "-m", "helpers.stub_cases"],
        env=environment,
        cwd=HELPERS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("version", [13000, 13020], ids=["cuda-13.0", "cuda-13.2"])
@pytest.mark.parametrize("case", stub_cases.CASES)
def test_on_the_stub(outcomes, case, version):
    outcome = outcomes(version)[case]
    assert outcome == "passed", outcome


def test_without_a_driver_library_the_reason_is_told():
    pytest.importorskip("cuda.bindings")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a CUDA driver library is installed")
    with pytest.raises(DriverUnavailable, match="no CUDA driver library could be loaded"):
        open_driver("cuda")
