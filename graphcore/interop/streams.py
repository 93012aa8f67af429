"""Current streams: reading the one work would go to, and making ours the current one.

torch comes before CuPy where both are loaded. Without either, and on the emulated driver, where
torch's CPU work has no stream, it is that of the capture under way, else that of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from graphcore.driver import LEGACY_STREAM, Driver, active, stream_handle
from graphcore.driver.records import StreamHandle
from graphcore.interop import cupy, torch
from graphcore.interop.drivers import same_driver


def current_stream(driver: Driver) -> StreamHandle:
    """The stream that work without a stream goes to on this thread. Costs well below 1 us."""
    if not driver.is_emulated:
        handle = torch.current_stream(driver.device)
        if handle is None:
            handle = cupy.current_stream(driver.device)
        if handle is not None:
            return StreamHandle(handle or LEGACY_STREAM)
    capture = active.current()
    if capture is not None and same_driver(driver, capture.driver):
        return capture.stream
    return active.used_stream(driver) or LEGACY_STREAM


def current_stream_reader(driver: Driver) -> Callable[[], int]:
    """What says the same number as long as :func:`current_stream` says the same, at least cost."""
    if not driver.is_emulated:
        read = torch.current_stream_reader(driver.device)
        if read is not None:
            return read
    return partial(current_stream, driver)


def current_stream_holder(driver: Driver) -> object:
    """What keeps the stream of :func:`current_stream` alive: CuPy's object; None for the others.

    torch never destroys its streams; CuPy does, when their last holder drops them.
    """
    if driver.is_emulated or torch.current_stream(driver.device) is not None:
        return None
    return cupy.current_stream_object(driver.device)


@contextmanager
def use_stream(driver: Driver, stream: Any) -> Iterator[None]:
    """Makes ``stream`` the current one of torch and CuPy, as far as they are loaded, and ours.

    On the emulated driver torch's CPU work has no stream; kernels of ours go there.

    Raises:
        CacheTypeError: ``stream`` is not a stream.
    """
    handle = stream_handle(stream)
    with ExitStack() as stack:
        stack.enter_context(active.using(driver, StreamHandle(handle or LEGACY_STREAM)))
        if not driver.is_emulated:
            stack.enter_context(torch.use_stream(handle, driver.device))
            stack.enter_context(cupy.use_stream(handle, driver.device))
        yield
