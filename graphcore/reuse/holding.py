"""Holding: the entries of a cache, their pools, what they take, and taking them away.

Memory goes back only when no launch can still use it. What is taken away while it runs is retired:
its executable takes no more launches, and its graph keeps its owners until the launch is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from graphcore.driver import Driver, Stream, active
from graphcore.executable import Graph
from graphcore.executable.fence import Fence
from graphcore.executable.retired import release_finished
from graphcore.interop.torch import MemoryPool
from graphcore.reuse.budget import Incoming, Limits, Room, first_to_go, idle_keys, make_room
from graphcore.reuse.decisions import Cause, Departure, Eviction
from graphcore.reuse.entries import Entry, Identity, Place, Retired

Report = Callable[[Identity, Eviction], None]


class Holding:
    """What a cache holds, least recently used first.

    Args:
        limits: The budget.
        report: Told of each entry that left.

    Attributes:
        newest: The entry that :meth:`note` was told of last; None where the order changed since.
    """

    def __init__(self, limits: Limits, report: Report) -> None:
        self.limits = limits
        self.entries: OrderedDict[Identity, Entry] = OrderedDict()
        self.families: dict[tuple[Place, Hashable], Entry] = {}
        self.pools: dict[Place, MemoryPool] = {}
        self.lookups = 0
        # used without a lookup, in that order, since the entries were last put in theirs
        self._noted: dict[Entry, None] = {}
        self.newest: Entry | None = None
        self._pool_bytes: dict[Hashable, int] = {}
        self._retired: list[Retired] = []
        self._report = report

    # ---- what there is -------------------------------------------------------------------------

    @property
    def pool_bytes(self) -> int:
        """Bytes of the shared pools, as last measured."""
        return sum(self._pool_bytes.values())

    @property
    def bytes(self) -> int:
        """Bytes of everything: entries, shared pools, and what still runs after it was retired."""
        entries = sum(entry.bytes for entry in self.entries.values())
        return entries + self.pool_bytes + sum(each.bytes for each in self._retired)

    def touch(self, entry: Entry, now: float) -> None:
        """Notes that somebody asked for ``entry``."""
        if self._noted:
            self._settle_order()
        entry.uses += 1
        entry.last_time = now
        self.entries.move_to_end(entry.identity)

    def note(self, entry: Entry) -> None:
        """Notes that ``entry`` was used, without a lookup, behind all those noted before."""
        self._noted.pop(entry, None)
        self._noted[entry] = None
        self.newest = entry

    def _settle_order(self) -> None:
        self.newest = None
        noted, self._noted = self._noted, {}
        for entry in sorted(noted, key=lambda each: each.last_time):
            if self.entries.get(entry.identity) is entry:
                self.entries.move_to_end(entry.identity)

    def add(self, entry: Entry) -> None:
        """Takes ``entry``, as the one used last, and as the one of its family."""
        self.entries[entry.identity] = entry
        if entry.family is not None:
            self.families[entry.identity.place, entry.family] = entry

    def pool_for(self, driver: Driver, place: Place) -> MemoryPool:
        """The pool that captures at ``place`` share."""
        if place not in self.pools:
            self.pools[place] = MemoryPool(driver.device)
        return self.pools[place]

    def measure_pool(self, place: Place, *, is_used: bool = False) -> None:
        """Reads what the shared pool at ``place`` takes by now; drops it where nobody uses it."""
        pool = self.pools.get(place)
        if pool is None:
            return
        if is_used or self._is_pool_used(place):
            self._pool_bytes[place] = pool.bytes()
        else:
            del self.pools[place]
            self._pool_bytes.pop(place, None)

    def order_after_launches(self, stream: Stream, place: Place) -> None:
        """Makes ``stream`` wait for the launches of what shares the pool at ``place``.

        A capture's warm-up writes the memory that they work in.
        """
        for entry in self.entries.values():
            fence = entry.fence() if entry.place == place and entry.shares_pool else None
            if fence is not None:
                fence.hold_back(stream)
        for each in self._retired:
            if each.place == place:
                each.fence.hold_back(stream)

    def _is_pool_used(self, place: Place) -> bool:
        places = {entry.place for entry in self.entries.values()}
        return place in places or any(place == each.place for each in self._retired)

    # ---- what goes -----------------------------------------------------------------------------

    def forget(self, entry: Entry) -> None:
        """Lets go of ``entry`` without closing anything."""
        family = (entry.identity.place, entry.family)
        if entry.family is not None and self.families.get(family) is entry:
            del self.families[family]
        self.entries.pop(entry.identity, None)
        self.newest = None
        self._noted.pop(entry, None)

    def remove(self, entry: Entry, cause: Cause, *, waited: bool = False) -> None:
        """Takes ``entry`` away; its memory goes now, or when its launch has run."""
        fence = entry.fence() if entry.is_in_flight() else None
        departure = Departure(cause, self.lookups, entry.bytes)
        self.forget(entry)
        try:
            entry.executable.close()
            self.retire(entry.graph, fence, entry.bytes, entry.place)
            self.measure_pool(entry.place)
        finally:  # it has left, even where Ctrl-C came meanwhile
            self._report(entry.identity, Eviction(entry.identity.key, departure, waited))

    def retire(self, graph: Graph, fence: Fence | None, size: int, place: Place) -> None:
        """Closes ``graph`` once ``fence`` has passed."""
        if fence is None or fence.has_passed():
            graph.close()
        else:
            self._retired.append(Retired(graph, fence, size, place))

    def drop_retired(self, *, wait: bool = False, turns: bool = True) -> None:
        """Closes what has run by now; ``wait``: waits for the rest.

        ``turns``: as of :func:`release_finished`.
        """
        release_finished(turns=turns)
        if not self._retired or (active.is_any_under_way() and not wait):
            return
        waiting = []
        for each in self._retired:
            if wait:
                each.fence.wait()
            if each.fence.has_passed():
                each.graph.close()
            else:
                waiting.append(each)
        places = {each.place for each in self._retired}
        self._retired = waiting
        release_finished()  # owners that an executable itself held back
        for place in places:
            self.measure_pool(place)

    def drop_idle(self, now: float) -> int:
        """Takes away what nobody asked for in a long time; how many."""
        self._settle_order()
        limit = self.limits.idle_seconds
        oldest = next(iter(self.entries.values()), None)
        if limit is None or oldest is None or now - oldest.last_time <= limit:
            return 0  # what every lookup asks; they lie in the order of their last use
        facts = [entry.facts(with_flight=False) for entry in self.entries.values()]
        count = 0
        for key in idle_keys(facts, self.limits, now):
            entry = self.entries[key]  # type: ignore[index]
            if not entry.is_in_flight():
                self.remove(entry, Cause.IDLE)
                count += 1
        return count

    def make_room(
        self, incoming: Incoming, kept: frozenset[Identity], leaving: Entry | None = None
    ) -> list[Identity] | None:
        """Takes away what has to go for ``incoming``; None where it cannot fit, and nothing went.

        Args:
            incoming: What is to come.
            kept: Entries that must stay, besides those that are pinned.
            leaving: An entry that ``incoming`` takes the place of.
        """
        if self._fits(incoming, leaving):
            return []
        self._settle_order()
        self.drop_retired(wait=True)
        facts = [
            entry.facts(must_stay=identity in kept)
            for identity, entry in self.entries.items()
            if entry is not leaving
        ]
        room = make_room(facts, self.limits, incoming, self._pool_bytes)
        return self._evict(room) if room.fits else None

    def relieve(self, count: int, kept: frozenset[Identity]) -> list[Identity]:
        """Takes away up to ``count`` entries, because device memory ran out; which went.

        Args:
            count: The least recently used ones; what is in flight goes last and is waited for.
            kept: Entries that must stay, besides those that are pinned.
        """
        self._settle_order()
        self.drop_retired(wait=True)
        facts = [entry.facts(must_stay=key in kept) for key, entry in self.entries.items()]
        return self._evict(first_to_go(facts, count))

    def _evict(self, room: Room) -> list[Identity]:
        for key, cause in room.evict:
            entry = self.entries[key]  # type: ignore[index]
            fence = entry.fence()
            if key in room.in_flight and fence is not None:
                fence.wait()
            self.remove(entry, cause, waited=key in room.in_flight)
        self.drop_retired(wait=True)
        return [key for key, _ in room.evict]  # type: ignore[misc]

    def is_over(self) -> bool:
        """Whether more is held than the limits allow, what was retired included."""
        return self.limits.cause(len(self.entries), self.bytes) is not None

    def _fits(self, incoming: Incoming, leaving: Entry | None) -> bool:
        count = len(self.entries) + incoming.entries - (leaving is not None)
        size = self.bytes + incoming.bytes - (leaving.bytes if leaving else 0)
        return self.limits.cause(count, size) is None
