"""VariantTable: what is known of each variant, and the cache that holds their executables.

Variants stay captured side by side within the limits of the cache; what goes is told with its
reason, and its variant begins anew.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from graphcore.driver import Driver
from graphcore.executable import Graph
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.manifests.names import Phase
from graphcore.reuse import Eviction, GraphCache
from graphcore.reuse.renewable import EntryUse, Renewal

_log = logging.getLogger("graphcore")
_KEPT = 256
FastName = tuple[int, int, Phase | None]
"""Of a replay: the id of its work, rows of prompts, and the phase that was given."""
_MOST_UNCAPTURED = 1024
_MOST_BROKEN = 8


class NotCapturableError(Exception):
    """No graph of a step can be made as it is; the step can still run.

    Args:
        words: Why.
        may_pass: Whether another try may succeed: it may have been another thread that broke it.
    """

    def __init__(self, words: str, *, may_pass: bool = False) -> None:
        self.may_pass = may_pass
        super().__init__(words)


class Variant:
    """One variant.

    Attributes:
        key: By which it is found.
        state: What is known of it.
        use: Its executable; None where it has none.
        fast: Under which name its replay is kept; None: it has to be looked at.
        obstacle: (uid, why a graph of it could not be made): true as long as the uid is.
        broken: How many captures in a row other threads may have broken.
    """

    __slots__ = ("broken", "fast", "key", "obstacle", "state", "use")

    def __init__(self, key: LookupKey) -> None:
        self.key = key
        self.state = EntryState()
        self.use: EntryUse | None = None
        self.fast: FastName | None = None
        self.obstacle: tuple[int, str] | None = None
        self.broken = 0

    def obstacle_of(self, uid: int) -> str:
        """Why no graph of it as it is now can be made; "" where nobody knows of anything."""
        found = self.obstacle
        return found[1] if found is not None and uid and found[0] == uid else ""

    def note_obstacle(self, uid: int, error: NotCapturableError) -> None:
        """Remembers why there is no graph of it; not the first times where that may pass."""
        self.broken += 1
        if not error.may_pass or self.broken >= _MOST_BROKEN:
            self.obstacle, self.broken = (uid, str(error)), 0

    def __repr__(self) -> str:
        words = "captured" if self.use is not None else "not captured"
        return f"<Variant of {self.key.graph!r}, {self.key.phase.value}, {words}>"


class VariantTable:
    """The variants of one :class:`graphcore.moe.GraphReuse`. Not locked.

    Args:
        driver: Where they run.
        max_entries: Executables at most; None is no limit.
        max_bytes: Bytes of all executables; None is no limit.
        idle_seconds: Seconds after which one that nobody used goes; None: never.
        clock: Gives seconds.
        forget: Told of each variant whose executable has gone.

    Attributes:
        cache: Holds the executables.
        departures: The newest executables that went to make room, lay idle or were asked for.
        next_sweep: When :meth:`sweep` has something to do, in seconds of ``clock``.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        max_entries: int | None,
        max_bytes: int | None,
        idle_seconds: float | None,
        clock: Callable[[], float],
        forget: Callable[[Variant], object],
    ) -> None:
        self.cache = GraphCache(max_bytes, max_entries, idle_seconds, clock, driver)
        self.cache.tell(self._told)
        self.departures: deque[Eviction] = deque(maxlen=_KEPT)
        self._variants: OrderedDict[LookupKey, Variant] = OrderedDict()
        self._forget = forget
        self._clock = clock
        self._idle_seconds = idle_seconds
        self.next_sweep = math.inf if idle_seconds is None else 0.0

    def __iter__(self) -> Iterator[Variant]:
        return iter(tuple(self._variants.values()))

    def of(self, key: LookupKey) -> Variant:
        """The variant of ``key``, a new one where there is none."""
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = Variant(key)
            self._forget_some()
        self._variants.move_to_end(key)
        return found

    def capture(self, variant: Variant, build: Callable[[], Graph]) -> None:
        """Instantiates what ``build`` gives; raises as ``GraphCache.get_or_build``."""
        if variant.use is None:
            self.cache.evict(variant.key)  # what an interrupt may have left there
        self.cache.get_or_build(variant.key, build)
        variant.use = self.cache.use(variant.key)
        variant.broken = 0

    def renew(self, variant: Variant, graph: Graph) -> Renewal:
        """Puts ``graph`` behind the executable; raises as ``GraphCache.renew``."""
        return self.cache.renew(variant.key, graph)

    def drop(self, variant: Variant) -> None:
        """Gives up the executable and then its description; nothing where there is none."""
        if variant.use is not None:
            variant.use = None
            self._forget(variant)
            self.cache.evict(variant.key)
            self.cache.collect()

    def tidy(self, variant: Variant) -> None:
        """Gives back what was given up and has run by now, and what lies idle but ``variant``."""
        if variant.use is None:
            self.cache.collect()
        else:
            self.cache.get(variant.key)  # a lookup does so, too

    def sweep(self, now: float) -> None:
        """Takes away what lies idle; for when ``next_sweep`` has come."""
        assert self._idle_seconds is not None
        self.next_sweep = now + self._idle_seconds / 4
        self.cache.collect()

    def close(self) -> None:
        """Gives up everything and waits for the launches that run."""
        for variant in self:
            variant.use, variant.state = None, EntryState()
            self._forget(variant)
        self._variants.clear()
        self.cache.close()

    def _told(self, eviction: Eviction) -> None:
        """An executable has gone; where the table did not ask for it, its variant begins anew."""
        key = eviction.key
        variant = self._variants.get(key) if isinstance(key, LookupKey) else None
        if variant is None or variant.use is None:
            return
        variant.use = None
        variant.state = replace(variant.state.after(Retention.RESET), capture=None)
        self.departures.append(eviction)
        self._forget(variant)
        _log.info("moe: %s: %s", Reason.EVICTED.value, eviction)

    def _forget_some(self) -> None:
        """Forgets variants that were never captured and did not come back."""
        if len(self._variants) > _MOST_UNCAPTURED:
            idle = [key for key, each in self._variants.items() if each.use is None]
            for key in idle[: len(self._variants) - _MOST_UNCAPTURED]:
                del self._variants[key]
