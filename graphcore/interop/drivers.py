"""Which driver is meant where none is given: by streams, buffers and tensors, else by the machine.

Where a driver has to be opened, it is a kept one (driver/kept.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphcore.driver import Driver
from graphcore.driver.kept import default_driver, kept_driver
from graphcore.errors import ConfigurationError, CudaError
from graphcore.resources.tensors import describe, is_tensor


def choose_driver(*objects: Any) -> Driver:
    """The driver that ``objects`` belong to; the default one where they do not say.

    Streams, buffers and graphs of graphcore know their driver. Tensors on a CUDA device and streams
    of other libraries mean the cuda driver of that device, CPU tensors the emulated one.

    Raises:
        ConfigurationError: Two objects mean different drivers.
        DriverUnavailable: The driver meant is not usable.
    """
    chosen: Driver | None = None
    for obj in objects:
        driver = _driver_of(obj)
        if driver is None or driver is chosen:
            continue
        if chosen is not None and not same_driver(chosen, driver):
            raise ConfigurationError(
                f"driver: expected objects of one driver, got {chosen.name}:{chosen.device} and "
                f"{driver.name}:{driver.device} ({type(obj).__name__})"
            )
        chosen = chosen or driver
    return chosen or default_driver()


def same_driver(one: Driver, other: object) -> bool:
    """Whether two drivers work in the same context of the same machine.

    Several driver objects may: one opened twice for a device, say. A closed one has no context.
    """
    if one is other:
        return True
    if not isinstance(other, Driver) or (one.name, one.device) != (other.name, other.device):
        return False
    try:
        return one.context_id() == other.context_id()
    except CudaError:
        return False


def _driver_of(obj: Any) -> Driver | None:
    if isinstance(obj, Driver):
        return obj
    driver = getattr(obj, "driver", None)
    if isinstance(driver, Driver):
        return driver
    if is_tensor(obj):
        ref = describe(obj)
        name = "cuda" if ref.device_kind == "cuda" else "emulated"
        return kept_driver(name, ref.device)
    device = _device_of_stream(obj)
    return None if device is None else kept_driver("cuda", device)


def _device_of_stream(stream: Any) -> int | None:
    """Device ordinal of a stream of torch, CuPy or cuda.core; None for anything else."""
    readers: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("cuda_stream", lambda: stream.device_index),  # torch
        ("device_id", lambda: stream.device_id),  # CuPy
        ("__cuda_stream__", lambda: stream.device.device_id),  # cuda.core
    )
    for attribute, reader in readers:
        if hasattr(stream, attribute):
            try:
                device = reader()
            except AttributeError:
                continue
            # CuPy says -1 for streams that belong to whichever device is current
            return device if isinstance(device, int) and device >= 0 else None
    return None
