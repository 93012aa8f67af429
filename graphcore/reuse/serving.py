"""Serving: what a lookup comes to: a hit, or a miss that is filled, counted and told.

The half of :class:`graphcore.GraphCache` that users do not see.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.executable import Graph
from graphcore.interop.torch import MemoryPool
from graphcore.reuse.budget import Limits
from graphcore.reuse.counters import Counting
from graphcore.reuse.decisions import (
    EVICTIONS,
    CaptureDecision,
    CaptureReason,
    Cause,
    Decision,
    Departure,
    Eviction,
    History,
    Outcome,
)
from graphcore.reuse.entries import Entry, Identity, place_of
from graphcore.reuse.filling import Filling, Miss, Options
from graphcore.reuse.holding import Holding
from graphcore.reuse.keys import check_key, refuse_addresses, same_kinds
from graphcore.reuse.thrash import Churn, Thrash, Watch

_log = logging.getLogger("graphcore")

_KEPT_DECISIONS = 256
_ENDS = {
    Outcome.CAPTURED: "instantiated",
    Outcome.UPDATED: "updated",
    Outcome.REINSTANTIATED: "reinstantiated",
}

Make = Callable[[MemoryPool | None, Any], Graph]
Told = Callable[[Eviction], object]


class Lookup(NamedTuple):
    """What a lookup found.

    Args:
        entry: The usable entry; None where there is none.
        identity: Of the key.
        stale: Why the key is captured again, where its entry is not usable any more.
    """

    entry: Entry | None
    identity: Identity
    stale: CaptureReason | None = None


class Serving:
    """Looks up and fills, and keeps the books: counters, decisions, warnings.

    Args:
        limits: The budget.
        options: How entries are made.
        clock: Gives seconds.
    """

    def __init__(self, limits: Limits, options: Options, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.told: Told | None = None
        """Called with each eviction, when the entry has gone."""
        self.counting = Counting()
        self.decisions: deque[Decision] = deque(maxlen=_KEPT_DECISIONS)
        self.warnings: list[Thrash | Churn] = []
        self.holding = Holding(limits, self._left)
        self.history = History()
        self.filling = Filling(self.holding, self.history, options)
        self.watch = Watch()
        self.bulk: frozenset[Identity] | None = None
        """Where many are captured together: those captured so far."""

    def make(
        self,
        driver: Driver,
        lookup: Lookup,
        make: Make,
        family: Hashable | None,
        stream: Any = None,
        *,
        wants_blocking: bool = True,
        may_repeat: bool = True,
    ) -> Entry:
        """The entry that ``lookup`` did not find; raises as ``get_or_capture``."""
        identity, stale = lookup.identity, lookup.stale
        key = identity.key
        check_key(family)
        refuse_addresses(key, lambda number: driver.allocation_of(number) is not None)
        reason = stale or self.history.reason(identity, self.holding.lookups)
        found = self.holding.entries.get(identity)
        kept = self.bulk or frozenset()
        miss = Miss(
            driver, identity, make, reason, family, found, kept, stream, wants_blocking, may_repeat
        )
        counted = ["lookups", "misses", *(["stale"] if found else [])]
        try:
            entry, decision = self.filling.fill(miss, self.clock)
        except BaseException:
            self.counting.add(*counted, "failures")
            raise
        self._count_capture(identity, decision, counted)
        return entry

    def look_up(self, driver: Driver, key: Hashable) -> Lookup:
        """What there is of ``key``.

        Counts a hit; what becomes of a lookup that found nothing is the caller's to count.
        """
        holding = self.holding
        identity, entry = self.find(driver, key)
        holding.lookups += 1
        self._tidy(entry)
        trouble = None if entry is None else entry.unusable(self.filling.options.guard == "full")
        if entry is None or (trouble is not None and trouble[0] is Cause.CLOSED):
            if entry is not None:
                holding.remove(entry, Cause.CLOSED)
            return Lookup(None, identity)
        if trouble is not None:
            gone = Departure(trouble[0], holding.lookups, entry.bytes, trouble[1])
            return Lookup(None, identity, CaptureReason(gone))
        holding.touch(entry, self.clock())
        self.counting.add("lookups", "hits")
        self.watch.hit(identity, len(holding.entries))
        return Lookup(entry, identity)

    def find(self, driver: Driver, key: Hashable) -> tuple[Identity, Entry | None]:
        """The entry of ``key``, usable or not; counts nothing.

        Raises:
            CacheTypeError: ``key`` cannot be one.
            ConfigurationError: It cannot be found again, or equals a key of another kind.
        """
        identity = Identity(place_of(driver), key)
        try:
            entry = self.holding.entries.get(identity)
        except TypeError:  # no hash
            entry = None
        if entry is None:
            check_key(key)  # a tensor, say, has a hash, and is never found
        elif entry.identity.key is not key and not same_kinds(entry.identity.key, key):
            raise ConfigurationError(
                f"key: expected one that differs from the keys that are there, got {key!r}, which "
                f"Python takes for equal to {entry.identity.key!r}; use one kind of number"
            )
        return identity, entry

    def _tidy(self, wanted: Entry | None) -> None:
        """Drops what has run by now, and what lay idle; not inside a capture of this cache."""
        if self.filling.under_way is not None:
            return
        self.holding.drop_retired(turns=wanted is None)
        if self.holding.limits.idle_seconds is not None:
            if wanted is not None:
                wanted.last_time = self.clock()
            self.holding.drop_idle(self.clock())

    def _count_capture(
        self, identity: Identity, decision: CaptureDecision, counted: list[str]
    ) -> None:
        names = ["captures", _ENDS[decision.outcome]]
        if decision.reason.is_recapture:
            names.append("recaptures")
        self.counting.add(*counted, *names)
        self._note(decision)
        holding = self.holding
        if self.bulk is not None:
            return  # many new keys are what it is for
        found = self.watch.captured(
            identity,
            decision.reason,
            decision.bytes,
            len(holding.entries),
            holding.pool_bytes,
            name=decision.key,
        )
        if found is not None:
            self.warnings.append(found)
            _log.warning("%s", found)

    def _left(self, identity: Identity, eviction: Eviction) -> None:
        """Writes down that an entry left."""
        cause = eviction.departure.cause
        self.history.note(identity, eviction.departure)
        self.counting.add("evicted" if cause in EVICTIONS else "closed")
        self._note(eviction)
        if self.told is not None:
            self.told(eviction)

    def _note(self, decision: Decision) -> None:
        self.decisions.append(decision)
        _log.info("cache: %s", decision)
