"""The rest of Python's cyclic collector while anything is captured, on any thread.

A graph of another library that the collector finds would be destroyed inside the capture and break
it. The collector is one for all threads: the first capture stops it, and the end of the last one
starts it again where it was on. Who calls the collector all the same (``gc.collect()``) is noted,
for the error of a capture that this breaks.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from graphcore.driver import active


class _Rest:
    """Which captures ask for the rest, and whether the collector was on before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures: set[object] = set()
        self._was_on = False

    def begin(self, capture: object) -> None:
        with self._lock:
            if not self._captures:
                self._was_on = gc.isenabled()
                self._captures.add(capture)  # first: what Ctrl-C leaves here is taken back below
                gc.disable()
                gc.callbacks.append(_note_collection)
            self._captures.add(capture)

    def end(self, capture: object) -> None:
        with self._lock:
            if capture not in self._captures:
                return  # Ctrl-C, before it began
            if len(self._captures) == 1:
                with suppress(ValueError):  # somebody emptied the list
                    gc.callbacks.remove(_note_collection)
                if self._was_on:
                    gc.enable()
            self._captures.remove(capture)


def _note_collection(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["collected"]:
        active.note(
            f"the garbage collector was called and freed {info['collected']} objects (a graph of "
            "another library among them breaks a capture; collect before it)"
        )


_rest = _Rest()


@contextmanager
def resting_collector() -> Iterator[None]:
    """Keeps the collector off for the block."""
    capture = object()
    with ExitStack() as ends:
        for _ in range(2):  # Ctrl-C may come into the first
            ends.callback(_rest.end, capture)
        _rest.begin(capture)
        yield
