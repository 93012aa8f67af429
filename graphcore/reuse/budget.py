"""Budget: how many entries and bytes a cache may hold, and what has to go for that.

Pure: the cache says what it holds, this says what to evict, and the cache does it. The least
recently used goes first; what is pinned never goes; what is in flight goes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigurationError
from graphcore.reuse.decisions import Cause


@dataclass(frozen=True, slots=True)
class Limits:
    """What a cache may hold; None is no limit.

    Args:
        max_bytes: Bytes of all entries together, and of a pool that they share.
        max_entries: Entries.
        idle_seconds: Seconds after which an entry that nobody asked for goes.
    """

    max_bytes: int | None = None
    max_entries: int | None = None
    idle_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in ("max_bytes", "max_entries"):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or value < 1):
                raise ConfigurationError(f"{field}: expected an int of at least 1, got {value!r}")
        seconds = self.idle_seconds
        numeric = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (numeric and seconds > 0):
            raise ConfigurationError(f"idle_seconds: expected more than 0, got {seconds!r}")

    def cause(self, count: int, size: int) -> Cause | None:
        """Which limit ``count`` entries of ``size`` bytes break; None where they fit."""
        if self.max_entries is not None and count > self.max_entries:
            return Cause.COUNT
        if self.max_bytes is not None and size > self.max_bytes:
            return Cause.BYTES
        return None


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """What deciding about an entry needs.

    ``last_time`` is of the cache's clock, in seconds; ``pool`` names the pool it shares, if any.
    """

    key: Hashable
    bytes: int
    last_time: float = 0.0
    pool: Hashable | None = None
    is_pinned: bool = False
    is_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class Incoming:
    """What is to come: entries and bytes; ``pool`` names a shared pool that it lies in already."""

    bytes: int
    entries: int = 1
    pool: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What to evict, in this order, and whether the rest then fits; nothing goes where it cannot.

    ``in_flight`` are those whose launches have to be waited for.
    """

    evict: tuple[tuple[Hashable, Cause], ...] = ()
    in_flight: frozenset[Hashable] = frozenset()
    fits: bool = True


def make_room(
    entries: Sequence[EntryFacts],
    limits: Limits,
    incoming: Incoming,
    pools: Mapping[Hashable, int] | None = None,
) -> Room:
    """What has to go so that ``incoming`` fits.

    Args:
        entries: Least recently used first.
        limits: The budget.
        incoming: What is to come.
        pools: Bytes of the pools that entries share; each goes with the last entry in it.
    """
    pools = pools or {}
    members = Counter(entry.pool for entry in entries)
    members[incoming.pool] += 1
    count = len(entries) + incoming.entries
    size = sum(entry.bytes for entry in entries) + sum(pools.values()) + incoming.bytes
    chosen: list[tuple[Hashable, Cause]] = []
    waiting: set[Hashable] = set()
    for entry in _in_order(entries):
        cause = limits.cause(count, size)
        if cause is None:
            break
        chosen.append((entry.key, cause))
        if entry.is_in_flight:
            waiting.add(entry.key)
        count, size = count - 1, size - entry.bytes
        members[entry.pool] -= 1
        if not members[entry.pool]:
            size -= pools.get(entry.pool, 0)
    if limits.cause(count, size) is not None:
        return Room(fits=False)
    return Room(tuple(chosen), frozenset(waiting))


def first_to_go(entries: Sequence[EntryFacts], count: int) -> Room:
    """Up to ``count`` of ``entries``, least recently used first, for want of device memory."""
    going = _in_order(entries)[:count]
    return Room(
        tuple((entry.key, Cause.MEMORY) for entry in going),
        frozenset(entry.key for entry in going if entry.is_in_flight),
    )


def _in_order(entries: Sequence[EntryFacts]) -> list[EntryFacts]:
    """Those that may go, as they go: what is in flight last."""
    # stable: the order of use stays
    return sorted(
        (entry for entry in entries if not entry.is_pinned), key=lambda each: each.is_in_flight
    )


def idle_keys(entries: Sequence[EntryFacts], limits: Limits, now: float) -> list[Hashable]:
    """Keys of entries that nobody asked for in ``idle_seconds`` and that may go."""
    if limits.idle_seconds is None:
        return []
    return [
        entry.key
        for entry in entries
        if now - entry.last_time > limits.idle_seconds
        and not (entry.is_pinned or entry.is_in_flight)
    ]
