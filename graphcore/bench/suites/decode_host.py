"""What a token costs the host where a whole generation is one launch: its CPU time, not its wall.

The thread sleeps for most of a generation, and sleeping is no work; so the clock is
``time.thread_time``, the CPU time of the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from graphcore.bench.harness import Arm
from graphcore.bench.suites.decode_launches import Launches
from graphcore.bench.suites.decode_ours import OurWay
from graphcore.driver import Driver
from graphcore.driver.records import ExecHandle
from graphcore.errors import GraphcoreError
from graphcore.interop.streams import current_stream

FLOOR = "the driver's call on the loop"

_COARSEST = 20e-6  # seconds; a generation costs the host some hundred microseconds
_BURSTS, _CALLS = 8, 4  # few calls: a full queue would show the device's time


class OneLaunchHost:
    """The arms of one way's loop.

    Args:
        way: Whose step is the loop's body.
        driver: Where.

    Raises:
        GraphcoreError: The clock of CPU time is too coarse here.

    Attributes:
        launching: Wall seconds of each launching call that ``ours`` has made.
    """

    def __init__(self, way: OurWay, driver: Driver) -> None:
        check_clock(time.thread_time)
        self._way, self._driver = way, driver
        self._often = (1, 2) if driver.is_emulated else (_BURSTS, _CALLS)
        self.launching: list[float] = []

    def ours(self) -> Arm:
        """CPU time of launch and waiting up to the end, by the number of tokens.

        It is the half of ``generate_in_one_launch`` behind the prompt, which is forwarded before
        the clock starts: its own CPU time is tens of milliseconds, of which no difference of two
        runs would leave microseconds.
        """

        def burst(calls: int) -> float:
            self._way.again()
            self._driver.synchronize()
            start, wall = time.thread_time(), time.perf_counter()
            with self._way.take_off(calls) as tokens:
                self.launching.append(time.perf_counter() - wall)
                tokens.wait()
            taken = time.thread_time() - start
            made = self._way.loop.ring.published
            if made != calls:
                raise GraphcoreError(
                    f"bench decode: one launch: expected {calls} tokens, got {made}"
                )
            return taken

        return Arm("ours", burst)

    def floor(self) -> Arm:
        """The driver's call on the loop's graph, in C, once for all tokens; no waiting."""
        loop, launches = self._way.loop, self._launches(self._way.loop.executable.handle).floor()

        def burst(calls: int) -> float:
            del calls
            loop.ring.begin(0)  # the launch ends before its first token
            return self._seconds_a_call(launches)

        return Arm(FLOOR, burst)

    def peer(self) -> Arm:
        """The driver's call on the step's graph for every token, as a loop of replays makes it.

        Nothing but the call: no peer's waiting counts.
        """
        assert self._way.runner.executable is not None
        launches = self._launches(self._way.runner.executable.handle).peer()
        return Arm(launches.name, lambda calls: calls * self._seconds_a_call(launches))

    def _launches(self, executable: ExecHandle) -> Launches:
        return Launches(self._way, executable, current_stream(self._driver), self._driver)

    def _seconds_a_call(self, arm: Arm) -> float:
        bursts, calls = self._often
        return median(arm.burst(calls) for _ in range(bursts)) / calls


def check_clock(clock: Callable[[], float]) -> None:
    """Raises GraphcoreError where ``clock`` moves in steps of more than 20 us."""

    def step() -> float:
        start = clock()
        while (now := clock()) == start:
            pass
        return now - start

    shortest = min(step() for _ in range(5))
    if shortest > _COARSEST:
        raise GraphcoreError(
            f"CPU time of a thread: expected a clock of {_COARSEST * 1e6:.0f} us or finer, got "
            f"steps of {shortest * 1e6:.0f} us"
        )
