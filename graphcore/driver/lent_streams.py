"""Streams lent to captures: one that nobody holds any more is lent to the next capture.

Libraries keep memory for each stream they ever worked on, as long as the process lives: torch a
workspace of cuBLAS (32 MiB on an H200). A new stream for each capture would cost that much each
time. A stream is lent to one holder at a time: graphs captured on it hold it, so that two graphs
that live share no workspace unless their captures were given the same stream. What holds the
memory behind a workspace lives in the :class:`Lane`, as long as the stream is lent out again.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from graphcore.driver import active
from graphcore.driver.records import CaptureState, StreamHandle
from graphcore.driver.streams import Stream, destroy_quietly
from graphcore.errors import CudaError

if TYPE_CHECKING:
    from graphcore.driver.api import Driver

Destroy = Callable[[StreamHandle], None]


class Belonging(Protocol):
    """What a library may need for a stream: memory that its workspace lies in."""

    def is_needed(self) -> bool:
        """Whether something of the stream may still lie in it."""

    def is_burden(self) -> bool:
        """Whether it holds more than giving up the stream would lose."""


@dataclass(eq=False, slots=True)
class Lane:
    """A stream of the driver that is lent again and again, and what belongs to it.

    Attributes:
        thread: The thread that had it last: libraries keep workspaces by thread too.
        is_fit: Whether it may be lent again; not where a broken capture on it has not ended.
        belongings: Kept as long as the stream is, and by every graph captured on it.
        holder: Who has it now; dead or None: nobody.
    """

    handle: StreamHandle
    is_blocking: bool
    thread: int = 0
    is_fit: bool = True
    belongings: list[Belonging] = field(default_factory=list)
    holder: weakref.ref[LentStream] | None = None

    @property
    def is_lent(self) -> bool:
        """Whether somebody holds the stream."""
        return self.holder is not None and self.holder() is not None


class LentStream(Stream):
    """A stream that goes back when its last holder drops it; ``close()`` destroys it."""

    def __init__(self, driver: Driver, lane: Lane, store: StreamStore) -> None:
        self.lane = lane
        self._store = store
        super().__init__(driver, lane.handle, owned=True)
        lane.thread = threading.get_ident()
        lane.holder = weakref.ref(self)  # last: before it, the stream is nobody's

    def close(self) -> None:
        """Destroys the stream after its work, for graphs captured on it too, which need it not."""
        self.lane.is_fit = False
        if not self._closed:
            self.lane.holder = None
        super().close()

    def _when_dropped(self) -> weakref.finalize[..., Stream]:
        return weakref.finalize(self, self._store.returned, self.lane, self.driver.destroy_stream)


class StreamStore:
    """The streams that one driver lends to captures. For any thread."""

    def __init__(self) -> None:
        # reentrant: a finalizer may give a stream back while this thread holds the lock
        self._lock = threading.RLock()
        self._lanes: list[Lane] = []
        _stores.add(self)

    @property
    def lent(self) -> int:
        """How many streams somebody holds."""
        return sum(lane.is_lent for lane in tuple(self._lanes))

    @property
    def idle(self) -> int:
        """How many wait for the next capture."""
        return sum(not lane.is_lent for lane in tuple(self._lanes))

    def lend(self, driver: Driver, *, blocking: bool, products: bool = False) -> LentStream:
        """A stream that nobody holds, of this thread before those of others; else a new one.

        Of these, one that has belongings where there are to be ``products``, else one that has
        none: the others' would wait unused while more are made.
        """
        busy = []  # held until one is found, so that each is looked at once
        while True:
            stream = self._idle_stream(driver, blocking=blocking, products=products)
            if stream is None:
                return self._new_stream(driver, blocking=blocking)
            if _captures_nothing(stream):
                return stream
            busy.append(stream)

    def returned(self, lane: Lane, destroy: Destroy) -> None:
        """Nobody holds the stream of ``lane`` any more, or it was closed."""
        if lane.is_fit:
            # what belongs to it is looked at only where that breaks no capture
            active.when_idle(partial(self._tidy, destroy))
        elif not lane.is_lent:  # a finalizer that comes late: by then another may hold it
            self._destroy([lane], destroy)

    def close(self, destroy: Destroy) -> None:
        """Destroys what nobody holds; the others are destroyed when their holders drop them."""
        with self._lock:
            for lane in self._lanes:
                lane.is_fit = False
            idle = [lane for lane in self._lanes if not lane.is_lent]
        self._destroy(idle, destroy)

    def _idle_stream(self, driver: Driver, *, blocking: bool, products: bool) -> LentStream | None:
        own = threading.get_ident()
        with self._lock:
            idle = [
                lane
                for lane in self._lanes
                if lane.is_fit and lane.is_blocking == blocking and not lane.is_lent
            ]
            if not idle:
                return None
            idle.reverse()  # the one used last is the one whose memory is most likely still there
            fits = [(each.thread == own, bool(each.belongings) == products) for each in idle]
            return LentStream(driver, idle[fits.index(max(fits))], self)

    def _new_stream(self, driver: Driver, *, blocking: bool) -> LentStream:
        lane = Lane(driver.create_stream(blocking=blocking), blocking)
        with self._lock:
            self._lanes.append(lane)  # first: what Ctrl-C leaves here is lent to the next one
            return LentStream(driver, lane, self)

    def _tidy(self, destroy: Destroy) -> None:
        """Lets go of what streams that nobody holds need no more, or of one where that is less."""
        gone: list[Belonging] = []  # with this, outside the lock: finalizers may run
        with self._lock:
            burdens = [lane for lane in self._lanes if not lane.is_lent and _prune(lane, gone)]
            for lane in burdens:
                lane.is_fit = False
        self._destroy(burdens, destroy)

    def _destroy(self, lanes: Iterable[Lane], destroy: Destroy) -> None:
        for lane in lanes:
            with self._lock:
                is_known = lane in self._lanes
                if is_known:
                    self._lanes.remove(lane)
            if is_known:
                destroy_quietly(destroy, lane.handle)


def give_up(stream: Stream | None) -> None:
    """Lets a lent stream go for good once it is dropped: nobody knows what it still does."""
    if isinstance(stream, LentStream):
        stream.lane.is_fit = False


def give_up_unless_ended(stream: Stream) -> None:
    """As :func:`give_up`, where a capture on it was broken and the driver has not ended it."""
    # a closed one is given up, and its handle is nothing that a driver may be asked about
    if isinstance(stream, LentStream) and stream.lane.is_fit and not _captures_nothing(stream):
        give_up(stream)


def is_given_up(stream: Stream) -> bool:
    """Whether a lent stream is not lent again: it was given up, or closed."""
    return isinstance(stream, LentStream) and not stream.lane.is_fit


def lane_of(stream: Stream) -> Lane | None:
    """What belongs to a lent stream; None of others."""
    return stream.lane if isinstance(stream, LentStream) else None


def _prune(lane: Lane, gone: list[Belonging]) -> bool:
    """Moves what is not needed to ``gone``; whether what stays is a burden."""
    needed = [each for each in lane.belongings if each.is_needed()]
    gone += lane.belongings
    lane.belongings = needed
    return any(each.is_burden() for each in needed)


def _captures_nothing(stream: LentStream) -> bool:
    """Whether nobody captures on it; one that cannot be asked is given up."""
    try:
        return stream.driver.capture_status(stream.handle).state is CaptureState.NONE
    except CudaError:
        give_up(stream)
        return False


_stores: weakref.WeakSet[StreamStore] = weakref.WeakSet()


def _new_locks() -> None:
    """After a fork: another thread may have held a lock, and that thread is not here."""
    for store in _stores:
        store._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)
