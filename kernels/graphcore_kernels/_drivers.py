"""Where a kernel of this package runs: the driver and the stream for given tensors.

The rule, in order: the stream that was passed; the capture under way on this thread (or torch's
current stream where a fork of torch's joined that capture); the current stream of torch or CuPy,
by whose tensors they are; the legacy stream. CPU tensors are the emulated driver's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from graphcore.driver import LEGACY_STREAM, Driver, Stream, open_driver, stream_handle
from graphcore.driver.active import ActiveCapture, current
from graphcore.driver.records import CaptureState, StreamHandle
from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import TensorRef

_DRIVER_NAMES = {"cuda": "cuda", "cpu": "emulated"}


@dataclass(frozen=True, slots=True)
class Place:
    """A driver, and a stream of it."""

    driver: Driver
    stream: StreamHandle


def choose_place(stream: Any, operands: Sequence[TensorRef]) -> Place:
    """Where work on ``operands``, which lie on one device, runs.

    Args:
        stream: Anything that is a stream, or None.
        operands: The tensors, at least one.

    Raises:
        CacheTypeError: ``stream`` is no stream.
        ConfigurationError: The stream, or the capture under way, is another device's.
    """
    if stream is not None:
        driver = stream.driver if isinstance(stream, Stream) else choose_driver(operands)
        _check_device("stream", driver, operands[0])
        return Place(driver, stream_handle(stream))
    capture = current()
    if capture is not None:
        return _place_in_capture(capture, operands)
    return Place(choose_driver(operands), _library_stream(operands) or LEGACY_STREAM)


def choose_driver(operands: Sequence[TensorRef]) -> Driver:
    """The driver that ``operands`` came from or that a capture uses, else one for their device."""
    capture = current()
    candidates = [capture.driver] if capture else []
    candidates += [getattr(operand.owner, "driver", None) for operand in operands]
    for driver in candidates:
        if isinstance(driver, Driver) and _is_home(driver, operands[0]):
            return driver
    return _driver_of_device(_DRIVER_NAMES[operands[0].device_kind], operands[0].device)


@cache
def _driver_of_device(name: str, device: int) -> Driver:
    return open_driver(name, device=device)


def _place_in_capture(capture: ActiveCapture, operands: Sequence[TensorRef]) -> Place:
    driver = capture.driver
    assert isinstance(driver, Driver)
    _check_device("capture", driver, operands[0])
    stream = _library_stream(operands)
    if stream is not None and driver.capture_status(stream).state is CaptureState.ACTIVE:
        return Place(driver, stream)
    return Place(driver, capture.stream)


def _library_stream(operands: Sequence[TensorRef]) -> StreamHandle | None:
    """The current stream of the library whose tensors these are, None where it has none."""
    if operands[0].device_kind != "cuda":
        return None
    device = operands[0].device
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    owners = [operand.owner for operand in operands]
    if torch is not None and any(isinstance(owner, torch.Tensor) for owner in owners):
        return StreamHandle(torch.cuda.current_stream(device).cuda_stream)
    if cupy is not None and any(isinstance(owner, cupy.ndarray) for owner in owners):
        with cupy.cuda.Device(device):
            return StreamHandle(cupy.cuda.get_current_stream().ptr)
    return None


def _is_home(driver: Driver, operand: TensorRef) -> bool:
    """Whether ``operand`` is memory of the driver's device."""
    if driver.is_emulated:
        return operand.device_kind == "cpu"
    return operand.device_kind == "cuda" and operand.device == driver.device


def _check_device(what: str, driver: Driver, operand: TensorRef) -> None:
    if not _is_home(driver, operand):
        home = f"cuda:{operand.device}" if operand.device_kind == "cuda" else "cpu (emulated)"
        raise ConfigurationError(
            f"{what}: expected one of the tensors' device {home}, "
            f"got driver {driver.name}:{driver.device}"
        )
