"""The primary context of a device, and the rule by which calls find it current.

It guarantees that a call made through ``in_context`` runs with the device's primary context (the
one torch, CuPy and the CUDA runtime use) current on the calling thread, and that another context
that was current there is current again afterwards: a driver for device 1 does not move torch to
device 1. A thread that had no context keeps this one. The context is retained for the life of the
process, as the runtime does, because handles may outlive any driver object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from graphcore.driver.api import Driver
from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.callbacks import HostCallbacks
from graphcore.driver.cuda.check import ask, code_name
from graphcore.driver.cuda.versions import EntryPoints, cuda, usable_version
from graphcore.errors import DriverUnavailable

# handles 0, 1 and 2 mean default streams of the current context or thread
LAST_NAMED_STREAM = 2

P = ParamSpec("P")
R = TypeVar("R")


class PrimaryContext:
    """The retained primary context of device ``ordinal``.

    ``has_neighbours``: the machine has other devices.

    Raises:
        DriverUnavailable: No driver library, a driver older than CUDA 13, or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        self.driver_version = _initialize()
        count = ask(cuda.cuDeviceGetCount)
        if not 0 <= ordinal < count:
            raise DriverUnavailable(
                f"driver 'cuda': expected a device ordinal in 0..{count - 1}, got {ordinal}"
            )
        self.has_neighbours = count > 1
        self.device = ask(cuda.cuDeviceGet, ordinal)
        self.object = _retain(ordinal)
        self.id = int(ask(cuda.cuCtxGetId, self.object))
        # compared whole, which costs half of what taking it apart does
        self._here = cuda.CUresult.CUDA_SUCCESS, self.object

    def enter(self) -> Any:
        """Makes the context current; returns the one to go back to, None where there is none."""
        answer = cuda.cuCtxGetCurrent()
        if answer == self._here:
            return None
        code, current = answer
        ask(cuda.cuCtxSetCurrent, self.object)
        return current if not code and int(current) else None

    def called_in(self, call: Callable[[], object]) -> Callable[[], object]:
        """``call`` with the context current; costs next to nothing where it is, as it mostly is.

        For bound calls that go to whichever context is current.
        """
        current, here = cuda.cuCtxGetCurrent, self._here

        def checked() -> object:
            if current() == here:
                return call()
            previous = self.enter()
            try:
                return call()
            finally:
                if previous is not None:
                    cuda.cuCtxSetCurrent(previous)

        return checked


@functools.cache
def _retain(ordinal: int) -> Any:
    return ask(cuda.cuDevicePrimaryCtxRetain, ask(cuda.cuDeviceGet, ordinal))


def _initialize() -> int:
    try:
        code, *_ = cuda.cuInit(0)
    except RuntimeError as error:  # the bindings raise where there is no libcuda
        raise DriverUnavailable(
            f"driver 'cuda': no CUDA driver library could be loaded ({error})"
        ) from error
    if code:
        raise DriverUnavailable(f"driver 'cuda': cuInit answered {code_name(code)} ({int(code)})")
    version = int(ask(cuda.cuDriverGetVersion))
    usable_version(version)
    return version


class CudaCalls(Driver):
    """What the parts of the CUDA driver share: device, context, entry points, host callbacks."""

    device: int
    _context: PrimaryContext
    _entry_points: EntryPoints
    _callbacks: HostCallbacks


S = TypeVar("S", bound=CudaCalls)


def in_context(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Runs a method with its driver's context current.

    A number that fits none of CUDA's fields, which the bindings answer with OverflowError, becomes
    the CudaError that CUDA would give it.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        previous = self._context.enter()
        try:
            return method(self, *args, **kwargs)
        except OverflowError as error:
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE", method.__name__, description=str(error)
            ) from error
        finally:
            if previous is not None:
                cuda.cuCtxSetCurrent(previous)

    return call
