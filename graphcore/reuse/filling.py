"""Filling: what a miss does: make room, capture, measure, then instantiate or update.

All that can fail comes before the cache changes, except that room is made first, and again where
device memory runs out: an error says which entries went for it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from graphcore.driver import Driver, as_stream
from graphcore.driver.codes import is_out_of_memory
from graphcore.errors import CapacityError, LifecycleError
from graphcore.executable import Graph, UpdateStatus
from graphcore.executable.capture_options import refuse_second
from graphcore.executable.graph import Guard
from graphcore.executable.memory_report import MemoryReport, in_words, memory_report, pools_of
from graphcore.interop.torch import MemoryPool
from graphcore.interop.torch_workspaces import expects_products
from graphcore.reuse.budget import Incoming
from graphcore.reuse.decisions import (
    CaptureDecision,
    CaptureReason,
    Cause,
    Departure,
    History,
    Outcome,
)
from graphcore.reuse.entries import Entry, Identity
from graphcore.reuse.holding import Holding

_log = logging.getLogger("graphcore")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Miss:
    """A key that is to be captured.

    Args:
        driver: Where.
        identity: The key with its place.
        make: Gives the graph, captured into a pool and on a stream where these are given.
        reason: Why.
        family: Whose executable the graph may take over.
        stale: The key's own entry, where a buffer of it has changed.
        kept: Entries that must stay.
        stream: Where the user wants it captured.
        wants_blocking: What the capture stream must be.
        may_repeat: Whether ``make`` may be called again.
    """

    driver: Driver
    identity: Identity
    make: Callable[[MemoryPool | None, Any], Graph]
    reason: CaptureReason
    family: Hashable | None = None
    stale: Entry | None = None
    kept: frozenset[Identity] = frozenset()
    stream: Any = None
    wants_blocking: bool = True
    may_repeat: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """How a cache fills itself; see :class:`graphcore.GraphCache`."""

    guard: Guard | None
    share_pool: bool
    strict: bool


class Filling:
    """Fills a cache's holding, one miss at a time."""

    def __init__(self, holding: Holding, history: History, options: Options) -> None:
        self.options = options
        self.under_way: Identity | None = None
        self._holding = holding
        self._history = history
        self._last_bytes = 0
        self.peak_bytes = 0

    def fill(self, miss: Miss, now: Callable[[], float]) -> tuple[Entry, CaptureDecision]:
        """The new entry of ``miss``, or the one whose executable it took over.

        Raises:
            LifecycleError: Another miss is being filled.
            CaptureError: A capture is under way on this thread, or graphs are off.
            CapacityError: The graph does not fit the budget; it is gone again.
            UpdateRefused: Strict, and the driver refused the update.
        """
        self.refuse_under_way("get_or_capture")
        refuse_second()
        try:
            self.under_way = miss.identity
            return self._fill(miss, now)
        finally:
            try:
                self.under_way = None
            finally:
                self.under_way = None  # where Ctrl-C came before the first

    def refuse_under_way(self, what: str) -> None:
        """Raises LifecycleError inside a function that the cache is capturing."""
        if self.under_way is not None:
            raise LifecycleError(
                f"{what}: the cache is capturing key {self.under_way.key!r}; expected the function "
                "of a capture to look up at most, with get()"
            )

    def _fill(self, miss: Miss, now: Callable[[], float]) -> tuple[Entry, CaptureDecision]:
        holding, place = self._holding, miss.identity.place
        old = self._updatable(miss)
        expected = self._history.bytes_of(miss.identity) or self._last_bytes
        incoming = Incoming(expected, pool=None if old is None else place)
        gone = holding.make_room(incoming, miss.kept, old) or []
        with _noting(gone):
            graph, report, old = self._relieved(
                miss, gone, lambda: self._captured(miss, self._updatable(miss)), miss.may_repeat
            )
            try:
                size = self._own_bytes(graph, report, miss)
                entry, outcome, detail = self._relieved(
                    miss, gone, lambda: self._entry(miss, graph, self._held(old))
                )
            except BaseException:
                graph.close()
                holding.measure_pool(place)
                raise
        entry.nodes, entry.bytes, entry.last_time = report.nodes, size, now()
        holding.add(entry)
        if holding.is_over():
            holding.drop_retired(wait=True)  # what an update left, where its launch still runs
        self._last_bytes = size
        return entry, CaptureDecision(miss.identity.key, miss.reason, outcome, size, detail)

    def _relieved(
        self,
        miss: Miss,
        gone: list[Identity],
        attempt: Callable[[], Result],
        may_repeat: bool = True,
    ) -> Result:
        """What ``attempt`` gives; where device memory runs out, tried again with fewer entries.

        One entry goes first, then twice as many each time: few tries, and not many more go than
        must. They are added to ``gone``.
        """
        count = 1
        while True:
            try:
                return attempt()
            except Exception as error:
                if self.options.strict or not may_repeat or not is_out_of_memory(error):
                    raise
                went = self._holding.relieve(count, miss.kept)
                if not went:
                    raise
                gone += went
                _log.warning(
                    "cache: key %r: device memory ran out (%s): tried again without %s",
                    miss.identity.key,
                    str(error).partition("\n")[0],
                    ", ".join(repr(identity.key) for identity in went),
                )
            gc.collect()  # a failure may leave cycles that hold what it made
            count *= 2

    # ---- the graph -----------------------------------------------------------------------------

    def _captured(
        self, miss: Miss, old: Entry | None, *, again: bool = False
    ) -> tuple[Graph, MemoryReport, Entry | None]:
        """The graph of ``miss`` with room made for it, and the entry it may take over."""
        holding, place = self._holding, miss.identity.place
        try:
            graph = self._make(miss)
        except BaseException:
            holding.measure_pool(place)
            raise
        try:
            report = memory_report(graph)
            size = self._own_bytes(graph, report, miss)
            is_shared = self._lies_in_shared_pool(graph, miss)
            holding.measure_pool(place, is_used=is_shared)
            self.peak_bytes = max(self.peak_bytes, holding.bytes + size)
            incoming = Incoming(size, pool=place if is_shared or old else None)
            if holding.make_room(incoming, miss.kept, old) is not None:
                return graph, report, old
            if not (is_shared and not again and self._renew_pool(miss)):
                raise self._too_large(miss, report)
        except BaseException:
            graph.close()
            holding.measure_pool(place)
            raise
        graph.close()
        holding.measure_pool(place)
        return self._captured(miss, None, again=True)

    def _make(self, miss: Miss) -> Graph:
        if not self.options.share_pool:
            return miss.make(None, miss.stream)
        place = miss.identity.place
        pool = self._holding.pool_for(miss.driver, place)
        stream = miss.stream
        if stream is None:
            stream = pool.capture_stream(
                miss.driver,
                blocking=miss.wants_blocking,
                products=expects_products(miss.driver),
            )
        self._holding.order_after_launches(as_stream(miss.driver, stream), place)
        return miss.make(pool, stream)

    def _lies_in_shared_pool(self, graph: Graph, miss: Miss) -> bool:
        pool = self._holding.pools.get(miss.identity.place)
        return pool is not None and any(pool is each for each in pools_of(graph.owners))

    def _own_bytes(self, graph: Graph, report: MemoryReport, miss: Miss) -> int:
        pool = 0 if self._lies_in_shared_pool(graph, miss) else report.pool_bytes
        return pool + report.allocation_bytes + report.node_bytes

    def _renew_pool(self, miss: Miss) -> bool:
        """Takes away all that lies in the shared pool, so that it can go; False where it cannot."""
        inside = [
            entry for entry in self._holding.entries.values() if entry.place == miss.identity.place
        ]
        if not inside or any(entry.pins or entry.identity in miss.kept for entry in inside):
            return False
        for entry in inside:
            fence = entry.fence()
            if fence is not None:
                fence.wait()
            self._holding.remove(entry, Cause.BYTES)
        return True

    def _too_large(self, miss: Miss, report: MemoryReport) -> CapacityError:
        limits, holding = self._holding.limits, self._holding
        stay = sum(entry.pins > 0 for entry in holding.entries.values()) + len(miss.kept)
        return CapacityError(
            f"key {miss.identity.key!r}: expected a graph that fits max_bytes={limits.max_bytes} "
            f"and max_entries={limits.max_entries}, got one of {in_words(report.total_bytes)} "
            f"beside {stay} entries that must stay and {in_words(holding.pool_bytes)} of a shared "
            f"pool; it was given back. Its memory:\n{report}"
        )

    # ---- the executable ------------------------------------------------------------------------

    def _updatable(self, miss: Miss) -> Entry | None:
        """The entry whose executable the graph of ``miss`` may take over."""
        if self._held(miss.stale) is not None:
            return miss.stale
        if miss.family is None:
            return None
        found = self._holding.families.get((miss.identity.place, miss.family))
        is_free = found is not None and not found.pins and not found.executable.is_closed
        return found if is_free else None

    def _held(self, entry: Entry | None) -> Entry | None:
        """``entry``, unless it went meanwhile."""
        if entry is None or self._holding.entries.get(entry.identity) is not entry:
            return None
        return entry

    def _entry(self, miss: Miss, graph: Graph, old: Entry | None) -> tuple[Entry, Outcome, str]:
        options = self.options
        is_shared = self._lies_in_shared_pool(graph, miss)
        if old is None:
            executable = graph.instantiate(guard=options.guard)
            entry = Entry(miss.identity, graph, executable, miss.family, is_shared)
            return entry, Outcome.CAPTURED, ""
        fence = old.fence()
        answer = old.executable.update(
            graph, reinstantiate=not options.strict, strict=options.strict
        )
        self._holding.forget(old)
        # a launch of the old parameters may still run: its owners stay until it is over
        self._holding.retire(old.graph, fence, old.bytes, old.place)
        if old.identity != miss.identity:
            departure = Departure(
                Cause.UPDATED, self._holding.lookups, old.bytes, f"{miss.identity.key!r}"
            )
            self._history.note(old.identity, departure)
        old.identity, old.graph, old.uses = miss.identity, graph, 0
        old.family, old.shares_pool = miss.family, is_shared
        is_new = answer.status is UpdateStatus.REINSTANTIATED
        return old, Outcome.REINSTANTIATED if is_new else Outcome.UPDATED, answer.reason


@contextmanager
def _noting(gone: list[Identity]) -> Iterator[None]:
    """Adds to an error which entries went to make room for what failed."""
    try:
        yield
    except BaseException as error:
        if gone:
            keys = ", ".join(repr(identity.key) for identity in gone)
            error.add_note(f"the cache had already evicted to make room: {keys}")
        raise
