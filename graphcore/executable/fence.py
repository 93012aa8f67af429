"""Fence: whether the launches of an executable up to now have run; costs the launches nothing.

An executable remembers the stream of its newest launch. CUDA orders the launches of one executable,
so an event recorded on that stream behind the newest one comes behind them all. Recorded only when
somebody asks: before memory that a launch may still use is given back.
"""

from __future__ import annotations

from typing import Any

from graphcore.driver import Driver, Event, Stream, active, stream_handle
from graphcore.driver.records import CaptureState, StreamHandle
from graphcore.errors import LifecycleError

_DEFAULT_STREAMS = (0, 1, 2)


class Fence:
    """A point behind the work that a stream has by now.

    Args:
        driver: Of the stream.
        stream: The object that was launched on; None or an int where only the handle is known
            (whose stream must be alive still).
        handle: Of the stream.
    """

    def __init__(self, driver: Driver, stream: Any, handle: StreamHandle) -> None:
        self._driver = driver
        self._stream = stream
        self._handle = handle
        self._event: Event | None = None
        self._is_over = False
        self._record()

    def has_passed(self) -> bool:
        """Whether that work has finished; False while it cannot be asked (a capture under way)."""
        if self._is_over:
            return True
        if active.is_any_under_way():
            return False  # asking for an event breaks captures
        if self._event is None and not self._record():
            return False
        if self._event is None:  # the stream is gone: only the device as a whole can be waited for
            self._driver.synchronize()
        elif not self._has_happened(self._event):
            return False
        self._finish()
        return True

    def _has_happened(self, event: Event) -> bool:
        # asking breaks the captures of other libraries, unless this thread says that it may
        before = self._driver.exchange_capture_mode("relaxed")
        try:
            return event.query()
        finally:
            self._driver.exchange_capture_mode(before)

    def wait(self) -> None:
        """Waits for that work.

        Raises:
            LifecycleError: A capture under way, on this thread, on the stream itself, beside the
                legacy stream or, where the stream is gone, on any thread, would break.
        """
        if self._is_over:
            return
        capture = active.current()
        if capture is not None:
            raise LifecycleError(f"{capture.name} is under way on this thread: waiting breaks it")
        if active.in_callback():
            raise LifecycleError(
                "a host callback runs on this thread, where waiting may wait for itself; let "
                "another thread wait"
            )
        if self._event is None and not self._record():
            raise LifecycleError(
                f"stream {self._handle:#x}: expected one that can be waited for, got one that is "
                "capturing, or the legacy stream beside a capture"
            )
        if self._event is not None:
            self._event.synchronize()
        elif active.is_any_under_way():
            raise LifecycleError(
                f"stream {self._handle:#x} is gone, so that only the device as a whole can be "
                "waited for, which would break a capture of another thread; wait for its end"
            )
        else:
            self._driver.synchronize()
        self._finish()

    def hold_back(self, stream: Stream) -> None:
        """Makes later work of ``stream`` come behind the fence; the host does not wait."""
        if self._is_over:
            return
        if self._event is None:
            self.wait()
        else:
            stream.wait(self._event)

    def _record(self) -> bool:
        """Records the event where the stream is there; False where that would break a capture."""
        if active.in_callback():
            return False
        if not is_alive(self._stream, self._handle):
            return True
        if self._handle not in _DEFAULT_STREAMS:
            return self._record_now()
        if active.is_any_under_way():
            return False  # work on the legacy stream breaks captures of blocking streams
        try:
            with active.outside_captures(0.0):  # none begins meanwhile
                return self._record_now()
        except LifecycleError:
            return False

    def _record_now(self) -> bool:
        if self._driver.capture_status(self._handle).state is not CaptureState.NONE:
            return False  # the event would become part of the capture
        event = self._driver.event()
        self._driver.record_event(event.handle, self._handle)
        self._event = event
        return True

    def _finish(self) -> None:
        self._is_over = True
        self._event = self._stream = None


def is_alive(stream: Any, handle: StreamHandle) -> bool:
    """Whether ``stream``, which had ``handle``, can still be asked; a bare handle must be alive."""
    if stream is None:
        return True
    try:
        return stream_handle(stream) == handle
    except Exception:  # closed by its owner; each library says so in its own way
        return False
