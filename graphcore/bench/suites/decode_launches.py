"""Launches: the driver's own call on the graph of a step, in C and from Python."""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphcore.bench.cloop import LaunchLoop
from graphcore.bench.harness import Arm
from graphcore.bench.suites.decode_arms import behind_a_step, clocked, submitting
from graphcore.bench.suites.decode_ours import OurWay
from graphcore.driver import Driver
from graphcore.driver.records import ExecHandle, StreamHandle

FLOOR = "the driver's call"


class Launches:
    """What a replay cannot beat, and what a peer makes of the same executable.

    Args:
        way: Whose step it is: it says where a run of steps begins.
        executable: Of the step's graph.
        stream: To launch on.
        driver: That made it.
    """

    def __init__(
        self, way: OurWay, executable: ExecHandle, stream: StreamHandle, driver: Driver
    ) -> None:
        self._way, self._driver = way, driver
        self._executable, self._stream = executable, stream
        self._loop = None if driver.is_emulated else LaunchLoop()

    def floor(self) -> Arm:
        """Calls back to back: a loop in C; the bound call where there is no library to call."""
        if self._loop is None:
            return submitting(FLOOR, self._way.begin, self._call(), self._driver)

        def burst(calls: int) -> float:
            self._way.begin()
            self._driver.synchronize()
            taken = self._seconds(calls)
            self._driver.synchronize()
            return taken

        return Arm(FLOOR, burst)

    def floor_behind_a_step(self) -> Arm:
        """The same, each call made while a step runs."""
        once = functools.partial(self._seconds, 1)
        seconds = clocked(self._call()) if self._loop is None else once
        return behind_a_step(FLOOR, self._way.begin, seconds, self._driver)

    def peer(self) -> Arm:
        """The call as Python makes it through cuda.bindings; through our driver where emulated."""
        if self._loop is None:
            launch = functools.partial(self._driver.launch_graph, self._executable, self._stream)
            return submitting("driver call", self._way.begin, launch, self._driver)
        from cuda.bindings import driver as bindings

        theirs = bindings.CUgraphExec(self._executable), bindings.CUstream(self._stream)
        launch = functools.partial(bindings.cuGraphLaunch, *theirs)
        return submitting("cuda.bindings", self._way.begin, launch, self._driver)

    def _call(self) -> Callable[[], object]:
        return self._driver.bind_launch(self._executable, self._stream)

    def _seconds(self, calls: int) -> float:
        assert self._loop is not None
        return self._loop.seconds(self._executable, self._stream, calls)
