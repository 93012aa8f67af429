"""EncoderDecoderKVCache: a static self half and a static cross half as one transformers cache.

T5, BART and Whisper test for ``transformers.EncoderDecoderCache``, which this is: with a look-alike
they write cross K/V into the self half. Both halves are made before anything is captured; their
addresses never change. The cross half is written once per generation, which ``is_updated`` says by
layer; a graph that only reads it must not be replayed before, and is not.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from graphcore.advice import advises
from graphcore.decode import transformers_compat as compat
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.cache_layer import Pair
from graphcore.decode.cache_shell import CacheShell
from graphcore.decode.cache_state import CacheState, CacheWatcher, refuse_inside_capture
from graphcore.decode.cross_cache import CrossState, turn_into_cross
from graphcore.decode.sizes import PerLayer
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError


@advises
class EncoderDecoderKVCache(compat.EncoderDecoderCache):  # type: ignore[misc]  # untyped
    """Decoder K/V that grow by a token per step, and encoder K/V that are written once.

    What a runner asks of a cache (position, capacity, rows) is the self half's. Not locked.

    Args:
        self_cache: K/V of the decoder.
        cross_cache: K/V of the encoder; its ``max_seq_len`` is the longest encoder. It may differ
            in heads, head sizes and capacity, and from now on is written from slot 0 and read up to
            what was written. It is in the model's dtype: models read it without a cast.

    Attributes:
        self_attention_cache: The self half.
        cross_attention_cache: The cross half.
        is_updated: Layer to whether its cross K/V are written.

    Raises:
        CacheTypeError: A half that is no :class:`StaticKVCache`.
        ConfigurationError: Halves that do not fit each other.
        LifecycleError: The cross half is used by a captured graph.
        CaptureError: A graph is being captured or a region compiled.
    """

    def __init__(self, self_cache: StaticKVCache, cross_cache: StaticKVCache) -> None:
        refuse_inside_capture("EncoderDecoderKVCache")
        for field, half in (("self_cache", self_cache), ("cross_cache", cross_cache)):
            if not isinstance(half, (StaticKVCache, CacheShell)):
                raise CacheTypeError(
                    f"{field}: expected a graphcore StaticKVCache, got {type(half).__name__}"
                )
        _check_halves(self_cache, cross_cache)
        super().__init__(self_cache, cross_cache)
        self._join()
        for index, layer in enumerate(self.cross_attention_cache.layers):
            self.is_updated[index] = layer.get_seq_length() > 0

    # ---- making one -----------------------------------------------------------------------------

    @classmethod
    def for_model(
        cls,
        model: Any,
        max_seq_len: int | None = None,
        encoder_len: int | None = None,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> EncoderDecoderKVCache:
        """A cache with the layers, heads and head sizes that ``model``'s decoder has.

        Args:
            model: An encoder-decoder transformers model.
            max_seq_len: Decoder tokens; None: as many as the model has positions for.
            encoder_len: Encoder tokens; None: as many as the model has positions for.
            batch_size: Rows.
            dtype: Of the self half; None: the model's. The cross half is in the model's.

        Raises:
            ConfigurationError: A capacity that must be given (T5 has no limit of positions), or a
                decoder whose attention is not recognised.
        """
        own, cross = families.attention_shapes(model)
        capacity = families.checked_capacity("max_seq_len", max_seq_len, model)
        encoder_capacity = families.checked_capacity("encoder_len", encoder_len, model)
        cache = cls(
            _half(own, batch_size, capacity, model.dtype if dtype is None else dtype, model),
            _half(cross, batch_size, encoder_capacity, model.dtype, model),
        )
        cache.bind_model(model)
        return cache

    @classmethod
    def shell(cls, num_layers: int, max_seq_len: int, encoder_len: int) -> EncoderDecoderKVCache:
        """A cache whose shapes are not known yet.

        :meth:`early_initialization` gives them, or, outside of captures and compiled regions, the
        first K/V do (then all layers of a half are alike).
        """
        made: EncoderDecoderKVCache = cls.__new__(cls)
        install = partial(made._install, "self_attention_cache")
        own: Any = CacheShell("self_cache", num_layers, max_seq_len, install)
        install = partial(made._install, "cross_attention_cache")
        cross: Any = CacheShell("cross_cache", num_layers, encoder_len, install)
        cls.__init__(made, own, cross)
        return made

    def early_initialization(
        self,
        batch_size: int,
        num_heads: PerLayer,
        head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        cross_num_heads: PerLayer | None = None,
        cross_head_dim: PerLayer | None = None,
    ) -> None:
        """Makes both halves now, or nothing where they are made with these shapes.

        Args:
            batch_size: Rows.
            num_heads: K/V heads; one number, or one per layer.
            head_dim: Width of a head; one number, or one per layer.
            dtype: Of both halves.
            device: Where they live.
            cross_num_heads: Of the cross half; None: as the self half.
            cross_head_dim: Of the cross half; None: as the self half.

        Raises:
            ConfigurationError: They are made with other shapes; names layer, expected and actual.
            CaptureError: A graph is being captured or a region compiled.
        """
        refuse_inside_capture("early_initialization()")
        own = (batch_size, num_heads, head_dim, dtype, device)
        cross = (
            batch_size,
            num_heads if cross_num_heads is None else cross_num_heads,
            head_dim if cross_head_dim is None else cross_head_dim,
            dtype,
            device,
        )
        halves = ((self.self_attention_cache, own), (self.cross_attention_cache, cross))
        # a half that is there only compares: a conflict is found before the other half is made
        for half, shapes in sorted(halves, key=lambda pair: isinstance(pair[0], CacheShell)):
            half.early_initialization(*shapes)

    def bind_model(self, model: Any) -> None:
        """Takes from ``model`` what construction could not know: the dtype of the scratch."""
        self.decoder_half._make_scratch(model.dtype)

    def _install(self, name: str, half: StaticKVCache) -> None:
        setattr(self, name, half)
        self._join()

    def _join(self) -> None:
        """Once both halves are made, the cross half follows the self half."""
        own, cross = self.self_attention_cache, self.cross_attention_cache
        if isinstance(own, StaticKVCache) and isinstance(cross, StaticKVCache):
            turn_into_cross(cross, own._state)

    # ---- what it holds --------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether both halves are made."""
        return not isinstance(self.self_attention_cache, CacheShell) and not isinstance(
            self.cross_attention_cache, CacheShell
        )

    @property
    def decoder_half(self) -> StaticKVCache:
        """The self half.

        Raises:
            LifecycleError: It is not made yet.
        """
        return _made(self.self_attention_cache)

    @property
    def encoder_half(self) -> StaticKVCache:
        """The cross half.

        Raises:
            LifecycleError: It is not made yet.
        """
        return _made(self.cross_attention_cache)

    @property
    def _state(self) -> CacheState:
        return self.decoder_half._state

    @property
    def encoder_state(self) -> CrossState:
        """Length and contents of the cross half."""
        state = self.encoder_half._state
        assert isinstance(state, CrossState)
        return state

    @property
    def position(self) -> torch.Tensor:
        """0-d int64 on the device: the slot that the next decoder token takes."""
        return self._state.position

    @position.setter
    def position(self, tensor: torch.Tensor) -> None:
        self._state.position = tensor

    @property
    def seen_tokens(self) -> int:
        """Decoder tokens held, from the host mirror."""
        return self._state.known_seen()

    @property
    def encoder_tokens(self) -> int:
        """Encoder tokens whose cross K/V are written in every layer; 0 where some are not."""
        if not self.is_updated or not all(self.is_updated.values()):
            return 0
        return self.encoder_half.seen_tokens

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return int(self.self_attention_cache.num_layers)

    @property
    def max_seq_len(self) -> int:
        """Capacity in decoder tokens."""
        return int(self.self_attention_cache.max_seq_len)

    @property
    def encoder_len(self) -> int:
        """Capacity in encoder tokens."""
        return int(self.cross_attention_cache.max_seq_len)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.decoder_half.batch_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the self half."""
        return self.decoder_half.dtype

    @property
    def device(self) -> torch.device:
        """Where both halves live."""
        return self.decoder_half.device

    @property
    def is_captured(self) -> bool:
        """Whether a graph depends on the buffers."""
        return self._state.is_captured

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V buffers."""
        return self.decoder_half.kv_bytes + self.encoder_half.kv_bytes

    def named_tensors(self, *, padded: bool | None = None) -> dict[str, torch.Tensor]:
        """Every buffer by the name reports use: "layer 4 keys", "layer 4 cross keys", "cross
        length" and so on; ``padded`` as of :meth:`StaticKVCache.named_tensors`.
        """
        cross = self.encoder_half
        names = self.decoder_half.named_tensors(padded=padded)
        for layer in cross._owners:
            names.update(layer.named_tensors())
        names[cross._state.name] = cross.position
        return names

    def check_buffers(self) -> None:
        """Raises ConfigurationError where a buffer was replaced by one of another kind."""
        self.decoder_half.check_buffers()
        self.encoder_half.check_buffers()

    # ---- a generation ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Empties both halves in place and clears the flags. Graphs stay valid."""
        self.self_attention_cache.reset()
        self.forget_encoder()

    def forget_encoder(self) -> None:
        """Empties the cross half in place: the next forward writes it."""
        refuse_inside_capture("reset()")
        self.cross_attention_cache.reset()
        self.unmark_encoder()

    def mark_encoder(self, length: int) -> None:
        """Says that the cross half holds ``length`` tokens: a graph has written them, unasked."""
        for layer in self.encoder_half._owners:
            layer._length = length
        self.encoder_state.hold(length)
        self.is_updated.update(dict.fromkeys(self.is_updated, True))

    def unmark_encoder(self) -> None:
        """Says that the cross half is to be written; what it holds stays."""
        self.is_updated.update(dict.fromkeys(self.is_updated, False))

    def rewind(self, position: int) -> None:
        """Drops the decoder tokens from ``position`` on, in place; the encoder's K/V stay."""
        self.decoder_half.rewind(position)

    def seek(self, position: int) -> None:
        """Sets device position and mirror, leaving the slots as they are."""
        self.decoder_half.seek(position)

    def saved_slot(self, index: int) -> list[Pair]:
        """Copies of one decoder slot of every layer, for :meth:`restore_slot`."""
        return self.decoder_half.saved_slot(index)

    def restore_slot(self, index: int, saved: list[Pair]) -> None:
        """Puts back what :meth:`saved_slot` copied."""
        self.decoder_half.restore_slot(index, saved)

    # ---- what transformers asks for -------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders the rows of both halves in place; refused once a graph depends on the cache."""
        self.decoder_half.reorder_cache(beam_idx)
        self.encoder_half.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last ``-tokens_to_remove`` decoder tokens in place, as StaticKVCache.crop."""
        self.decoder_half.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: the number of rows is fixed."""
        self.decoder_half.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refused: the number of rows is fixed."""
        self.decoder_half.batch_select_indices(indices)

    # ---- graphs that depend on it ---------------------------------------------------------------

    def watch(self, watcher: CacheWatcher) -> None:
        """Tells ``watcher`` (held weakly) when a buffer of either half is rebound or emptied."""
        self._state.watch(watcher)

    def taken_over(self, watcher: CacheWatcher) -> None:
        """Tells the other watchers that ``watcher`` fills the cache from now on."""
        self.decoder_half.taken_over(watcher)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """Forgets ``watcher``."""
        self._state.unwatch(watcher)

    def __repr__(self) -> str:
        return (
            f"EncoderDecoderKVCache(self_cache={self.self_attention_cache!r}, "
            f"cross_cache={self.cross_attention_cache!r})"
        )


def _half(
    shapes: list[compat.LayerShape], batch: int, capacity: int, dtype: torch.dtype, model: Any
) -> StaticKVCache:
    return StaticKVCache(
        len(shapes),
        batch,
        [shape.kv_heads for shape in shapes],
        capacity,
        [shape.head_dim for shape in shapes],
        dtype,
        model.device,
        v_head_dim=[shape.v_head_dim for shape in shapes],
    )


def _made(half: StaticKVCache | CacheShell) -> StaticKVCache:
    if isinstance(half, CacheShell):
        raise LifecycleError(
            f"{half.field}: expected early_initialization() first; its shapes are not known"
        )
    return half


def _check_halves(own: StaticKVCache | CacheShell, cross: StaticKVCache | CacheShell) -> None:
    if own is cross:
        raise ConfigurationError("cross_cache: expected a cache of its own, got the self_cache")
    fields = ["num_layers"]
    if isinstance(own, StaticKVCache) and isinstance(cross, StaticKVCache):
        fields += ["batch_size", "device"]
        if isinstance(own._state, CrossState):
            raise ConfigurationError("self_cache: expected no cross half of another cache")
    for field in fields:
        expected, actual = getattr(own, field), getattr(cross, field)
        if expected != actual:
            raise ConfigurationError(
                f"cross_cache {field}: expected {expected} (the self_cache's), got {actual}"
            )
