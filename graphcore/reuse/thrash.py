"""Signs that a cache does not help: what it evicts comes back at once, or no key comes twice.

Pure: the cache tells each lookup; what is found is a value that reads as the warning.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from graphcore.executable.memory_report import in_words
from graphcore.reuse.decisions import CaptureReason

LEAST_WINDOW = 64
RECAPTURES = 8
LEAST_SHARE = 0.1
NEW_KEYS = 32
_EXAMPLES = 4


@dataclass(frozen=True, slots=True)
class Thrash:
    """Keys that were evicted come back at once.

    Args:
        recaptures: Captures of keys that a limit had evicted, within the last ``lookups``.
        lookups: The lookups looked at.
        keys: Different keys among these lookups: the entries that would be needed.
        bytes: What these keys took, as measured: the bytes that would be needed.
    """

    recaptures: int
    lookups: int
    keys: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"the cache thrashes: {self.recaptures} of the last {self.lookups} lookups captured "
            f"again what had been evicted within them; they asked for {self.keys} keys, which need "
            f"max_entries={self.keys} and max_bytes={self.bytes} ({in_words(self.bytes)}), or "
            "fewer buckets"
        )


@dataclass(frozen=True, slots=True)
class Churn:
    """Every lookup asks for a key that was never seen: ``varies`` says where they differ."""

    lookups: int
    varies: str

    def __str__(self) -> str:
        return (
            f"each of the last {self.lookups} lookups captured a graph for a key never seen "
            f"before; {self.varies}. Pad inputs to a few sizes, and leave out of the key what "
            "differs from call to call (addresses, positions, request numbers)"
        )


class Watch:
    """Looks at the lookups of one cache; each sign is reported once until :meth:`forget`."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Hashable, bool]] = deque()
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()
        self._new: list[Hashable] = []
        self._told: set[type] = set()

    def hit(self, key: Hashable, entries: int) -> None:
        """A lookup found ``key``."""
        self._new.clear()
        self._add(key, False, entries)

    def captured(
        self,
        key: Hashable,
        reason: CaptureReason,
        size: int,
        entries: int,
        pool_bytes: int = 0,
        *,
        name: Hashable | None = None,
    ) -> Thrash | Churn | None:
        """A lookup captured ``key``, of ``size`` bytes; what that is a sign of, if it is new.

        ``name`` is what the user calls it, where ``key`` is more than that.
        """
        window = self._window(entries)
        again = reason.was_evicted and reason.lookups_ago <= window
        self._sizes.pop(key, None)
        self._sizes[key] = size
        if len(self._sizes) > 4 * window:
            self._sizes.popitem(last=False)
        self._add(key, again, entries)
        if reason.is_recapture:
            self._new.clear()
        else:
            self._new.append(key if name is None else name)
        return self._thrash(pool_bytes) or self._churn()

    def forget(self) -> None:
        """Begins anew: after the limits, or the set of keys, changed."""
        self._recent.clear()
        self._new.clear()
        self._told.clear()

    def _window(self, entries: int) -> int:
        return max(LEAST_WINDOW, 4 * entries)

    def _add(self, key: Hashable, again: bool, entries: int) -> None:
        recent, window = self._recent, self._window(entries)
        recent.append((key, again))
        while len(recent) > window:
            recent.popleft()

    def _thrash(self, pool_bytes: int) -> Thrash | None:
        recaptures = sum(again for _, again in self._recent)
        lookups = len(self._recent)
        if Thrash in self._told or recaptures < max(RECAPTURES, LEAST_SHARE * lookups):
            return None
        self._told.add(Thrash)
        keys = {key for key, _ in self._recent}
        size = sum(self._sizes.get(key, 0) for key in keys) + pool_bytes
        return Thrash(recaptures, lookups, len(keys), size)

    def _churn(self) -> Churn | None:
        if Churn in self._told or len(self._new) < NEW_KEYS:
            return None
        self._told.add(Churn)
        return Churn(len(self._new), what_varies(self._new))


def what_varies(keys: Sequence[Hashable]) -> str:
    """Where ``keys`` differ, with examples: "key[1] is 7, 8, 9, 10, ..."."""
    tuples = [key for key in keys if isinstance(key, tuple)]
    if len(tuples) < len(keys) or len({len(key) for key in tuples}) != 1:
        return f"the keys are {_listed(keys)}"
    columns = list(zip(*tuples, strict=True))
    differing = [
        f"key[{index}] is {_listed(column)}"
        for index, column in enumerate(columns)
        if len(set(column)) > 1
    ]
    return "; ".join(differing)


def _listed(values: Sequence[Hashable]) -> str:
    more = ", ..." if len(values) > _EXAMPLES else ""
    return ", ".join(map(repr, values[:_EXAMPLES])) + more
