"""Owners that an executable gave up while a launch of it may still use them; kept until it has run.

An update or a close returns at once, and the launch before it goes on with the old buffers. Their
owners wait here; a launch costs nothing, and two versions that take turns cost an update nothing
either. Whether the launches have run is asked with a fence: when an executable takes a version that
is new to it, when any is made or closed, or by :func:`release_finished`.
"""

from __future__ import annotations

import threading
from typing import Any

from graphcore.driver import Driver, active
from graphcore.driver.records import StreamHandle
from graphcore.errors import CudaError, GraphcoreError
from graphcore.executable.fence import Fence
from graphcore.resources.lifetime import OwnerSet

_lock = threading.RLock()
_waiting: set[Held] = set()
"""Everything that has owners waiting; what was closed lives here only."""


class Held:
    """What one executable keeps alive, and the stream of its newest launch.

    The stream's object is held too: a stream must be alive to be asked.
    """

    __slots__ = ("_fence", "_fenced", "_old", "driver", "handle", "owners", "stream")

    def __init__(self, driver: Driver, owners: OwnerSet) -> None:
        self.driver = driver
        self.owners = owners
        self.stream: Any = None
        self.handle: StreamHandle | None = None
        self._old: list[OwnerSet] = []
        # one fence at a time; it covers the first so many of the old sets
        self._fence: Fence | None = None
        self._fenced = 0

    def replace(self, owners: OwnerSet) -> None:
        """Swaps the owners as a whole; the old ones wait for the launches up to now."""
        old, self.owners = self.owners, owners
        if old is owners or self.handle is None:
            return
        with _lock:
            came_back = self._take_back(owners)
            if not came_back and owners.covers(old):
                return
            self._old.append(old)
            _waiting.add(self)
        if not came_back or len(self._old) > 1:
            self.settle()

    def _take_back(self, owners: OwnerSet) -> bool:
        """Whether ``owners`` waited here: versions take turns, and nothing is to be let go."""
        for index, old in enumerate(self._old):
            if old is owners:
                del self._old[index]
                self._fenced -= index < self._fenced
                return True
        return False

    def settle(self) -> None:
        """Lets go of the sets whose launches have run."""
        gone: list[OwnerSet] = []  # what has run goes with this, outside the lock
        with _lock:
            if self._fence is not None and _has_passed(self.driver, self._fence):
                gone += self._let_go(self._fenced)
            if self._old and self._fence is None:
                self._fence, self._fenced = self._new_fence(), len(self._old)
                if self._fence is None or _has_passed(self.driver, self._fence):
                    gone += self._let_go(self._fenced)
            if not self._old:
                _waiting.discard(self)

    def _let_go(self, count: int) -> list[OwnerSet]:
        gone, self._old = self._old[:count], self._old[count:]
        self._fence, self._fenced = None, 0
        return gone

    def _new_fence(self) -> Fence | None:
        """A fence behind the newest launch; None where there is nothing to be asked any more."""
        assert self.handle is not None
        try:
            return Fence(self.driver, self.stream, self.handle)
        except GraphcoreError:  # no such stream, or the context is lost
            _wait_for_all(self.driver)
            return None

    def drop(self) -> None:
        """Lets go of everything, once the launches up to now have run."""
        self.replace(OwnerSet())
        self.settle()


def release_finished() -> int:
    """Lets go of the owners whose launches have run; returns how many executables still wait."""
    if _waiting and not active.is_any_under_way():
        with _lock:
            asked = list(_waiting)
        for held in asked:
            held.settle()
    return len(_waiting)


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
