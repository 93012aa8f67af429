"""Where a kernel of this package runs: the driver and the stream for given operands.

The stream, in order: the one that was passed; the capture under way on this thread, or the current
stream of torch or CuPy where a fork of theirs joined that capture; their current stream, CuPy's for
CuPy arrays, else torch's where it is in use, else CuPy's; that of graphcore's ``use_stream``; the
legacy stream. The driver is the stream's, the capture's or a buffer's, else one kept for the
device. CPU tensors are the emulated driver's memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphcore.driver import LEGACY_STREAM, Driver, Stream, active, stream_handle
from graphcore.driver.kept import kept_driver
from graphcore.driver.records import CaptureState, DeviceInfo, StreamHandle
from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import TensorRef, is_tensor

_facts: weakref.WeakKeyDictionary[Driver, DeviceInfo] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as it was passed, and its description."""

    obj: Any
    ref: TensorRef

    @property
    def owner(self) -> Any:
        """What a graph keeps alive: the tensor that owns the memory, or the buffer over it."""
        return self.ref.owner if is_tensor(self.ref.owner) else self.obj


@dataclass(frozen=True, slots=True)
class Place:
    """A driver, and a stream of it."""

    driver: Driver
    stream: StreamHandle

    @property
    def is_captured(self) -> bool:
        """Whether what is launched here goes to the capture that this thread has under way."""
        capture = active.current()
        # no capture takes the legacy stream, and asking about it may be an error in one
        if capture is None or self.stream in (0, LEGACY_STREAM):
            return False
        if self.driver is capture.driver and self.stream == capture.stream:
            return True
        return self.driver.capture_status(self.stream).state is CaptureState.ACTIVE


def device_facts(driver: Driver) -> DeviceInfo:
    """What the driver's device is, asked once."""
    facts = _facts.get(driver)
    if facts is None:
        facts = _facts[driver] = driver.device_info()
    return facts


def choose_place(stream: Any, operands: Sequence[Operand], chosen: Driver | None = None) -> Place:
    """Where work on ``operands``, which lie on one device, runs.

    Args:
        stream: Anything that is a stream, or None.
        operands: The tensors, at least one.
        chosen: The driver, where the caller names it; a stream's and a capture's come before it.

    Raises:
        CacheTypeError: ``stream`` is no stream.
        ConfigurationError: The stream, or the capture under way, is another device's.
    """
    if stream is not None:
        driver = stream.driver if isinstance(stream, Stream) else choose_driver(operands, chosen)
        _check_home("stream", driver, operands[0])
        return Place(driver, stream_handle(stream))
    capture = active.current()
    if capture is None:
        driver = choose_driver(operands, chosen)
        streams = _library_streams(driver, operands)
        handle = next(streams, None) or active.used_stream(driver)
        return Place(driver, handle or LEGACY_STREAM)
    assert isinstance(capture.driver, Driver)
    _check_home("capture", capture.driver, operands[0])
    for fork in _library_streams(capture.driver, operands):
        place = Place(capture.driver, fork)
        if place.is_captured:
            return place
    return Place(capture.driver, capture.stream)


def current_stream_reader(driver: Driver, operands: Sequence[Operand]) -> Callable[[], int] | None:
    """What tells, at little cost, whether :func:`choose_place` would find another current stream.

    It gives a number that is the same as long as the stream is. None: only a whole look tells,
    because a library that comes before the one in use may be taken into use.
    """
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    device = operands[0].ref.device
    if driver.is_emulated:
        return None
    if hasattr(cupy, "cuda") and any(isinstance(each.obj, cupy.ndarray) for each in operands):
        return partial(_stream_of_cupy, cupy, device)
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return partial(torch._C._cuda_getCurrentRawStream, device)
    return None


def choose_driver(operands: Sequence[Operand], chosen: Driver | None = None) -> Driver:
    """The driver of the capture under way or of the operands, else the one kept for their device.

    Args:
        operands: The tensors, at least one.
        chosen: The driver, where the caller names it.

    Raises:
        ConfigurationError: ``chosen`` is another device's.
        DriverUnavailable: It cannot be opened.
    """
    if chosen is not None:
        _check_home("driver", chosen, operands[0])
        return chosen
    capture = active.current()
    candidates = [capture.driver] if capture else []
    candidates += [getattr(operand.obj, "driver", None) for operand in operands]
    for driver in candidates:
        if isinstance(driver, Driver) and _is_home(driver, operands[0]):
            return driver
    ref = operands[0].ref
    return kept_driver("cuda" if ref.device_kind == "cuda" else "emulated", ref.device)


def _library_streams(driver: Driver, operands: Sequence[Operand]) -> Iterator[StreamHandle]:
    """The current streams of torch and CuPy, as far as they are in use; none without a device."""
    if driver.is_emulated:
        return
    device = operands[0].ref.device
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    has_cupy = hasattr(cupy, "cuda")
    is_cupys = has_cupy and any(isinstance(operand.obj, cupy.ndarray) for operand in operands)
    if is_cupys:
        yield _stream_of_cupy(cupy, device)
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        yield StreamHandle(torch.cuda.current_stream(device).cuda_stream or LEGACY_STREAM)
    if has_cupy and not is_cupys:
        yield _stream_of_cupy(cupy, device)


def _stream_of_cupy(cupy: Any, device: int) -> StreamHandle:
    return StreamHandle(cupy.cuda.get_current_stream(device).ptr or LEGACY_STREAM)


def _is_home(driver: Driver, operand: Operand) -> bool:
    """Whether ``operand`` is memory of the driver's device."""
    if driver.is_emulated:
        return operand.ref.device_kind == "cpu"
    return operand.ref.device_kind == "cuda" and operand.ref.device == driver.device


def _check_home(what: str, driver: Driver, operand: Operand) -> None:
    if not _is_home(driver, operand):
        ref = operand.ref
        home = f"cuda:{ref.device}" if ref.device_kind == "cuda" else "cpu (emulated driver)"
        raise ConfigurationError(
            f"{what}: expected one of the tensors' device {home}, "
            f"got driver {driver.name}:{driver.device}"
        )
