"""An emulated driver whose work takes simulated time, on a clock that only its users move.

Results are there at once; what is simulated is when events fire and how long waiting takes. A
reading of the clock takes a microsecond, a launch what its caller pays, a graph what it is said to.
"""

from __future__ import annotations

from typing import Any

import pytest

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import EventHandle, ExecHandle, StreamHandle

MICROSECOND = 1e-6


class TimedDriver(EmulatedDriver):
    """Args as of EmulatedDriver, and:

    graph_seconds: What a launched graph runs on the device.
    """

    def __init__(self, *, graph_seconds: float = 10e-3, **more: Any) -> None:
        super().__init__(**more)
        self.now = 0.0
        self.graph_seconds = graph_seconds
        self._free: dict[int, float] = {}
        self._fires: dict[int, float] = {}

    # ---- the clock -----------------------------------------------------------------------------

    def clock(self) -> float:
        """The time, which moves on by looking at it."""
        self.now += MICROSECOND
        return self.now

    def work(self, seconds: float) -> None:
        """The host works for so long."""
        self.now += seconds

    def is_clock_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of calls are measured on this clock from here on."""
        for module in ("step_doing", "step_running", "fast_running"):
            monkeypatch.setattr(f"graphcore.moe.steps.{module}.perf_counter", self.clock)

    def _wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def _end_of(self, stream: int) -> float:
        return max(self._free.get(int(stream), 0.0), self.now)

    # ---- work ----------------------------------------------------------------------------------

    def launch_graph(self, executable: ExecHandle, stream: StreamHandle) -> None:
        super().launch_graph(executable, stream)
        self._free[int(stream)] = self._end_of(stream) + self.graph_seconds

    def record_event(
        self, event: EventHandle, stream: StreamHandle, *, external: bool = False
    ) -> None:
        super().record_event(event, stream, external=external)
        self._fires[event] = self._end_of(stream)

    def wait_event(
        self, stream: StreamHandle, event: EventHandle, *, external: bool = False
    ) -> None:
        super().wait_event(stream, event, external=external)
        self._free[int(stream)] = max(self._end_of(stream), self._fires.get(event, 0.0))

    # ---- looking and waiting -------------------------------------------------------------------

    def query_event(self, event: EventHandle) -> bool:
        return super().query_event(event) and self.clock() >= self._fires.get(event, 0.0)

    def synchronize_event(self, event: EventHandle) -> None:
        super().synchronize_event(event)
        self._wait(self._fires.get(event, 0.0))

    def query_stream(self, stream: StreamHandle) -> bool:
        return super().query_stream(stream) and self.clock() >= self._free.get(int(stream), 0.0)

    def synchronize_stream(self, stream: StreamHandle) -> None:
        super().synchronize_stream(stream)
        self._wait(self._free.get(int(stream), 0.0))

    def synchronize(self) -> None:
        super().synchronize()
        self._wait(max(self._free.values(), default=0.0))

    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        super().elapsed_ms(start, end)
        return (self._fires[end] - self._fires[start]) * 1e3
