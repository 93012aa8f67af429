"""Taking back what a failed prompt has written to a cache."""

from __future__ import annotations

from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import LifecycleError


def taken_back(cache: StaticKVCache, start: int, error: BaseException) -> None:
    """Empties the slots from ``start`` on again; a second failure becomes a note on the first."""
    try:
        try:
            cache.rewind(start)
        except LifecycleError as overwritten:
            error.add_note(f"the cache was emptied: {overwritten}")
            cache.reset()
    except Exception as second:
        error.add_note(f"while emptying the cache again: {second}")
