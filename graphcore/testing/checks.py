"""Checks for a GPU test suite: growth of device memory, and expected CUDA errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphcore.driver import Driver, stream_handle
from graphcore.driver.codes import find_code
from graphcore.driver.records import CaptureState
from graphcore.errors import CaptureError, ConfigurationError, CudaError


def assert_no_growth(
    action: Callable[[], object],
    *,
    driver: Driver,
    repeats: int = 20,
    warmup: int = 2,
    allowance: int = 0,
) -> None:
    """Fails where ``action`` takes device memory that it does not give back.

    Args:
        action: Called ``warmup`` times unmeasured, then ``repeats`` times.
        driver: Whose device is looked at.
        repeats: Measured calls.
        warmup: Unmeasured calls.
        allowance: Bytes that may be taken in all. Other processes on the device count too: among
            the workers of pytest-xdist, mark the test ``exclusive``.

    Raises:
        AssertionError: More was taken; says how much.
        ConfigurationError: Numbers with which it could not fail.
    """
    numbers = {"repeats": (repeats, 1), "warmup": (warmup, 0), "allowance": (allowance, 0)}
    for name, (number, least) in numbers.items():
        if number < least:
            raise ConfigurationError(f"{name}: expected at least {least}, got {number}")
    for _ in range(warmup):
        action()
    driver.synchronize()
    before, _ = driver.memory_info()
    for _ in range(repeats):
        action()
    driver.synchronize()
    after, _ = driver.memory_info()
    if before - after > allowance:
        raise AssertionError(
            f"device memory grew by {before - after} bytes over {repeats} calls (allowed: "
            f"{allowance})"
        )


@contextmanager
def capture_errors(
    code: str, *, driver: Driver | None = None, stream: Any = None
) -> Iterator[None]:
    """Expects a CUDA error by its name, and that ``stream`` has left its capture and works.

    The error may be graphcore's, or one of torch or CuPy whose text says which CUDA error it was.
    What is no CUDA error passes unchanged.

    Args:
        code: For example "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; the prefix may be left out.
        driver: With ``stream``: the driver it belongs to.
        stream: Checked after the block.

    Raises:
        AssertionError: No error, another one, or a stream that is still capturing.
    """
    wanted = full_code(code)
    try:
        yield
    except Exception as error:
        found = _code_of(error)
        if found is None and not isinstance(error, CaptureError):
            raise
        if found != wanted:
            raise AssertionError(f"expected {wanted}, got {found}: {error}") from error
    else:
        raise AssertionError(f"expected {wanted}, got no error")
    if driver is None or stream is None:
        return
    handle = stream_handle(stream)
    state = driver.capture_status(handle).state
    if state is not CaptureState.NONE:
        raise AssertionError(f"expected a stream that left its capture, got one {state.value}")
    driver.synchronize_stream(handle)


def full_code(code: str) -> str:
    """The name of a CUDA error, its prefix added where it was left out."""
    return code if code.startswith("CUDA_ERROR_") else f"CUDA_ERROR_{code}"


def _code_of(error: Exception) -> str | None:
    """The CUDA error that an exception is, or speaks of."""
    if isinstance(error, (CudaError, CaptureError)):
        return error.code
    library = type(error).__module__.partition(".")[0]
    if not isinstance(error, RuntimeError) and library not in ("torch", "cupy", "cupy_backends"):
        return None
    return find_code(str(error))
