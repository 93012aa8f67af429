"""GraphCache: executables by key, within a budget of measured bytes.

Decisions are made elsewhere (budget.py, decisions.py, thrash.py) and carried out here. Not locked:
one thread at a time. The function that a miss captures may look things up in the cache, but not
capture into it or take from it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, get_args

from graphcore.advice import advises, instead
from graphcore.driver import Driver
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.executable import Graph, GraphExec, capture_function
from graphcore.executable.graph import Guard
from graphcore.interop import choose_driver
from graphcore.interop.torch import MemoryPool
from graphcore.resources.driver_argument import checked_driver
from graphcore.reuse.budget import Limits
from graphcore.reuse.bulk import capture_all
from graphcore.reuse.counters import CacheCounters
from graphcore.reuse.decisions import Cause, Decision
from graphcore.reuse.eager import EagerExec
from graphcore.reuse.entries import Entry, Identity, checked_graph, place_of
from graphcore.reuse.filling import Options
from graphcore.reuse.keys import check_key
from graphcore.reuse.renewable import RenewableCache
from graphcore.reuse.serving import Serving
from graphcore.reuse.table import table
from graphcore.reuse.thrash import Churn, Thrash

_log = logging.getLogger("graphcore")


@advises
class GraphCache(RenewableCache):
    """Executables by key: captured at the first miss, launched again at every hit.

    ``executable = cache.get_or_capture(key, step)``, then ``executable.launch(stream)``. Device and
    context count beside the key. An entry's bytes are measured: the segments of its torch pool, the
    memory its graph allocates, and its nodes times what a node takes on this driver.

    Entries that nobody asked for longest go first; one that is pinned never goes, and one whose
    launch still runs goes last and is waited for. Before a capture, room is made for what the key
    took before, else for what the last capture took; after it, for what it really takes. So memory
    is over the budget at most while a graph larger than that is made.

    Where the device itself has no more memory, entries go as well, in the same order: one, then
    twice as many, until there is enough or none may go; each time it is tried again.

    Args:
        max_bytes: Bytes of all entries together; None is no limit.
        max_entries: Entries; None is no limit.
        idle_seconds: Seconds after which an entry that nobody asked for goes, at the next call.
        clock: Gives seconds; for ``idle_seconds``.
        driver: Where all graphs run; None: the driver of the stream given, else the default one.
        guard: What executables test at a launch, as of :meth:`Graph.instantiate`. A lookup looks at
            the same: with "full" at every buffer, else at what their owners said. A stale entry is
            captured again and its executable updated.
        share_pool: Captures share one torch memory pool for each device, which takes far less than
            one each. The entries must then not run at the same time on different streams, and a
            launch of one may overwrite outputs of another. The pool goes with the last entry.
        strict: Nothing falls back silently: an update that the driver refuses raises UpdateRefused
            instead of a re-instantiation, ``GRAPHCORE_DISABLE=1`` raises CaptureError, and no entry
            goes for want of device memory.

    Raises:
        ConfigurationError: A limit that is not positive, an unknown guard, or no driver.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        max_entries: int | None = None,
        idle_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        driver: Driver | None = None,
        *,
        guard: Guard | None = "owners",
        share_pool: bool = False,
        strict: bool = False,
    ) -> None:
        self.limits = Limits(max_bytes, max_entries, idle_seconds)
        if guard is not None and guard not in get_args(Guard):
            raise ConfigurationError(
                f"guard: expected one of {get_args(Guard)} or None, got {guard!r}"
            )
        self._driver = None if driver is None else checked_driver(driver)
        if not callable(clock):
            raise ConfigurationError(f"clock: expected a function, got {clock!r}")
        self._serving = Serving(self.limits, Options(guard, share_pool, strict), clock)
        self._holding = self._serving.holding
        self._is_closed = False
        self._has_told_eager = False

    # ---- looking up ----------------------------------------------------------------------------

    def get(self, key: Hashable) -> GraphExec | None:
        """The executable of ``key``, or None; captures nothing.

        Raises:
            CacheTypeError: ``key`` cannot be one; see :func:`graphcore.reuse.check_key`.
            LifecycleError: The cache is closed.
        """
        entry = self._find(key)
        return None if entry is None else entry.executable

    def get_or_capture(
        self,
        key: Hashable,
        fn: Callable[[], Any],
        *,
        family: Hashable | None = None,
        warmup: int = 3,
        **capture_options: Any,
    ) -> GraphExec | EagerExec:
        """The executable of ``key``; at a miss, ``fn`` is warmed up and captured.

        What ``fn`` returns is ``executable.outputs``. The executable belongs to the cache, which
        closes it when it takes it away; a closed one is captured again at the next call.

        Args:
            key: Hashable and unchangeable, the same for whatever may share a graph.
            fn: Launches the work; called without arguments.
            family: Keys of one family take turns in one executable: a miss updates it in place
                where the driver can, which costs far less than an instantiation. The key it had
                before is captured again when it comes back.
            warmup: Runs before the capture.
            capture_options: As of :func:`graphcore.capture`, but driver and, where the cache shares
                one, pool.

        Where the shared pool outgrew the budget, ``fn`` is warmed up and captured a second time;
        where device memory ran out in it, again for each time that entries could go.

        Returns:
            The executable; an :class:`EagerExec` that calls ``fn`` under ``GRAPHCORE_DISABLE=1``.

        Raises:
            CacheTypeError: ``key`` cannot be one.
            ConfigurationError: A number in ``key`` is an address, NaN, or equals the number of
                another kind in a key that is there; or ``fn`` cannot be called.
            CapacityError: The graph does not fit the budget; the cache has it not.
            LifecycleError: Closed, or called by a function that the cache is capturing.
            CaptureError: As of :func:`graphcore.capture`. Whatever ``fn`` raises passes as well.
                In all these cases the cache is as before, but for entries that had to make room,
                which a note on the error names.
        """
        self._refuse_closed()
        if not callable(fn):
            raise ConfigurationError(
                f"fn: expected a callable, got {type(fn).__name__}{instead(fn, 'function')}"
            )
        stream = None
        if capture_options:
            self._refuse_options(capture_options)
            stream = capture_options.pop("stream", None)
        driver = self._driver or choose_driver(*([] if stream is None else [stream]))
        if os.environ.get("GRAPHCORE_DISABLE") == "1":
            return self._eager(driver, key, fn)
        serving = self._serving
        found = serving.look_up(driver, key)
        if found.entry is not None:
            return found.entry.executable

        def make(pool: MemoryPool | None, stream: Any) -> Graph:
            options = {**capture_options, "stream": stream, "pool": pool}
            return capture_function(fn, warmup=warmup, driver=driver, **options)

        wants_blocking = capture_options.get("on_legacy_work", "error") == "error"
        return serving.make(
            driver, found, make, family, stream, wants_blocking=wants_blocking
        ).executable

    def get_or_build(
        self, key: Hashable, build: Callable[[], Graph], *, family: Hashable | None = None
    ) -> GraphExec:
        """The executable of ``key``; at a miss, of the graph that ``build`` gives.

        For graphs that are built node by node, or captured by other means. The cache takes the
        graph over and closes it with the executable.

        Raises:
            CacheTypeError: ``build`` gave no :class:`Graph`; or as :meth:`get_or_capture`.
            CaptureError: ``GRAPHCORE_DISABLE=1``: there is nothing to run eagerly.
        """
        self._refuse_closed()
        if not callable(build):
            raise ConfigurationError(
                f"build: expected a callable, got {type(build).__name__}"
                f"{instead(build, 'function')}"
            )
        driver = self._driver or choose_driver()

        def make(_pool: MemoryPool | None, _stream: Any) -> Graph:
            return checked_graph(build(), driver)

        found = self._serving.look_up(driver, key)
        if found.entry is not None:
            return found.entry.executable
        return self._serving.make(driver, found, make, family, may_repeat=False).executable

    # ---- many at once --------------------------------------------------------------------------

    def capture_all(
        self,
        keys: Iterable[Hashable],
        fn: Callable[[Any], Any],
        progress: bool = True,
        *,
        size: Callable[[Any], float] | None = None,
        **options: Any,
    ) -> dict[Hashable, GraphExec | EagerExec]:
        """Captures ``fn(key)`` for each key that is not there, the largest first.

        The largest first, so that a shared pool is made once, as large as it has to be. None of
        these entries is evicted for another of them.

        Args:
            keys: The buckets; one that comes twice counts once.
            fn: Called with the key, by warm-up and capture.
            progress: A bar (tqdm's, where it is installed, else lines in the log) with the memory.
            size: How large a key is; None: the number it is, or the product of those in it.
            options: As of :meth:`get_or_capture`, but ``family``.

        Returns:
            The executables by key, in the order of ``keys``.

        Raises:
            CapacityError: They do not fit the budget together.
            ConfigurationError: Keys without a number, and no ``size``.
            Exception: What ``fn`` raises. In each case what was captured stands, and a note on the
                error says which keys these are.
        """
        return capture_all(self, list(keys), fn, progress=progress, size=size, options=options)

    @contextmanager
    def _keeping_new(self) -> Iterator[Callable[[Hashable], None]]:
        """For the block, entries told to what it yields are not evicted, by key."""
        serving = self._serving
        serving.filling.refuse_under_way("capture_all")
        place = place_of(self._driver or choose_driver())
        serving.bulk = frozenset()

        def keep(key: Hashable) -> None:
            serving.bulk = (serving.bulk or frozenset()) | {Identity(place, key)}

        try:
            yield keep
        finally:
            serving.bulk = None

    # ---- taking away ---------------------------------------------------------------------------

    @contextmanager
    def pin(self, key: Hashable) -> Iterator[GraphExec]:
        """For the block, the entry of ``key`` is not taken away; gives its executable.

        Raises:
            ConfigurationError: There is none.
        """
        entry = self._find(key)
        if entry is None:
            raise ConfigurationError(f"key: expected one that is in the cache, got {key!r}")
        entry.pins += 1
        try:
            yield entry.executable
        finally:
            entry.pins -= 1

    def evict(self, key: Hashable) -> bool:
        """Takes the entry of ``key`` away; whether there was one.

        Where a launch of it still runs, its memory goes when that is over.

        Raises:
            LifecycleError: It is pinned, or the cache is capturing.
        """
        self._refuse_closed()
        self._serving.filling.refuse_under_way("evict")
        _, entry = self._serving.find(self._driver or choose_driver(), key)
        if entry is None:
            return False
        self._refuse_pinned(entry)
        self._holding.remove(entry, Cause.ASKED)
        return True

    def clear(self) -> None:
        """Takes every entry away, as :meth:`evict`; nothing where one is pinned."""
        self._serving.filling.refuse_under_way("clear")
        entries = list(self._holding.entries.values())
        for entry in entries:
            self._refuse_pinned(entry)
        for entry in entries:
            self._holding.remove(entry, Cause.ASKED)
        self._serving.watch.forget()

    def collect(self) -> int:
        """Gives back what has run by now and takes away what lies idle; how many entries went."""
        self._refuse_closed()
        self._serving.filling.refuse_under_way("collect")
        self._holding.drop_retired()
        return self._holding.drop_idle(self._serving.clock())

    def close(self) -> None:
        """Takes every entry away and waits for the launches that run; a second call does nothing.

        Raises:
            LifecycleError: An entry is pinned, or the cache is capturing.
        """
        if self._is_closed:
            return
        self.clear()
        self._is_closed = True
        self._holding.drop_retired(wait=True)

    # ---- what there is -------------------------------------------------------------------------

    @property
    def counters(self) -> CacheCounters:
        """What the cache did so far."""
        return self._serving.counting.snapshot()

    @property
    def bytes(self) -> int:
        """Measured bytes of everything the cache holds, shared pools included."""
        return self._holding.bytes

    @property
    def pool_bytes(self) -> int:
        """Of these, bytes of the shared pools."""
        return self._holding.pool_bytes

    @property
    def peak_bytes(self) -> int:
        """The most it ever held, a graph that was just being made included."""
        return self._serving.filling.peak_bytes

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The newest decisions, oldest first; each reads as a sentence."""
        return tuple(self._serving.decisions)

    @property
    def warnings(self) -> tuple[Thrash | Churn, ...]:
        """What was warned of: that the cache thrashes, or that no key comes twice."""
        return tuple(self._serving.warnings)

    def keys(self) -> list[Hashable]:
        """The keys, least recently used first."""
        return [identity.key for identity in self._holding.entries]

    def __len__(self) -> int:
        return len(self._holding.entries)

    def __contains__(self, key: Hashable) -> bool:
        return self._serving.find(self._driver or choose_driver(), key)[1] is not None

    def __repr__(self) -> str:
        return table(self._holding, self.counters, self._serving.clock())

    def __enter__(self) -> GraphCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- helpers -------------------------------------------------------------------------------

    def _find(self, key: Hashable) -> Entry | None:
        self._refuse_closed()
        entry = self._serving.look_up(self._driver or choose_driver(), key).entry
        if entry is None:
            self._serving.counting.add("lookups", "absent")
        return entry

    def _eager(self, driver: Driver, key: Hashable, fn: Callable[[], Any]) -> EagerExec:
        check_key(key)
        reason = "GRAPHCORE_DISABLE=1"
        if self._serving.filling.options.strict:
            raise CaptureError(f"key {key!r}: {reason} turns graphs off, and the cache is strict")
        self._serving.counting.add("eager")
        if not self._has_told_eager:
            self._has_told_eager = True
            _log.info("cache: %s: no graphs, every launch calls its function", reason)
        return EagerExec(driver, fn, reason)

    def _refuse_options(self, options: dict[str, Any]) -> None:
        refused = {"driver"} | ({"pool"} if self._serving.filling.options.share_pool else set())
        for name in sorted(refused & options.keys()):
            raise ConfigurationError(
                f"{name}: expected none here, got {options[name]!r}; the cache has its own"
            )

    @staticmethod
    def _refuse_pinned(entry: Entry) -> None:
        if entry.pins:
            raise LifecycleError(
                f"key {entry.identity.key!r}: expected an entry that may go, got one that "
                f"{entry.pins} blocks have pinned"
            )

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise LifecycleError("GraphCache: expected an open cache, got a closed one")
