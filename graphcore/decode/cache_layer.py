"""One layer of a static cache: its K and V buffers, and the write at the device position.

The buffers never move: assigning others marks every captured graph stale. A layer that owns no K/V
(models that share K/V between layers) is a :class:`BorrowingLayer`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from graphcore.decode.cache_state import CacheState, is_capturing, static_zeros
from graphcore.decode.scratch import Scratch
from graphcore.decode.surroundings import autocast_dtype
from graphcore.decode.transformers_compat import CacheLayerMixin
from graphcore.errors import ConfigurationError, LifecycleError

Pair = tuple[torch.Tensor, torch.Tensor]


class StaticLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """K ``[batch, heads, capacity, head_dim]`` and V ``[batch, heads, capacity, v_head_dim]``."""

    is_compileable = True
    is_sliding = False
    supports_early_init = True

    def __init__(
        self,
        index: int,
        state: CacheState,
        scratch: Scratch,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        device = state.position.device
        self.index = index
        self.name = f"layer {index}"
        self.is_initialized = True
        self.device = device
        self.dtype = dtype
        self.batch_size, self.num_heads, self.max_cache_len, self.k_head_dim = shapes[0]
        self.v_head_dim = shapes[1][3]
        self._state = state
        self._scratch = scratch
        self._shapes = {"keys": shapes[0], "values": shapes[1]}
        self._keys = static_zeros(shapes[0], dtype, device)
        self._values = static_zeros(shapes[1], dtype, device)

    @property
    def keys(self) -> torch.Tensor:
        """The K buffer, all slots."""
        return self._keys

    @keys.setter
    def keys(self, tensor: torch.Tensor) -> None:
        self._keys = self._rebound("keys", self._keys, tensor)

    @property
    def values(self) -> torch.Tensor:
        """The V buffer, all slots."""
        return self._values

    @values.setter
    def values(self, tensor: torch.Tensor) -> None:
        self._values = self._rebound("values", self._values, tensor)

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` works: not once a graph depends on the cache."""
        return not self._state.is_captured

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the buffers were made at construction."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Writes K and V ``[batch, heads, tokens, dim]`` at the position, returns full buffers.

        The buffers come in the dtype of ``key_states``: where the cache's differs, converted into
        the scratch pair, which the next layer overwrites.

        Raises:
            ConfigurationError: A wrong shape or dtype (under autocast K and V may differ: both are
                taken in the wider one); nothing was written.
            CapacityError: The tokens do not fit; nothing was written.
        """
        length = self._checked_length(key_states, value_states)
        key_states, value_states = of_one_dtype(key_states, value_states)
        if not (torch.compiler.is_compiling() or is_capturing()):
            self._state.check_room(length)
        if key_states.dtype != self.dtype:  # before anything is written: it may be refused
            self._scratch.make(key_states.dtype, self.device)
        answer = self._append(key_states, value_states, length)
        if self.index == self._state.last_owner:
            self._state.advance(length)
        return answer

    def _append(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> Pair:
        """Writes checked K and V, and gives what attention reads."""
        slots = self._state.slots(length)
        write_slots(self._keys, slots, keys)
        write_slots(self._values, slots, values)
        return self._converted(keys.dtype)

    def _converted(self, dtype: torch.dtype) -> Pair:
        """The whole buffers in ``dtype``: themselves, or the scratch pair."""
        if dtype == self.dtype:
            return self._keys, self._values
        keys, values = self._scratch.views(dtype, self._keys, self._values)
        keys.copy_(self._keys)
        values.copy_(self._values)
        return keys, values

    def view(self, state: CacheState, batch_size: int) -> StaticLayer:
        """The first rows, and slots up to the capacity of ``state``, in the same storage."""
        twin = copy.copy(self)
        twin._state = state
        twin.batch_size = batch_size
        twin.max_cache_len = min(self.max_cache_len, state.capacity)
        twin._keys = self._keys[:batch_size, :, : twin.max_cache_len]
        twin._values = self._values[:batch_size, :, : twin.max_cache_len]
        twin._shapes = {"keys": tuple(twin._keys.shape), "values": tuple(twin._values.shape)}
        for buffer in (twin._keys, twin._values):
            torch._dynamo.mark_static_address(buffer)
        return twin

    def prefix(self, end: int) -> Pair:
        """Views of the first ``end`` slots: same address and strides for every ``end``."""
        return self._keys[:, :, :end, :], self._values[:, :, :end, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:
        """(slots that attention reads, first slot): always the whole buffer."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens held; the device position where a graph or a compiled region is being made.

        There a host number would be baked in, and every replay would see the same length. It is a
        copy: the position itself moves when the step's last layer is written.
        """
        if torch.compiler.is_compiling() or is_capturing():
            return self._state.position.clone()
        return self._state.known_seen()

    def get_max_length(self) -> int:
        """Slots of the buffers."""
        return self.max_cache_len

    def reset(self) -> None:
        """Zeroes K and V in place: a NaN left in a masked slot would make NaN logits."""
        bytes_of(self._keys).zero_()
        bytes_of(self._values).zero_()

    def check_rewind(self, position: int, reached: int) -> None:
        """Nothing: every token is held."""

    def clear_from(self, start: int, reached: int) -> None:
        """Zeroes the slots of the tokens from ``start`` on."""
        bytes_of(self._keys)[:, :, start:].zero_()
        bytes_of(self._values)[:, :, start:].zero_()

    def slot(self, index: int) -> Pair:
        """Copies of one slot's K and V."""
        keys, values = bytes_of(self._keys), bytes_of(self._values)
        return keys[:, :, index].clone(), values[:, :, index].clone()

    def put_slot(self, index: int, pair: Pair) -> None:
        """Puts back what :meth:`slot` copied."""
        bytes_of(self._keys)[:, :, index].copy_(pair[0])
        bytes_of(self._values)[:, :, index].copy_(pair[1])

    def put_tokens(self, pair: Pair, first: int) -> None:
        """Writes ``pair``, the K and V of the tokens from ``first`` on; the last ones that fit."""
        count = min(pair[0].shape[2], self.max_cache_len)
        end = first + pair[0].shape[2]
        at = torch.arange(end - count, end, device=self.device).remainder(self.max_cache_len)
        for buffer, states in zip((self._keys, self._values), pair, strict=True):
            write_slots(buffer, at, states[:, :, -count:])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the rows in place. Use :meth:`StaticKVCache.reorder_cache`, which checks."""
        for buffer in (bytes_of(self._keys), bytes_of(self._values)):
            buffer.copy_(buffer.index_select(0, beam_idx.to(self.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: the position is one for all layers; use :meth:`StaticKVCache.crop`."""
        raise LifecycleError(f"{self.name}: crop the cache, not one layer of it")

    def __repr__(self) -> str:
        return f"StaticLayer({self.index}, keys={tuple(self._keys.shape)}, {self.dtype})"

    def _checked_length(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        expected_keys = (self.batch_size, self.num_heads, self.k_head_dim)
        expected_values = (self.batch_size, self.num_heads, self.v_head_dim)
        for name, tensor, expected in (
            ("keys", keys, expected_keys),
            ("values", values, expected_values),
        ):
            if tensor.dim() != 4 or (*tensor.shape[:2], tensor.shape[3]) != expected:
                raise ConfigurationError(
                    f"{self.name} {name}: expected [batch {expected[0]}, heads "
                    f"{expected[1]}, tokens, head_dim {expected[2]}], got {list(tensor.shape)}"
                )
        if keys.shape[2] != values.shape[2] or keys.shape[2] == 0:
            raise ConfigurationError(
                f"{self.name}: expected K and V of the same length, at least 1, got "
                f"{keys.shape[2]} and {values.shape[2]}"
            )
        are_floats = keys.is_floating_point() and values.is_floating_point()
        # autocast leaves K, which rotary positions made wider, and casts V
        mixes = autocast_dtype(keys.device) is not None
        if not are_floats or (keys.dtype != values.dtype and not mixes):
            raise ConfigurationError(
                f"{self.name}: expected K and V of one floating dtype, got {keys.dtype} and "
                f"{values.dtype}"
            )
        return int(keys.shape[2])

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The whole buffers by the name reports use: "layer 4 keys", "layer 4 values"."""
        return {f"{self.name} keys": self._keys, f"{self.name} values": self._values}

    def check_sizes(self, asked: tuple[int, int, int, torch.dtype, torch.device]) -> None:
        """Raises ConfigurationError unless (batch, heads, head_dim, dtype, device) are ours."""
        held = (self.batch_size, self.num_heads, self.k_head_dim, self.dtype, self.device)
        if held != asked:
            raise ConfigurationError(
                f"{self.name}: initialised with (batch, heads, head_dim, dtype, device) {held}, "
                f"asked for {asked}; buffers never change for life"
            )

    def check_buffers(self) -> None:
        """Raises ConfigurationError where a buffer is not of the kind that was constructed."""
        self._check_buffer("keys", self._keys)
        self._check_buffer("values", self._values)

    def _check_buffer(self, field: str, new: torch.Tensor) -> None:
        shape = self._shapes[field]
        if (new.dtype, tuple(new.shape), new.device) != (self.dtype, shape, self.device):
            raise ConfigurationError(
                f"{self.name} {field}: expected {self.dtype} {list(shape)} on "
                f"{self.device}, as constructed, got {new.dtype} {list(new.shape)} on {new.device}"
            )

    def _rebound(self, field: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if new is old:
            return new
        if not self._state.is_captured:
            self._check_buffer(field, new)
        self._state.changed(
            f"{self.name} {field}",
            f"bound to another tensor ({new.dtype} {list(new.shape)})",
        )
        return new


class BorrowingLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer without K/V of its own: it attends to another layer's."""

    is_compileable = True
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, index: int, state: CacheState, batch_size: int) -> None:
        super().__init__()
        self.index = index
        self.is_initialized = True
        self.batch_size = batch_size
        self._state = state

    def view(self, state: CacheState, batch_size: int) -> BorrowingLayer:
        """The same for ``batch_size`` rows and the capacity of ``state``."""
        return BorrowingLayer(self.index, state, batch_size)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: there are no buffers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Refused: the layer owns no K/V."""
        raise ConfigurationError(
            f"layer {self.index}: expected no update, it owns no K/V (owning_layers leaves it out)"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As the layers that own K/V."""
        return self._state.capacity, 0

    def get_seq_length(self) -> int:
        """As the layers that own K/V, on the host."""
        return self._state.known_seen()

    def get_max_length(self) -> int:
        """As the layers that own K/V."""
        return self._state.capacity

    def reset(self) -> None:
        """Nothing: there are no buffers."""


def of_one_dtype(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    """K and V in the wider of their two dtypes, which changes no value."""
    if keys.dtype == values.dtype:
        return keys, values
    dtype = torch.promote_types(keys.dtype, values.dtype)
    return keys.to(dtype), values.to(dtype)


def write_slots(buffer: torch.Tensor, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Writes ``states`` to ``slots`` of dimension 2; the position comes from the device."""
    if states.requires_grad:
        states = states.detach()
    bytes_of(buffer).index_copy_(2, slots, bytes_of(states.to(buffer.dtype)))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A one-byte float as uint8: indexing and filling are not offered for fp8 everywhere."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
