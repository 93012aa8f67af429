"""CuPy: its current stream. Everything here does nothing where CuPy is not loaded."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from graphcore.errors import DriverUnavailable


def is_loaded() -> bool:
    """Whether the process has imported CuPy."""
    return hasattr(sys.modules.get("cupy"), "cuda")


def require() -> Any:
    """CuPy; DriverUnavailable with the install line where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise DriverUnavailable(
            f"CuPy is needed here and cannot be imported ({error}): "
            "pip install 'graphcore-cuda[cupy]'"
        ) from error
    return cupy


def current_stream(device: int) -> int | None:
    """Handle of CuPy's current stream on ``device``; None where CuPy is not loaded."""
    if not is_loaded():
        return None
    handle: int = sys.modules["cupy"].cuda.get_current_stream(device).ptr
    return handle


def current_stream_object(device: int) -> object:
    """CuPy's current stream on ``device``; None where CuPy is not loaded."""
    if not is_loaded():
        return None
    stream: object = sys.modules["cupy"].cuda.get_current_stream(device)
    return stream


def use_stream(handle: int, device: int) -> AbstractContextManager[object]:
    """Makes ``handle`` CuPy's current stream on ``device``, where CuPy is loaded."""
    if not is_loaded():
        return nullcontext()
    cuda = sys.modules["cupy"].cuda
    stack = ExitStack()
    stack.enter_context(cuda.Device(device))
    stack.enter_context(cuda.Stream.from_external(_Handle(handle)))
    return stack


class _Handle:
    """A bare handle that speaks the stream protocol; borrowed."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)
