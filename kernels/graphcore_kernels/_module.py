"""Kernels of this package: their source, and how it is loaded on a device, through CuPy.

One compiled module per source and device, kept for the life of the process: a graph may hold its
functions. Without CuPy the driver compiles the same source itself.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from graphcore.driver import Driver, Kernel
from graphcore.driver.records import FunctionHandle

_loaded: weakref.WeakKeyDictionary[Driver, dict[Kernel, FunctionHandle]] = (
    weakref.WeakKeyDictionary()
)


@cache
def read_source(name: str) -> str:
    """The text of a ``.cu`` file of this package."""
    return resources.files("graphcore_kernels").joinpath(name).read_text(encoding="utf-8")


def load(driver: Driver, kernel: Kernel) -> FunctionHandle:
    """The function of ``kernel`` on ``driver``, also for the first time inside a capture.

    Loading may allocate, which a capture forbids its thread unless the thread's mode is relaxed.
    """
    functions = _loaded.setdefault(driver, {})
    function = functions.get(kernel)
    if function is None:
        mode = driver.exchange_capture_mode("relaxed")
        try:
            function = functions[kernel] = driver.function(kernel)
        finally:
            driver.exchange_capture_mode(mode)
    return function


def load_through_cupy(driver: Driver, kernel: Kernel) -> FunctionHandle:
    """A :class:`Kernel`'s loader: compiles with ``cupy.RawModule`` on the driver's device."""
    try:
        import cupy
    except ImportError:
        return driver.function(replace(kernel, loader=None))
    with cupy.cuda.Device(driver.device):
        function = _raw_kernel(kernel.source, kernel.options, kernel.name, driver.device)
        return FunctionHandle(int(function.kernel.ptr))


@cache
def _raw_module(source: str, options: tuple[str, ...], device: int) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=options)


@cache
def _raw_kernel(source: str, options: tuple[str, ...], name: str, device: int) -> Any:
    # kept, because the function dies with the object that loaded it
    return _raw_module(source, options, device).get_function(name)
