"""Which driver: by name, by the environment, or by what the machine has."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from graphcore.driver.api import Driver
from graphcore.errors import ConfigurationError, DriverUnavailable

_log = logging.getLogger("graphcore")
_told = False


def open_driver(name: str | None = None, *, device: int | None = None, **options: Any) -> Driver:
    """Opens a driver.

    Args:
        name: "cuda", "emulated", or None: what the environment variable ``GRAPHCORE_DRIVER`` says,
            else "cuda" where a device is usable, else "emulated" (said once, as a WARNING).
        device: Device ordinal; None is 0.
        options: For the emulated driver: ``devices=1``, ``order="program"|"adversarial"``,
            ``seed=0``.

    Raises:
        ConfigurationError: An unknown name or option, or a device that is no ordinal.
        DriverUnavailable: "cuda" was asked for and cannot be had; the message says why. Or Python
            runs without its global lock.
    """
    _refuse_without_the_lock()
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(
            f"name: expected 'cuda', 'emulated' or None, got {name!r}; device= chooses a device"
        )
    chosen = name or os.environ.get("GRAPHCORE_DRIVER") or None
    if chosen not in (None, "cuda", "emulated"):
        where = "name" if name else "environment variable GRAPHCORE_DRIVER"
        raise ConfigurationError(f"{where}: expected 'cuda' or 'emulated', got {chosen!r}")
    _check_device(device)
    if chosen == "emulated":
        return _open_emulated(device, options)
    if options and chosen == "cuda":
        raise ConfigurationError(f"driver 'cuda': unknown options {sorted(options)}")
    try:
        return _open_cuda(device)
    except DriverUnavailable as error:
        if chosen == "cuda":
            raise
        _tell_once(str(error))
    return _open_emulated(device, options)


def _refuse_without_the_lock() -> None:
    # counts of owners, the garbage collector's rest, and flags of guards rely on the lock
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise DriverUnavailable(
            "free-threaded Python: expected its global lock, which graphcore relies on; run this "
            "interpreter with PYTHON_GIL=1 (or -X gil=1), or use an ordinary build"
        )


def _check_device(device: object) -> None:
    if device is None or (isinstance(device, int) and not isinstance(device, bool)):
        return
    raise ConfigurationError(f"device: expected an ordinal (int) or None, got {device!r}")


def _open_cuda(device: int | None) -> Driver:
    from graphcore.driver.cuda import CudaDriver

    return CudaDriver(device or 0)


def _open_emulated(device: int | None, options: dict[str, Any]) -> Driver:
    from graphcore.driver.emulated import EmulatedDriver

    try:
        return EmulatedDriver(device=device or 0, **options)
    except TypeError as error:
        raise ConfigurationError(f"driver 'emulated': {error}") from None


def _tell_once(reason: str) -> None:
    global _told
    if not _told:
        _told = True
        _log.warning(
            "no usable CUDA device (%s): using the emulated driver; results are right, times mean "
            "nothing. Set GRAPHCORE_DRIVER=emulated to choose it on purpose.",
            reason,
        )
