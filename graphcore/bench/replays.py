"""Arms by the device's clock: a graph of many calls, launched between two events.

So neither Python nor launches are in a time, for ours and for peers alike. A way that cannot be
captured is called between the events instead, as every way is on the emulated driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from graphcore.bench.harness import Arm
from graphcore.driver import Driver, Stream
from graphcore.executable import GraphExec, capture
from graphcore.interop.streams import use_stream

Call = Callable[[Stream], object]
"""Puts one call's work on the stream, which is also torch's and CuPy's current one."""

_WARM_UPS = 2
_HOST_CALLS = 100  # fewer than a device's queue holds


@dataclass(frozen=True)
class Replayed:
    """The calls of one way, warmed up and ready to be timed.

    Args:
        name: Of the arm.
        driver: Whose clock it is.
        stream: What everything runs on.
        calls: In turn: each on memory of its own, so that caches forget.
        executable: Their graph; None where they are called one by one.
    """

    name: str
    driver: Driver
    stream: Stream
    calls: Sequence[Call]
    executable: GraphExec | None

    def arm(self, *, share: float = 1.0, turns: int | None = None) -> Arm:
        """Seconds of a call.

        Args:
            share: What they are multiplied with: for floors that are measured on another size.
            turns: So often all calls are run in a burst, whatever is asked for.
        """
        driver, stream = self.driver, self.stream
        before, after = (driver.event(timing=True) for _ in range(2))

        def burst(calls: int) -> float:
            runs = turns or max(1, round(calls / len(self.calls)))
            stream.record(before)
            self.run(runs)
            stream.record(after)
            stream.synchronize()
            seconds = after.elapsed_ms_since(before) / 1e3
            return max(seconds, 1e-9) * share * calls / (runs * len(self.calls))

        return Arm(self.name, burst)

    def run(self, turns: int = 1) -> None:
        """All calls in turn, so many times; not waited for."""
        if self.executable is not None:
            for _ in range(turns):
                self.executable.launch(self.stream)
            return
        with use_stream(self.driver, self.stream):
            for _ in range(turns):
                for call in self.calls:
                    call(self.stream)


def replayed(
    name: str, driver: Driver, stream: Stream, calls: Sequence[Call], *, is_captured: bool = True
) -> Replayed:
    """Warms ``calls`` up, and captures them into one graph.

    Args:
        name: Of the arm.
        driver: Where.
        stream: A blocking stream of ours.
        calls: In turn.
        is_captured: False where a call reads something back to the host.

    Raises:
        CaptureError: A call cannot be captured.
    """
    with use_stream(driver, stream):
        for call in [*calls] * _WARM_UPS:
            call(stream)
    driver.synchronize()
    made = Replayed(name, driver, stream, calls, None)
    if driver.is_emulated or not is_captured:
        return made
    with capture(stream, driver=driver) as capturing:
        for call in calls:
            call(stream)
    return replace(made, executable=capturing.graph.instantiate())


def seconds_of(driver: Driver, act: Callable[[], Any]) -> float:
    """Wall seconds of ``act``, the device waited for at both ends."""
    driver.synchronize()
    start = time.perf_counter()
    act()
    driver.synchronize()
    return time.perf_counter() - start


def host_seconds(driver: Driver, stream: Stream, call: Call) -> float:
    """What one ``call`` costs the host, the median of some, whatever the device makes of it."""
    times = []
    for _ in range(2 if driver.is_emulated else _HOST_CALLS):
        start = time.perf_counter()
        call(stream)
        times.append(time.perf_counter() - start)
    driver.synchronize()
    return median(times)


def torch_device(driver: Driver) -> str:
    """Torch's name for the driver's device; emulated, it is the host's memory."""
    return "cpu" if driver.is_emulated else f"cuda:{driver.device}"


def cached_bytes(driver: Driver) -> int:
    """The device's last cache; 0 where it is emulated."""
    if driver.is_emulated:
        return 0
    return int(torch.cuda.get_device_properties(driver.device).L2_cache_size)
