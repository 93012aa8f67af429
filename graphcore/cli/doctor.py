"""``graphcore doctor``: driver, devices, versions, what is missing, and the command that mends it.

Exit status 0 where graphcore can be used: a driver works, that of the device or the emulated one
(or the one that was asked for); else 1. What is missing besides is listed with what mends it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import graphcore
from graphcore.cli.model import INSTALL_DEMO, INSTALL_MODEL, find_model
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError, GraphcoreError

# distribution -> (lowest version that is tested, what it is for, what mends it)
_PACKAGES = {
    "cuda-bindings": ((13, 0), "the CUDA driver", "pip install 'cuda-python>=13,<14'"),
    "numpy": ((2, 0), "the emulated driver", "pip install 'numpy>=2'"),
    "cupy-cuda13x": ((14, 2), "the kernels on a GPU, the fastest launch", "pip install "
                     "'cupy-cuda13x>=14.2'"),
    "torch": ((2, 11), "tensors and models", "pip install 'torch>=2.11'"),
    "transformers": ((5, 17), "static caches and decode", "pip install 'transformers>=5.17'"),
    "gguf": ((0, 10), "the demo's model file", INSTALL_DEMO),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` is None where nothing is wrong.

    ``driver`` names the driver that the line is about.
    """

    name: str
    value: str
    remedy: str | None = None
    driver: str | None = None


def doctor(driver: str | None = None) -> int:
    """Prints the findings; returns 0 where graphcore can be used, else 1.

    Args:
        driver: "cuda" or "emulated": the one that must work; None: any.
    """
    found = list(findings())
    width = max(len(finding.name) for finding in found)
    for finding in found:
        mark = "ok" if finding.remedy is None else "--"
        print(f"{mark}  {finding.name:<{width}}  {finding.value}")
        if finding.remedy is not None:
            print(f"    {'':<{width}}  -> {finding.remedy}")
    wrong = sum(finding.remedy is not None for finding in found)
    print(f"\n{wrong} of {len(found)} need attention" if wrong else "\nall is well")
    working = [each.driver for each in found if each.driver and each.remedy is None]
    if "cuda" not in working and "emulated" in working:
        print("the emulated driver works; no GPU: results are right, times mean nothing")
    usable = bool(working) if driver is None else driver in working
    if not usable:
        print(f"not usable: {'no driver' if driver is None else f'driver {driver!r}'} works here")
    return 0 if usable else 1


def findings() -> Iterator[Finding]:
    """Everything the doctor looks at, in order."""
    yield Finding("graphcore", graphcore.__version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield from _cuda()
    yield _emulated()
    for name, (lowest, purpose, remedy) in _PACKAGES.items():
        yield _package(name, lowest, purpose, remedy)
    yield _torch_build()
    yield _model()


def _cuda() -> Iterator[Finding]:
    try:
        driver = open_driver("cuda")
    except GraphcoreError as error:
        yield Finding(
            "cuda driver", str(error),
            "install an NVIDIA driver that serves CUDA 13 (580 or newer); until then "
            "GRAPHCORE_DRIVER=emulated runs everything without a GPU", driver="cuda",
        )  # fmt: skip
        return
    info = driver.device_info()
    yield Finding("cuda driver", "CUDA {}.{}".format(*info.driver_version), driver="cuda")
    free, total = driver.memory_info()
    major, minor = info.capability
    yield Finding(
        f"device {info.index}",
        f"{info.name}, sm_{major}{minor}, {info.multiprocessors} SMs, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
    )
    driver.close()


def _emulated() -> Finding:
    try:
        driver = open_driver("emulated")
        driver.free(driver.alloc(1))
    except (GraphcoreError, ImportError) as error:
        return Finding("emulated driver", str(error), "pip install 'numpy>=2'", driver="emulated")
    return Finding("emulated driver", "works, without a GPU", driver="emulated")


def _package(name: str, lowest: tuple[int, ...], purpose: str, remedy: str) -> Finding:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Finding(name, f"not installed (needed for {purpose})", remedy)
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < lowest:
        wanted = ".".join(map(str, lowest))
        return Finding(name, f"{installed}, older than the tested {wanted} ({purpose})", remedy)
    return Finding(name, f"{installed} ({purpose})")


def _torch_build() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("torch build", "no torch", "pip install 'torch>=2.11'")
    if torch.version.cuda is None:
        return Finding(
            "torch build", f"{torch.__version__} is a CPU build",
            "on a GPU machine: pip install a CUDA 13 build of torch",
        )  # fmt: skip
    return Finding("torch build", f"{torch.__version__}, CUDA {torch.version.cuda}")


def _model() -> Finding:
    try:
        return Finding("demo model", find_model().name)
    except ConfigurationError as error:
        return Finding("demo model", str(error), INSTALL_MODEL)
