"""Work on the legacy default stream, which orders with every blocking stream of its device.

A capture on a blocking stream breaks where another thread works there meanwhile: CUDA refuses the
work, and the capture is lost besides. What graphcore itself would do there is refused before that,
or waits for the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from graphcore.driver import LEGACY_STREAM, Driver, Stream, active
from graphcore.driver.records import StreamHandle
from graphcore.errors import CaptureError
from graphcore.interop import current_stream
from graphcore.interop.drivers import same_driver

LEGACY = (0, LEGACY_STREAM)
IMPLICIT = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"


def refuse_legacy_work(driver: Driver, stream: StreamHandle, what: str) -> None:
    """Raises CaptureError where work on ``stream`` is legacy work that would break a capture.

    Args:
        driver: Whose stream it is.
        stream: Where the work is to go.
        what: Who asks, for the message.
    """
    if stream not in LEGACY:
        return
    for capture in active.under_way():
        if capture.is_waiting:  # for us, perhaps
            continue
        if capture.breaks_on_legacy_work and same_driver(driver, capture.driver):
            raise CaptureError(
                f"{what}: expected a stream of its own, got the legacy stream, on which work would "
                f"break {capture.name} (a blocking stream); nothing was done. What to do: name a "
                "stream that was created, or make one the current stream; do it after the capture; "
                "or capture with on_legacy_work='ignore'",
                code=IMPLICIT,
            )


def turn_on(*streams: StreamHandle) -> AbstractContextManager[None]:
    """A block for work on ``streams``; where one is the legacy stream, no other thread captures.

    Raises:
        LifecycleError: On entering: another thread still captures; see
            :func:`graphcore.driver.active.outside_captures`.
    """
    if any(stream in LEGACY for stream in streams):
        return active.outside_captures()
    return nullcontext()


def launching_beside_no_capture(
    launch: Callable[[], Any], otherwise: Callable[[], object]
) -> Callable[[], Any]:
    """``launch``, which goes to the legacy stream, behind ``otherwise()`` where anything captures.

    A capture that another thread begins meanwhile waits for it.
    """
    captures, launching, here = active.UNDER_WAY, active.LEGACY_LAUNCHES, active.HERE

    def launch_beside_none() -> Any:
        thread = here.number
        try:
            launching[thread] = None
            if captures:
                otherwise()
            return launch()
        finally:
            launching.pop(thread, None)

    return launch_beside_none


def launching_while_current(
    launch: Callable[[], Any], read: Callable[[], int], otherwise: Callable[[], object]
) -> Callable[[], Any]:
    """As :func:`launching_beside_no_capture`; ``otherwise()`` too where ``read`` has changed.

    One function and not two: behind a step each costs the host more than what it does.
    """
    captures, launching, here = active.UNDER_WAY, active.LEGACY_LAUNCHES, active.HERE
    expected = read()

    def launch_there() -> Any:
        thread = here.number
        try:
            launching[thread] = None
            if captures or read() != expected:
                otherwise()
            return launch()
        finally:
            launching.pop(thread, None)

    return launch_there


def follow_current_stream(driver: Driver, stream: Stream) -> None:
    """Makes ``stream`` wait for what the current stream has by now.

    Raises:
        CaptureError: The current stream is the legacy one, and asking it would break a capture.
    """
    current = current_stream(driver)
    if current in LEGACY and stream.is_blocking:
        return  # CUDA orders the two by itself
    refuse_legacy_work(driver, current, "capture")
    event = driver.event()
    driver.record_event(event.handle, current)
    stream.wait(event)
