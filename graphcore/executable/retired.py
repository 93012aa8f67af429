"""Owners that an executable gave up while a launch of it may still use them; kept until it has run.

An update or a close returns at once, and the launch before it goes on with the old buffers. Their
owners wait here; a launch costs nothing, and two versions that take turns cost an update nothing
either. Whether the launches have run is asked with a fence: when an executable takes a version that
is new to it, when any is made or closed, or by :func:`release_finished`.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from graphcore.driver import Driver, active
from graphcore.driver.records import StreamHandle
from graphcore.errors import CudaError, GraphcoreError
from graphcore.executable.fence import Fence
from graphcore.resources.lifetime import OwnerSet

_PATIENCE_SECONDS = 100e-6
_LEAST_QUESTIONS = 8
_lock = threading.RLock()
_waiting: set[Held] = set()
"""Everything that has owners waiting; what was closed lives here only."""


class Held:
    """What one executable keeps alive, and the stream of its newest launch.

    The stream's object is held too: a stream must be alive to be asked.

    Attributes:
        owners: The current set.
        takes_turns: Whether the newest change brought a set back that was here before.
        turn: An object for as long as sets that take turns may do so by setting ``owners`` alone:
            another one since then says that a set was let go, or waits for a fence.
    """

    __slots__ = (
        "_fence", "_fenced", "_used", "driver", "handle", "owners", "stream", "takes_turns", "turn",
    )  # fmt: skip

    def __init__(self, driver: Driver, owners: OwnerSet) -> None:
        self.driver = driver
        self.owners = owners
        self.stream: Any = None
        self.handle: StreamHandle | None = None
        self.turn = object()
        self.takes_turns = False
        # sets that launches may use, the current one among them once it has given way before
        self._used: list[OwnerSet] = []
        # one fence at a time, and the sets that no launch after it uses
        self._fence: Fence | None = None
        self._fenced: list[OwnerSet] = []

    def launches_on(self, stream: Any, handle: StreamHandle) -> None:
        """Notes where the next launches go."""
        if self.handle is None:  # from here on a set that gives way has to wait
            self.turn = object()
        self.stream, self.handle = stream, handle

    def replace(self, owners: OwnerSet, *, takes_turns: bool = False) -> object:
        """Swaps the owners as a whole; the old ones wait for the launches up to now.

        Args:
            owners: The new set.
            takes_turns: It was the current one before and the old one will be again: nothing is
                asked, and both are kept until something new comes.

        Returns:
            The ``turn`` in which the old set waits.
        """
        turn, old = self.turn, self.owners
        self.owners = owners
        if old is owners or self.handle is None:
            return turn
        with _lock:
            turn = self.turn
            self.takes_turns = came_back = self._take_back(owners) or takes_turns
            if not came_back and owners.covers(old):
                return turn
            if not _holds(self._used, old):
                self._used.append(old)
            _waiting.add(self)
        if not came_back:
            self.settle()
        return turn

    def _take_back(self, owners: OwnerSet) -> bool:
        """Whether ``owners`` waited here: versions take turns, and nothing is to be let go."""
        if _holds(self._fenced, owners):
            self._fenced = [each for each in self._fenced if each is not owners]
            return True
        return _holds(self._used, owners)

    def settle(self) -> None:
        """Lets go of the sets whose launches have run."""
        gone: list[OwnerSet] = []  # what has run goes with this, outside the lock
        with _lock:
            if self._fence is not None and _has_passed(self.driver, self._fence):
                gone += self._let_go()
            # sets without a fence: an interrupt came before there was one
            if self._fence is None and (self._fenced or self._waits()):
                # first of all: a set that takes its turn on another thread from here on says so
                self.turn, current = object(), self.owners
                self._fenced += [each for each in self._used if each is not current]
                self._used = [each for each in self._used if each is current]
                self._fence = self._new_fence()
                if self._fence is None or _has_passed(self.driver, self._fence):
                    gone += self._let_go()
            if not (self._fenced or self._waits()):
                _waiting.discard(self)

    def _waits(self) -> bool:
        return any(each is not self.owners for each in self._used)

    def _let_go(self) -> list[OwnerSet]:
        gone, self._fenced, self._fence = self._fenced, [], None
        return gone

    def _new_fence(self) -> Fence | None:
        """A fence behind the newest launch; None where there is nothing to be asked any more."""
        if self.handle is None:  # it is known that what was launched has run
            return None
        try:
            return Fence(self.driver, self.stream, self.handle)
        except GraphcoreError:  # no such stream, or the context is lost
            _wait_for_all(self.driver)
            return None

    def drop(self) -> None:
        """Lets go of everything, once the launches up to now have run."""
        self.replace(OwnerSet())
        # an event behind nothing happens some microseconds after it was recorded: who closes an
        # executable that has long run wants its memory back now, not when another one is made
        until = time.perf_counter() + _PATIENCE_SECONDS
        for asked in itertools.count(1):
            self.settle()
            patient = asked < _LEAST_QUESTIONS or time.perf_counter() < until
            if self not in _waiting or not patient:
                break


def _holds(sets: list[OwnerSet], wanted: OwnerSet) -> bool:
    return any(each is wanted for each in sets)


def release_finished(*, turns: bool = True) -> int:
    """Lets go of the owners whose launches have run; returns how many executables still wait.

    ``turns``: also where versions take turns, which makes the next turns dearer.
    """
    if _waiting and not active.is_any_under_way():
        with _lock:
            asked = [held for held in _waiting if turns or not held.takes_turns]
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
