"""Calling a bound method without keeping its object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def weakly(method: Callable[[], object]) -> Callable[[], object]:
    """``method`` as its own object may hold it.

    An object that held its bound method would be a cycle, and what it owns would wait for the
    collector: a runner's cache is most of a device's memory.
    """
    weak = weakref.WeakMethod(method)

    def call() -> object:
        found = weak()
        assert found is not None, "only its object calls it"
        return found()

    return call
