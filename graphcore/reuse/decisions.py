"""Decisions of a cache as values: why something was captured again, what became of it, what went.

Nothing here touches a driver. Each value reads as the sentence that is logged at INFO.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from graphcore.executable.memory_report import in_words


class Cause(Enum):
    """Why an entry left the cache."""

    BYTES = "budget"
    MEMORY = "want of device memory"
    COUNT = "the number of entries"
    IDLE = "lying idle"
    ASKED = "its user asked"
    CLOSED = "its executable was closed by its user"
    STALE = "stale"
    UPDATED = "its executable was updated to another key"


EVICTIONS = frozenset({Cause.BYTES, Cause.MEMORY, Cause.COUNT, Cause.IDLE, Cause.ASKED})
"""Causes by which a cache takes an entry that could still be used."""


class Outcome(Enum):
    """What a miss came to."""

    CAPTURED = "captured and instantiated"
    UPDATED = "update instead of an instantiation"
    REINSTANTIATED = "re-instantiated behind the same executable"


@dataclass(frozen=True, slots=True)
class Departure:
    """When and why a key left: ``lookup`` counts lookups; ``bytes`` is what it took."""

    cause: Cause
    lookup: int
    bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CaptureReason:
    """Why a key is captured now: ``departure`` is None where it never was before.

    Args:
        departure: How it left, where it was captured before.
        lookups_ago: Lookups since then.
    """

    departure: Departure | None = None
    lookups_ago: int = 0

    @property
    def is_recapture(self) -> bool:
        return self.departure is not None

    @property
    def was_evicted(self) -> bool:
        """Whether a larger cache would have had it."""
        return self.departure is not None and self.departure.cause in (Cause.BYTES, Cause.COUNT)

    def __str__(self) -> str:
        gone = self.departure
        if gone is None:
            return "miss: never captured"
        if gone.cause in EVICTIONS:
            plural = "" if self.lookups_ago == 1 else "s"
            return (
                f"re-capture: evicted {self.lookups_ago} lookup{plural} ago for {gone.cause.value}"
            )
        detail = f": {gone.detail}" if gone.detail else ""
        return f"re-capture: {gone.cause.value}{detail}"


@dataclass(frozen=True, slots=True)
class CaptureDecision:
    """A miss and what it came to; ``detail`` is the update's own reason, where one was tried."""

    key: Hashable
    reason: CaptureReason
    outcome: Outcome
    bytes: int
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"key {self.key!r}: {self.reason}: {self.outcome.value}{detail}, {in_words(self.bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Eviction:
    """An entry that left; ``waited``: a launch of it was still running, and was waited for."""

    key: Hashable
    departure: Departure
    waited: bool = False

    def __str__(self) -> str:
        waited = ", after its running launch" if self.waited else ""
        detail = f" ({self.departure.detail})" if self.departure.detail else ""
        return (
            f"key {self.key!r} left the cache: {self.departure.cause.value}{detail}, "
            f"{in_words(self.departure.bytes)}{waited}"
        )


Decision = CaptureDecision | Eviction


class History:
    """How keys left, and what they took: as many of the newest as ``limit``.

    Bounded, because keys that never come back must not fill the memory of a server.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._departures: OrderedDict[Hashable, Departure] = OrderedDict()

    def note(self, key: Hashable, departure: Departure) -> None:
        """Remembers how ``key`` left."""
        self._departures.pop(key, None)
        self._departures[key] = departure
        if len(self._departures) > self._limit:
            self._departures.popitem(last=False)

    def reason(self, key: Hashable, lookup: int) -> CaptureReason:
        """Why ``key``, which is not there at ``lookup``, is captured."""
        departure = self._departures.get(key)
        return CaptureReason(departure, lookup - departure.lookup if departure else 0)

    def bytes_of(self, key: Hashable) -> int | None:
        """What ``key`` took when it was there; None where it is not known."""
        departure = self._departures.get(key)
        return departure.bytes if departure else None

    def __len__(self) -> int:
        return len(self._departures)
