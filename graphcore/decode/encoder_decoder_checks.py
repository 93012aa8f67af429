"""What a runner refuses of an encoder-decoder and its cache, each with its own message."""

from __future__ import annotations

import inspect
from typing import Any

from graphcore.decode import decoder_stack
from graphcore.decode import transformers_compat as compat
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import CacheTypeError, ConfigurationError

_inputs = ("encoder_outputs", "decoder_input_ids", "decoder_attention_mask")


def check_forward(model: Any) -> None:
    """Refuses an encoder-decoder whose forward cannot run the decoder alone.

    Raises:
        ConfigurationError: Its forward takes no cache, no encoder outputs or no decoder mask; or
            its decoder's attention is not recognised.
    """
    accepted = inspect.signature(model.forward).parameters
    missing = [name for name in _inputs if name not in accepted]
    if compat.cache_keyword(model) is None:
        missing.append("a cache")
    if missing:
        raise ConfigurationError(
            f"model: expected an encoder-decoder whose forward takes {', '.join(_inputs)} and a "
            f"cache, got {type(model).__name__}, whose forward lacks {', '.join(missing)}"
        )
    families.attention_shapes(model)
    _check_layers(model)


def _check_layers(model: Any) -> None:
    name = type(model).__name__
    if not decoder_stack.masks_single_tokens(model):
        raise ConfigurationError(
            f"model: expected a decoder that heeds the mask of a single token, got {name}, whose "
            "decoder drops it and would see empty slots"
        )
    for part, module in model.get_decoder().named_modules():
        if "padding_mask" in inspect.signature(module.forward).parameters:
            raise ConfigurationError(
                f"model: expected experts that no mask routes, got {name}, whose {part} takes the "
                "mask for one of padding, while a static buffer needs one of slots"
            )
    kinds = families.layer_kinds(model)
    for index, (kind, window) in enumerate(kinds):
        if not compat.is_attending(kind):
            raise ConfigurationError(
                f"decoder layer {index}: expected full or sliding attention, got {kind!r}"
            )
        if window is not None and not decoder_stack.takes_masks_by_type(model):
            raise ConfigurationError(
                f"decoder layer {index}: expected attention to every token, got a window of "
                f"{window}: the forward of {name} takes no mask for each type of layer"
            )


def check_cache(model: Any, cache: Any) -> None:
    """Refuses a cache that is no static encoder-decoder cache, or does not fit ``model``.

    Raises:
        CacheTypeError: Another kind of cache.
        ConfigurationError: Another device, dtype, number of layers, heads or head sizes.
        LifecycleError: A shell whose shapes were not given yet.
    """
    if not isinstance(cache, EncoderDecoderKVCache):
        raise CacheTypeError(_foreign_cache(model, cache))
    if cache.decoder_half.device != model.device:
        raise ConfigurationError(
            f"cache device: expected {model.device} (the model's), got {cache.device}"
        )
    if cache.encoder_half.dtype != model.dtype:
        raise ConfigurationError(
            f"cache dtype of the cross half: expected {model.dtype} (the model's, which reads it "
            f"without a cast), got {cache.encoder_half.dtype}"
        )
    for half, shapes in zip(
        (cache.decoder_half, cache.encoder_half), families.attention_shapes(model), strict=True
    ):
        if half.num_layers != len(shapes):
            raise ConfigurationError(
                f"cache num_layers: expected {len(shapes)} (the model's decoder), got "
                f"{half.num_layers}"
            )
        _check_shapes(half, shapes)


def check_capacities(model: Any, max_seq_len: int, encoder_len: int) -> None:
    """Refuses capacities past what the model has positions for."""
    for field, capacity in (("max_seq_len", max_seq_len), ("encoder_len", encoder_len)):
        limit = families.position_limit(field, model)
        # what an encoder has no learned positions for may be longer: T5's are relative
        if limit is not None and capacity > limit and families.has_learned_positions(model):
            raise ConfigurationError(
                f"{field}: expected at most {limit} (the model's positions), got {capacity}"
            )


def cache_for(
    model: Any,
    cache: Any,
    max_seq_len: int | None,
    batch_size: int | None,
    encoder_len: int | None,
) -> EncoderDecoderKVCache:
    """The caller's cache, checked and bound to ``model``, or a new one of these sizes."""
    if cache is None:
        made = EncoderDecoderKVCache.for_model(
            model, max_seq_len, encoder_len, batch_size=1 if batch_size is None else batch_size
        )
        check_capacities(model, made.max_seq_len, made.encoder_len)
        return made
    check_cache(model, cache)
    check_capacities(model, cache.max_seq_len, cache.encoder_len)
    for field, given in (
        ("max_seq_len", max_seq_len),
        ("batch_size", batch_size),
        ("encoder_len", encoder_len),
    ):
        if given is not None and given != getattr(cache, field):
            raise ConfigurationError(
                f"{field}: expected {getattr(cache, field)} (the cache's), got {given}"
            )
    cache.bind_model(model)
    held: EncoderDecoderKVCache = cache
    return held


def _check_shapes(half: StaticKVCache, shapes: list[compat.LayerShape]) -> None:
    for layer, shape in zip(half._owners, shapes, strict=True):
        held = (layer.num_heads, layer.k_head_dim, layer.v_head_dim)
        expected = (shape.kv_heads, shape.head_dim, shape.v_head_dim)
        for field, want, have in zip(
            ("num_kv_heads", "head_dim", "v_head_dim"), expected, held, strict=True
        ):
            if want != have:
                raise ConfigurationError(
                    f"cache {field} of {layer.name}: expected {want} (the model's), got {have}"
                )


def _foreign_cache(model: Any, cache: Any) -> str:
    name, kind = type(model).__name__, type(cache).__name__
    convert = "make one with EncoderDecoderKVCache.for_model(model, max_seq_len, encoder_len)"
    if isinstance(cache, StaticKVCache):
        return (
            f"cache: expected a graphcore EncoderDecoderKVCache, got a StaticKVCache: {name} is an "
            f"encoder-decoder, which would write its cross K/V over the decoder's; {convert}"
        )
    if isinstance(cache, compat.EncoderDecoderCache):
        halves = (cache.self_attention_cache, cache.cross_attention_cache)
        kinds = " and ".join(type(half).__name__ for half in halves)
        return (
            f"cache: expected a graphcore EncoderDecoderKVCache, got a transformers "
            f"EncoderDecoderCache of {kinds}, which a captured graph cannot depend on; {convert}"
        )
    return (
        f"cache: expected a graphcore EncoderDecoderKVCache for {name}, an encoder-decoder, got "
        f"{kind}; {convert}"
    )
