"""A driver that writes down, in order, what a step asks of it: captures, launches, destruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphcore.driver import Driver
from graphcore.moe.decisions.driver_steps import Step

_CALLS = {
    "begin_capture": Step.BEGIN_CAPTURE,
    "end_capture": Step.END_CAPTURE,
    "instantiate": Step.INSTANTIATE,
    "update_exec": Step.UPDATE,
    "launch_graph": Step.LAUNCH,
    "destroy_graph": Step.DESTROY_OLD_GRAPH,
    "destroy_exec": Step.DESTROY_OLD_EXECUTABLE,
}
_BOUND = {"bind_launch": Step.LAUNCH, "bind_update": Step.UPDATE}


class Recording:
    """Steps of ``driver`` from now on; :meth:`taken` hands them over."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.steps: list[Step] = []
        self._is_inside = False
        for name, step in _CALLS.items():
            setattr(driver, name, self._noting(getattr(driver, name), step))
        for name, step in _BOUND.items():
            setattr(driver, name, self._binding(getattr(driver, name), step))

    def taken(self) -> tuple[Step, ...]:
        """The steps since the last time."""
        taken, self.steps = tuple(self.steps), []
        return taken

    def close(self) -> None:
        """Writes down nothing more."""
        for name in (*_CALLS, *_BOUND):
            delattr(self.driver, name)

    def _noting(self, call: Callable[..., Any], step: Step) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:  # one call of the driver's that another one makes
                return call(*arguments, **options)
            self.steps.append(step)
            self._is_inside = True
            try:
                return call(*arguments, **options)
            finally:
                self._is_inside = False

        return noted

    def _binding(self, bind: Callable[..., Any], step: Step) -> Callable[..., Any]:
        return lambda *arguments: self._noting(bind(*arguments), step)


@contextmanager
def recorded(driver: Driver) -> Iterator[Recording]:
    """What ``driver`` is asked for in the block."""
    recording = Recording(driver)
    try:
        yield recording
    finally:
        recording.close()
