"""CacheCounters: what a cache did, as numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """What a cache did since it was made.

    They add up: ``lookups == hits + misses + absent``; ``misses == captures + failures``;
    ``captures == instantiated + updated + reinstantiated``; the number of entries is
    ``instantiated - evicted - closed``.

    Args:
        lookups: Calls that asked for a key.
        hits: An executable was there.
        misses: None was, and a capture was tried.
        absent: None was there for ``get``, which captures nothing.
        captures: Misses that ended well.
        recaptures: Of these, keys that had been captured before.
        failures: Misses whose function, or whose budget, raised.
        instantiated: Captures that made an executable.
        updated: Captures that updated one in place.
        reinstantiated: Captures that made a new executable behind the same object, because the
            driver refused the update.
        evicted: Entries taken away that could still be used: for a limit, lying idle, or asked for.
        stale: Misses because a buffer that the entry used had changed.
        closed: Entries whose executable their user had closed.
        eager: Executables given out that run eagerly.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    absent: int = 0
    captures: int = 0
    recaptures: int = 0
    failures: int = 0
    instantiated: int = 0
    updated: int = 0
    reinstantiated: int = 0
    evicted: int = 0
    stale: int = 0
    closed: int = 0
    eager: int = 0


class Counting:
    """The numbers while they grow."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, *names: str) -> None:
        # all or none, where Ctrl-C comes meanwhile
        self._numbers.update({name: self._numbers.get(name, 0) + 1 for name in names})

    def __getitem__(self, name: str) -> int:
        return self._numbers.get(name, 0)

    def snapshot(self) -> CacheCounters:
        return CacheCounters(**self._numbers)
