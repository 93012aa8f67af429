"""The rest of Python's cyclic collector while anything is captured, on any thread.

A graph of another library that the collector finds would be destroyed inside the capture and break
it. The collector is one for all threads: the first capture stops it, and the end of the last one
starts it again where it was on.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Rest:
    """How many captures ask for the rest, and whether the collector was on before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._captures:
                self._was_on = gc.isenabled()
                gc.disable()
            self._captures += 1

    def end(self) -> None:
        with self._lock:
            self._captures -= 1
            if not self._captures and self._was_on:
                gc.enable()


_rest = _Rest()


@contextmanager
def resting_collector() -> Iterator[None]:
    """Keeps the collector off for the block."""
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()
