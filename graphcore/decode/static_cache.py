"""StaticKVCache: K and V of every layer at fixed addresses, written at a device position.

It is a ``transformers.Cache``: any decoder-only model takes it. A replay of a captured step runs no
Python, so everything that moves (the position) is on the device, and attention reads the whole
buffer under a mask. Contents stay where they are for the life of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from graphcore.advice import advises
from graphcore.decode import cache_sources
from graphcore.decode import transformers_compat as compat
from graphcore.decode.access import Form
from graphcore.decode.cache_layer import BorrowingLayer, Pair, StaticLayer
from graphcore.decode.cache_state import CacheState, CacheWatcher, refuse_inside_capture
from graphcore.decode.cache_view import view_of
from graphcore.decode.padding import Padding
from graphcore.decode.scratch import scratches
from graphcore.decode.sizes import (
    LayerShapes,
    PerLayer,
    Windows,
    check_dtype,
    check_position,
    check_positives,
    checked_device,
    checked_owners,
    checked_windows,
    layer_shapes,
    need_of_cache,
    per_layer,
)
from graphcore.decode.sliding_layer import SlidingLayer
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.resources.exhaustion import telling_need


@advises
class StaticKVCache(compat.Cache):  # type: ignore[misc]  # transformers is untyped
    """Fixed buffers ``[batch, kv_heads, max_seq_len, head_dim]`` for K and V of every layer.

    A layer with a window below ``max_seq_len`` has that many slots, used in turn. The position
    advances once per step, at the last layer that owns K/V. Not locked.

    Args:
        num_layers: Layers of the model.
        batch_size: Rows.
        num_kv_heads: Heads of K and V; one number, or one per layer.
        max_seq_len: Capacity in tokens.
        head_dim: Width of a K (and V) head; one number, or one per layer.
        dtype: Of the buffers, any floating dtype. Where it differs from the model's, K and V are
            cast on write and read back through one converted scratch pair.
        device: Where the buffers live, as torch writes it.
        v_head_dim: Width of a V head where it differs from K's; one number, or one per layer.
        windows: Tokens that a layer attends to, the newest one counted; None: all. One for all
            layers, or one for each.
        owning_layers: Indices of the layers that store K/V (models that share K/V between layers);
            None: all, or what a model's config says, with :meth:`for_model`.
        compute_dtype: The model's dtype where it differs: makes the scratch pair now. Otherwise it
            is made by :meth:`bind_model` or the first eager step.

    Raises:
        ConfigurationError: A size that is not a positive int, a list of the wrong length, a dtype
            that is not floating, a device that is not there; names field, expected and actual.
        CaptureError: A graph is being captured or a region compiled.
        torch.OutOfMemoryError: torch's own, with a note of what the cache takes in all.
    """

    def __init__(  # noqa: PLR0913  (the sizes of a cache, as published)
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: PerLayer,
        max_seq_len: int,
        head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device | str | int,
        *,
        v_head_dim: PerLayer | None = None,
        windows: Windows = None,
        owning_layers: Sequence[int] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_inside_capture("StaticKVCache")
        check_positives(num_layers=num_layers, batch_size=batch_size, max_seq_len=max_seq_len)
        check_dtype("dtype", dtype)
        owners = checked_owners(owning_layers, num_layers)
        self.windows = checked_windows(windows, num_layers, max_seq_len)
        shapes = layer_shapes(
            batch_size,
            per_layer("num_kv_heads", num_kv_heads, num_layers),
            [window or max_seq_len for window in self.windows],
            per_layer("head_dim", head_dim, num_layers),
            None if v_head_dim is None else per_layer("v_head_dim", v_head_dim, num_layers),
        )
        self.num_layers = num_layers
        self.max_seq_len = max_seq_len
        self.owning_layers = owners
        self.dtype = dtype
        self.device = checked_device(device)
        self._batch = batch_size
        self._state = CacheState(max_seq_len, self.device, owners[-1])
        self.padding = Padding(batch_size, max_seq_len, self.device)
        self._scratches = scratches(shapes, owners)
        if compute_dtype is not None:
            check_dtype("compute_dtype", compute_dtype)
        with telling_need(lambda: need_of_cache(shapes, owners, dtype)):
            layers = [self._layer(index, shapes[index]) for index in range(num_layers)]
            self._owners = tuple(layer for layer in layers if isinstance(layer, StaticLayer))
            super().__init__(layers=layers)
            if compute_dtype is not None:
                self._make_scratch(compute_dtype)

    # ---- making one -----------------------------------------------------------------------------

    @classmethod
    def for_model(
        cls,
        model: Any,
        max_seq_len: int | None = None,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> StaticKVCache:
        """A cache with the model's layers, heads, dtype and device.

        ``max_seq_len`` None takes ``max_position_embeddings`` of the model's config. Layers with a
        sliding window keep that many tokens.
        """
        return cache_sources.for_model(cls, model, max_seq_len, batch_size, dtype)

    @classmethod
    def from_transformers(
        cls, cache: Any, model: Any, max_seq_len: int | None = None
    ) -> StaticKVCache:
        """A cache with the size and the contents of a transformers ``StaticCache``.

        ``max_seq_len`` None takes the cache's own; where all its layers slide, it does not know it.

        Raises:
            CacheTypeError: ``cache`` is not one, or has layers that are not attention.
            ConfigurationError: A window that is not the model's; no ``max_seq_len`` where needed.
        """
        return cache_sources.from_transformers(cls, cache, model, max_seq_len)

    def bind_model(self, model: Any) -> None:
        """Takes from ``model`` what construction could not know: owners and the scratch's dtype."""
        self._state.last_owner = compat.owning_layers(compat.text_config(model))[-1]
        self._make_scratch(model.dtype)

    def _layer(self, index: int, shapes: LayerShapes) -> StaticLayer | BorrowingLayer:
        if index not in self.owning_layers:
            return BorrowingLayer(index, self._state, self._batch)
        kind = StaticLayer if self.windows[index] is None else SlidingLayer
        return kind(index, self._state, self._scratches[index], shapes, self.dtype)

    def _make_scratch(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            for index in self.owning_layers:
                self._scratches[index].make(dtype, self.device)

    def view(
        self, *, batch_size: int | None = None, max_seq_len: int | None = None
    ) -> StaticKVCache:
        """The first rows and slots as a cache of that size; it shares storage and position.

        None is all of them. What either holds the other holds too, as far as it reaches, so graphs
        for several sizes need the memory of the largest alone. See :class:`DecodeBuckets`.

        Raises:
            ConfigurationError: More than there are, or none.
        """
        rows = self.batch_size if batch_size is None else batch_size
        return view_of(self, rows, self.max_seq_len if max_seq_len is None else max_seq_len)

    # ---- what it holds --------------------------------------------------------------------------

    @property
    def position(self) -> torch.Tensor:
        """0-d int64 on the device: the slot that the next token takes; advanced in place."""
        return self._state.position

    @position.setter
    def position(self, tensor: torch.Tensor) -> None:
        self._state.position = tensor

    @property
    def seen_tokens(self) -> int:
        """Tokens held, from the host mirror (moved by eager steps and replays, not by capture)."""
        return self._state.known_seen()

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._batch

    @property
    def is_captured(self) -> bool:
        """Whether a graph depends on the buffers."""
        return self._state.is_captured

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V buffers."""
        return sum(layer._keys.nbytes + layer._values.nbytes for layer in self._owners)

    def named_tensors(self, *, padded: bool | None = None) -> dict[str, torch.Tensor]:
        """Every buffer by the name reports use: "layer 4 keys", "cache position", the scratch.

        ``padded``: with what says where pads are; None: once a padded prompt was held.
        """
        names: dict[str, torch.Tensor] = {}
        for layer in self._owners:
            names.update(layer.named_tensors())
        names[self._state.name] = self.position
        if self.padding.was_used if padded is None else padded:
            names.update(self.padding.named_tensors())
        for index in self.owning_layers:
            names.update(self._scratches[index].named())
        return names

    def check_buffers(self) -> None:
        """Raises ConfigurationError where a buffer was replaced by one of another kind."""
        for layer in self._owners:
            layer.check_buffers()
        self._state.check_position(self.position)

    # ---- a step ---------------------------------------------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        prefix: bool = False,
        **kwargs: Any,
    ) -> Pair:
        """Writes K and V ``[batch, heads, tokens, dim]`` of one layer at the device position.

        Args:
            key_states: K.
            value_states: V, of the same length.
            layer_idx: The layer.
            args: Ignored (transformers passes what other caches need).
            prefix: Eager only: return views of the filled slots instead of the full buffers;
                refused where a window overwrote some.
            kwargs: Ignored.

        Returns:
            The full buffers, in the dtype of ``key_states``; of a layer with a window what
            attention needs, see :class:`SlidingLayer`.

        Raises:
            ConfigurationError: A wrong layer, shape or dtype; nothing was written.
            CapacityError: The tokens do not fit; nothing was written.
            CaptureError: ``prefix`` inside a capture, where its length would be baked in.
        """
        if not 0 <= layer_idx < self.num_layers:
            raise ConfigurationError(
                f"layer_idx: expected 0 to {self.num_layers - 1}, got {layer_idx}"
            )
        layer = self.layers[layer_idx]
        if prefix:
            refuse_inside_capture("update(prefix=True)")
            end = self.seen_tokens + key_states.shape[2]
            if isinstance(layer, SlidingLayer):
                layer.refuse_overwritten(end)
            self._state.begin_access(key_states.shape[2], form=Form.SLOTS)
        keys, values = layer.update(key_states, value_states)
        return (keys[:, :, :end], values[:, :, :end]) if prefix else (keys, values)

    def prefix(self, layer_idx: int) -> Pair:
        """Views of a layer's filled slots, in the cache's dtype; same address for every length."""
        refuse_inside_capture("prefix()")
        layer: StaticLayer = self.layers[layer_idx]
        return layer.prefix(self.seen_tokens)

    def reset(self) -> None:
        """Empties the cache in place: K and V to zero, position 0. Graphs stay valid."""
        refuse_inside_capture("reset()")
        for layer in self._owners:
            layer.reset()
        self.padding.clear_from(0)
        self._state.seek(0)
        self._state.emptied("the cache was reset")

    def rewind(self, position: int) -> None:
        """Drops the tokens from ``position`` on, in place: their slots to zero.

        Raises:
            LifecycleError: A window has overwritten what the token at ``position`` would see;
                nothing was changed. 0 always works.
        """
        refuse_inside_capture("rewind()")
        check_position(position, self.max_seq_len)
        reached = max(self._state.reached, self.seen_tokens)
        for layer in self._owners:
            layer.check_rewind(position, reached)
        for layer in self._owners:
            layer.clear_from(position, reached)
        self.padding.clear_from(position)
        self._state.seek(position, reached)
        self._state.emptied(f"the cache was rewound to {position} tokens")

    def seek(self, position: int) -> None:
        """Sets device position and mirror, leaving the slots as they are.

        Raises:
            ConfigurationError: Not 0 to ``max_seq_len``: a step would write outside of the buffers.
        """
        check_position(position, self.max_seq_len)
        self._state.seek(position)

    def saved_slot(self, index: int) -> list[Pair]:
        """Copies of one slot of every layer, for :meth:`restore_slot`."""
        return [layer.slot(index) for layer in self._owners]

    def restore_slot(self, index: int, saved: list[Pair]) -> None:
        """Puts back what :meth:`saved_slot` copied."""
        for layer, pair in zip(self._owners, saved, strict=True):
            layer.put_slot(index, pair)

    # ---- what transformers asks for -------------------------------------------------------------

    def early_initialization(
        self,
        batch_size: int,
        num_heads: PerLayer,
        head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Nothing, where the arguments are those of the construction.

        Raises:
            ConfigurationError: They differ; names layer, expected and actual.
            CaptureError: A graph is being captured.
        """
        refuse_inside_capture("early_initialization()")
        heads = per_layer("num_heads", num_heads, self.num_layers)
        dims = per_layer("head_dim", head_dim, self.num_layers)
        on = torch.empty(0, device=device).device
        for layer in self._owners:
            layer.check_sizes((batch_size, heads[layer.index], dims[layer.index], dtype, on))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the rows in place; refused once a graph depends on the cache."""
        self._refuse_captured("reorder_cache", "beam search reorders rows, no replay follows that")
        for layer in self._owners:
            layer.reorder_cache(beam_idx)
        self.padding.reorder(beam_idx)
        self._state.emptied("the rows of the cache were reordered")

    def crop(self, tokens_to_remove: int) -> None:
        """As :meth:`rewind` by ``-tokens_to_remove`` tokens; refused once a graph depends on it."""
        self._refuse_captured("crop", "the captured step continues from its own position")
        if tokens_to_remove > 0 or self.seen_tokens + tokens_to_remove < 0:
            raise ConfigurationError(
                f"tokens_to_remove: expected {-self.seen_tokens} to 0, got {tokens_to_remove}"
            )
        # transformers counts some of them in a tensor
        self.rewind(self.seen_tokens + int(tokens_to_remove))

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: the number of rows is fixed."""
        self._refuse_rows("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refused: the number of rows is fixed."""
        self._refuse_rows("batch_select_indices")

    # ---- graphs that depend on it ---------------------------------------------------------------

    def watch(self, watcher: CacheWatcher) -> None:
        """Tells ``watcher`` (held weakly) when a buffer is rebound or the contents are dropped."""
        self._state.watch(watcher)

    def taken_over(self, watcher: CacheWatcher) -> None:
        """Tells the other watchers that ``watcher`` fills the cache from now on."""
        self._state.emptied("another runner has used the cache", by=watcher)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """Forgets ``watcher``."""
        self._state.unwatch(watcher)

    def _refuse_captured(self, action: str, why: str) -> None:
        if self.is_captured:
            raise LifecycleError(f"{action}: refused, a captured graph uses this cache: {why}")

    def _refuse_rows(self, action: str) -> NoReturn:
        raise ConfigurationError(
            f"{action}: batch_size is fixed at {self.batch_size}; make a cache for the other batch"
        )

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({self.num_layers} layers, batch {self.batch_size}, "
            f"max_seq_len {self.max_seq_len}, {self.dtype}, {self.device})"
        )
