"""A view of a static cache: its first rows and slots as a cache of that size, in the same storage.

Position, mirror and watchers are those of the whole cache, so what one of them holds the others
hold, as far as their rows and slots reach: a generation that fills a short view goes on in a longer
one without a copy. A window that is no shorter than the view needs no ring there, but token t lies
in slot t all the same. Strides are the whole cache's; the addresses of all views are equal.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from graphcore.decode.cache_layer import StaticLayer
from graphcore.decode.cache_state import CacheState, refuse_inside_capture
from graphcore.decode.sizes import checked_windows
from graphcore.errors import ConfigurationError

if TYPE_CHECKING:
    from graphcore.decode.static_cache import StaticKVCache


class ViewState(CacheState):
    """The state of another cache under a capacity of its own."""

    _own = frozenset({"capacity", "_base"})

    def __init__(self, base: CacheState, capacity: int) -> None:
        self._base = base
        self.capacity = capacity

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # before there is a base: a copy under way
            raise AttributeError(name)
        return getattr(self._base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._base, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_base": self._base, "capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def view_of(cache: StaticKVCache, batch_size: int, max_seq_len: int) -> StaticKVCache:
    """The first ``batch_size`` rows and ``max_seq_len`` slots of ``cache``, as a cache.

    Raises:
        ConfigurationError: More rows or slots than there are, or none.
        CaptureError: A graph is being captured.
    """
    refuse_inside_capture("view()")
    for field, wanted in (("batch_size", batch_size), ("max_seq_len", max_seq_len)):
        most = getattr(cache, field)
        if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= most:
            raise ConfigurationError(f"{field}: expected 1 to {most} (the cache's), got {wanted!r}")
    state = ViewState(cache._state, max_seq_len)
    view = copy.copy(cache)
    view._state = state
    view.padding = cache.padding.view(batch_size, max_seq_len)
    view._batch = batch_size
    view.max_seq_len = max_seq_len
    view.windows = checked_windows(cache.windows, cache.num_layers, max_seq_len)
    view.layers = [layer.view(state, batch_size) for layer in cache.layers]
    view._owners = tuple(layer for layer in view.layers if isinstance(layer, StaticLayer))
    return view
