"""Owners that an executable gave up while a launch of it may still use them; kept until it has run.

An update or a close returns at once, and the launch before it goes on with the old buffers. Their
owners wait here behind a fence, recorded then; a launch costs nothing. They are looked at again
whenever an executable is made, updated or closed, or by :func:`release_finished`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from graphcore.driver import Driver, active
from graphcore.driver.records import StreamHandle
from graphcore.errors import CudaError, GraphcoreError
from graphcore.executable.fence import Fence
from graphcore.resources.lifetime import OwnerSet

_waiting: deque[tuple[Driver, Fence, OwnerSet]] = deque()
_lock = threading.Lock()


class Held:
    """What one executable keeps alive, and the stream of its newest launch.

    The stream's object is held too: a stream must be alive to be asked.
    """

    __slots__ = ("driver", "handle", "owners", "stream")

    def __init__(self, driver: Driver, owners: OwnerSet) -> None:
        self.driver = driver
        self.owners = owners
        self.stream: Any = None
        self.handle: StreamHandle | None = None

    def replace(self, owners: OwnerSet) -> None:
        """Swaps the owners as a whole; the old ones wait for the launches up to now."""
        release_finished()
        old, self.owners = self.owners, owners
        if self.handle is not None and not owners.covers(old):
            _keep_until_run(self.driver, old, self.stream, self.handle)

    def drop(self) -> None:
        """Lets go of everything, once the launches up to now have run."""
        self.replace(OwnerSet())
        self.stream = self.handle = None


def release_finished() -> int:
    """Lets go of the owners whose launches have run; returns how many sets still wait."""
    if not _waiting or active.is_any_under_way():
        return len(_waiting)
    with _lock:
        asked = list(_waiting)
        _waiting.clear()
    unfinished = [entry for entry in asked if not _has_passed(*entry[:2])]
    with _lock:
        _waiting.extendleft(reversed(unfinished))
    return len(_waiting)  # what has run goes with the list, outside the lock


def _keep_until_run(driver: Driver, owners: OwnerSet, stream: Any, handle: StreamHandle) -> None:
    try:
        fence = Fence(driver, stream, handle)
    except GraphcoreError:
        # no such stream any more, or the context is lost: nothing else can be asked
        _wait_for_all(driver)
        return
    if not _has_passed(driver, fence):
        with _lock:
            _waiting.append((driver, fence, owners))


def _has_passed(driver: Driver, fence: Fence) -> bool:
    """Whether the work is over; True also where the context is lost and nothing runs any more."""
    try:
        # asking about an event breaks the captures of other libraries, unless this thread says so
        before = driver.exchange_capture_mode("relaxed")
        try:
            return fence.has_passed()
        finally:
            driver.exchange_capture_mode(before)
    except CudaError as error:
        return "CAPTURE" not in error.code
    except GraphcoreError:
        return True


def _wait_for_all(driver: Driver) -> None:
    if not active.is_any_under_way():
        try:
            driver.synchronize()
        except GraphcoreError:
            return
