"""Drivers kept for calls that name none: one per name and device, nobody's to close.

Everything made without naming a driver works together this way. There is no current driver to set:
the choice is the environment's and the machine's (:func:`graphcore.open_driver`).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.opening import open_driver

_kept: dict[tuple[str, int], Driver] = {}
_defaults: dict[tuple[str, int], Driver] = {}


def kept_driver(name: str, device: int) -> Driver:
    """The kept driver of this name and device; DriverUnavailable where it cannot be opened."""
    key = (name, device)
    if key not in _kept:
        _kept[key] = open_driver(name, device=device)
    return _kept[key]


def default_driver() -> Driver:
    """The kept driver that :func:`open_driver` would open, on the current device."""
    device = current_device()
    key = (os.environ.get("GRAPHCORE_DRIVER", ""), device)
    if key not in _defaults:
        driver = open_driver(device=device)
        _defaults[key] = _kept.setdefault((driver.name, driver.device), driver)
    return _defaults[key]


def current_device() -> int:
    """The current device of torch, else of CuPy, where they are in use; else 0."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    cupy: Any = sys.modules.get("cupy")
    if hasattr(cupy, "cuda"):
        runtime = cupy.cuda.runtime
        try:
            return int(runtime.getDevice())
        except runtime.CUDARuntimeError:  # no device
            return 0
    return 0
