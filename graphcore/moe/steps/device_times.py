"""DeviceTimes: how long steps of each kind take on the device, by events around their launches.

Nothing waits for the device: what has run by now is added up when somebody looks, or many wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from graphcore.driver import Driver, Event, Stream
from graphcore.moe.manifests.names import Kind

_MOST_WAITING = 64


class DeviceTimes:
    """Events around launches. Not locked.

    Args:
        driver: Where steps run.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._waiting: deque[tuple[Kind, Event, Event]] = deque()
        self._spare: list[Event] = []
        self._sums: dict[Kind, tuple[int, float]] = {}

    @contextmanager
    def around(self, kind: Kind, stream: Stream) -> Iterator[None]:
        """A block whose work on ``stream`` counts as a step of ``kind``; one that raises does not.

        Raises:
            CudaError: The driver refused an event.
        """
        start, end = self._event(), self._event()
        stream.record(start)
        yield
        stream.record(end)
        self._waiting.append((kind, start, end))
        if len(self._waiting) > _MOST_WAITING:
            self._collect()

    def sums(self) -> dict[Kind, tuple[int, float]]:
        """(steps, seconds on the device) of each kind, of those that have run by now."""
        self._collect()
        return dict(self._sums)

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else self._driver.event(timing=True)

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][2].query():
            kind, start, end = self._waiting.popleft()
            count, seconds = self._sums.get(kind, (0, 0.0))
            self._sums[kind] = count + 1, seconds + end.elapsed_ms_since(start) / 1e3
            self._spare += [start, end]
