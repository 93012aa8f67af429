"""StreamOrder: steps over one pool of slots one after the other, whatever streams they are on.

Steps of one stream are in order by themselves and cost nothing; a step on another stream first
waits, on the device, for all that the last one's stream had by then.
"""

from __future__ import annotations

from graphcore.driver import Driver, Stream, active
from graphcore.driver.records import StreamHandle
from graphcore.errors import CudaError, LifecycleError
from graphcore.executable.legacy_work import turn_on


class StreamOrder:
    """The stream of the newest step. For whoever uses the slots exclusively; not locked."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._last: Stream | None = None
        self.handle: StreamHandle | None = None
        """Of the newest step; None before the first."""
        self.turn = 0
        """Another number after each step on another stream, and after whatever else makes the slots
        not those that the newest step left. The pool says so."""

    def enter(self, stream: Stream) -> None:
        """Orders what follows on ``stream`` behind the steps before.

        Raises:
            CudaError: The driver refused; the order is as before.
        """
        last = self._last
        if last is not None:
            if last.handle == stream.handle:
                self._last = stream
                return
            with turn_on(last.handle, stream.handle):
                self._follow(last, stream)
        handle = stream.handle
        self._last, self.handle = stream, handle
        self.turn += 1

    def _follow(self, last: Stream, stream: Stream) -> None:
        try:
            event = last.record()
        except (CudaError, LifecycleError):
            # the last one's stream is gone, and its work may not be over
            with active.outside_captures():
                self._driver.synchronize()
        else:
            stream.wait(event)
