"""The cross half of an encoder-decoder cache: K and V of the encoder, written once per generation.

The first forward of a generation writes them from slot 0; every later step only reads them, as
``cache.layers[i].keys``, without an update. They are read either up to the encoder's length, a view
whose length a graph bakes in, or as whole buffers under a mask, which fits every length.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcore.decode.cache_layer import Pair, StaticLayer, bytes_of, of_one_dtype
from graphcore.decode.cache_state import CacheState, CacheWatcher, is_capturing
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.surroundings import autocast_dtype
from graphcore.driver import active
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, LifecycleError


class CrossState(CacheState):
    """Length of the encoder's K/V; who watches, and who writes, is what the self half says.

    Attributes:
        whole: Whether the layers show their whole buffers, not only the encoder's length.
        permit: A capture that keeps it may write the cross half: it is that of a first step.
        contents: Counts what was written or dropped outside of compiled regions: equal counts mean
            the same encoder prompt.
    """

    name = "cross length"

    def __init__(self, of: CacheState, decoder: CacheState) -> None:
        self.__dict__.update(vars(of))  # the same length tensor, whose address stays
        self._decoder = decoder
        self.whole = False
        self.permit = object()
        self.contents = 0

    @property
    def is_captured(self) -> bool:
        """Whether a graph depends on the buffers."""
        return self._decoder.is_captured

    def watch(self, watcher: CacheWatcher) -> None:
        """Tells ``watcher`` (held weakly) of every change from now on."""
        self._decoder.watch(watcher)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """Forgets ``watcher``."""
        self._decoder.unwatch(watcher)

    def changed(self, name: str, how: str) -> None:
        """Tells the watchers that a buffer is not the captured one any more."""
        self._decoder.changed(name, how)

    def emptied(self, reason: str, *, by: CacheWatcher | None = None) -> None:
        """Tells the watchers, except ``by``, that the contents are not what they left."""
        self.contents += 1
        self._decoder.emptied(f"the cross half: {reason}", by=by)

    def is_permitted(self) -> bool:
        """Whether the capture under way is that of a first step, which writes at each replay."""
        capture = active.current()
        return capture is not None and any(each is self.permit for each, _ in capture.owners)

    def hold(self, length: int) -> None:
        """Says that the encoder's ``length`` tokens are written in every layer."""
        self._position.fill_(length)
        self.seen = length
        if torch.compiler.is_compiling():
            return  # a count would be a guard: one compilation for every generation
        self.contents += 1
        if self._decoder.is_written_by_others:
            self.emptied("an encoder prompt was written to it by somebody else")


class CrossLayer(StaticLayer):
    """Cross K ``[batch, heads, encoder capacity, head_dim]`` and V of one decoder layer."""

    _state: CrossState

    def __init__(self, of: StaticLayer, state: CrossState) -> None:
        self.__dict__.update(vars(of))  # the same buffers
        self.name = f"layer {of.index} cross"
        self._state = state
        self._length = state.known_seen()

    @property
    def keys(self) -> torch.Tensor:
        """K of the encoder: up to its length, or all slots."""
        return self._shown(self._keys)

    @keys.setter
    def keys(self, tensor: torch.Tensor) -> None:
        self._keys = self._rebound("keys", self._keys, tensor)

    @property
    def values(self) -> torch.Tensor:
        """V of the encoder: up to its length, or all slots."""
        return self._shown(self._values)

    @values.setter
    def values(self, tensor: torch.Tensor) -> None:
        self._values = self._rebound("values", self._values, tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Writes the encoder's K and V ``[batch, heads, encoder tokens, dim]`` from slot 0.

        Returns:
            What :attr:`keys` and :attr:`values` show then.

        Raises:
            ConfigurationError: A wrong shape, or another dtype: later steps read without a cast.
            CapacityError: More tokens than slots.
            CaptureError: In a capture, where every replay would project and write them again;
                but for that of a first step.
        """
        length = self._checked_length(key_states, value_states)
        key_states, value_states = self._of_our_dtype(key_states, value_states)
        if key_states.dtype != self.dtype:
            raise ConfigurationError(
                f"{self.name}: expected K and V of {self.dtype}, got {key_states.dtype}: later "
                "steps read the cross half as it is; make it in the model's dtype"
            )
        if length > self.max_cache_len:
            raise CapacityError(
                f"{self.name}: expected at most {self.max_cache_len} encoder tokens (its "
                f"capacity), got {length}. Nothing was written"
            )
        is_captured = not torch.compiler.is_compiling() and is_capturing()
        if is_captured and not self._state.is_permitted():
            raise CaptureError(
                f"{self.name}: its K/V are not written yet, and a capture would project and write "
                "them at every replay; forward the prompt once before the capture"
            )
        _fill(self._keys, key_states, length)
        _fill(self._values, value_states, length)
        self._length = length
        # a length that is captured would be that of every later prompt
        if self.index == self._state.last_owner and not is_captured:
            self._state.hold(length)
        return self.keys, self.values

    def _of_our_dtype(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """What autocast made narrower in the half's dtype, which changes no value."""
        keys, values = of_one_dtype(keys, values)
        narrow = torch.promote_types(keys.dtype, self.dtype) == self.dtype
        if autocast_dtype(self.device) is None or not narrow:
            return keys, values
        return keys.to(self.dtype), values.to(self.dtype)

    def get_seq_length(self) -> int:
        """Encoder tokens held; a host number, since it does not move while a graph is replayed."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots that attention reads, first slot)."""
        return self.keys.shape[2], 0

    def reset(self) -> None:
        """Zeroes K and V in place: the next generation writes them again."""
        super().reset()
        self._length = 0

    def clear_from(self, start: int, reached: int) -> None:
        """Zeroes the slots from ``start`` on."""
        super().clear_from(start, reached)
        self._length = min(self._length, start)

    def _shown(self, buffer: torch.Tensor) -> torch.Tensor:
        if self._state.whole or not self._length:
            return buffer
        return buffer[:, :, : self._length]


def turn_into_cross(cache: StaticKVCache, decoder: CacheState) -> None:
    """Makes ``cache`` the cross half of the cache whose self half has the state ``decoder``.

    Buffers, length tensor and contents stay; only how they are written and read changes.

    Raises:
        ConfigurationError: A layer without K/V of its own, or with a sliding window.
        LifecycleError: A captured graph uses the cache as it is.
    """
    if len(cache._owners) != cache.num_layers:
        raise ConfigurationError(
            f"cross_cache owning_layers: expected every layer, got {cache.owning_layers}"
        )
    if any(cache.is_sliding):
        raise ConfigurationError(
            "cross_cache: expected no sliding window: every step reads the whole encoder"
        )
    if cache.is_captured:
        raise LifecycleError("cross_cache: expected one that no captured graph uses")
    state = CrossState(cache._state, decoder)
    layers = tuple(CrossLayer(layer, state) for layer in cache._owners)
    cache._state = state
    cache._owners = layers
    cache.layers = list(layers)


def _fill(buffer: torch.Tensor, states: torch.Tensor, length: int) -> None:
    """Writes from slot 0 and zeroes the rest: a NaN left behind the mask would make NaN logits."""
    target, source = bytes_of(buffer), bytes_of(states.detach())
    target[:, :, :length].copy_(source)
    target[:, :, length:].zero_()
