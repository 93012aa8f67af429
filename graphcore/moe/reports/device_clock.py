"""DeviceClock: times of a device's events on a clock of the host.

An event whose record the host begins at one time and finds done at another lies between the two.
Several such events, and every later one of which as much is known, leave an interval; a device that
others use too may keep it wide. A time is given by the first guess within the interval, and moves
only as far as something shows it to be wrong: then times of events in order stay in order.
"""

from __future__ import annotations

from collections.abc import Callable

from graphcore.driver import Driver, Event, Stream

_ROUNDS = 8


class DeviceClock:
    """Not locked.

    Args:
        driver: Of the events.
        clock: Of the host; gives seconds.

    Attributes:
        uncertainty: Seconds between the earliest and the latest time that the first events left.

    Raises:
        CudaError: The driver refused an event.
    """

    def __init__(self, driver: Driver, clock: Callable[[], float]) -> None:
        # of one event; later events are measured from later ones, since the driver's figures lose
        # digits over long times
        with driver.stream() as stream:
            self._reference, self._low, self._high = _met(stream, clock)
            for _ in range(_ROUNDS - 1):
                event, begun, done = _met(stream, clock)
                self.not_before(event, begun)
                self.not_after(event, done)
        self._time = (self._low + self._high) / 2
        self.uncertainty = self._high - self._low

    def not_before(self, event: Event, time: float) -> None:
        """Takes note that ``event`` came at ``time`` or later; what was noted before gives way."""
        self._low = max(self._low, time - self._since(event))
        self._high = max(self._high, self._low)

    def not_after(self, event: Event, time: float) -> None:
        """Takes note that ``event`` came at ``time`` or earlier."""
        self._high = min(self._high, time - self._since(event))
        self._low = min(self._low, self._high)

    def time_of(self, event: Event) -> float:
        """When ``event`` came, in seconds of the host's clock.

        Raises:
            CudaError: It has not come, or the driver could not say.
        """
        since = self._since(event)
        self._time = min(max(self._time, self._low), self._high) + since
        self._low, self._high, self._reference = self._low + since, self._high + since, event
        return self._time

    def _since(self, event: Event) -> float:
        return event.elapsed_ms_since(self._reference) / 1e3


def _met(stream: Stream, clock: Callable[[], float]) -> tuple[Event, float, float]:
    """An event, and the times of the host between which it came."""
    event = stream.driver.event(timing=True)
    begun = clock()
    stream.record(event)
    event.synchronize()
    return event, begun, clock()
