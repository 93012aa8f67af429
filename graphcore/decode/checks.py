"""What a runner refuses at construction, each with its own message: model, cache, driver.

Everything here runs before anything is launched or written. Messages name the field, what was
expected and what came.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcore.decode import decoder_stack, encoder_decoder_checks
from graphcore.decode import transformers_compat as compat
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.sizes import check_positive
from graphcore.decode.static_cache import StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.resources.driver_argument import checked_driver


def check_model(model: Any) -> None:
    """Refuses a model whose decode step cannot be captured.

    Raises:
        ConfigurationError: Not a transformers model that generates, ``use_cache=False``, training
            mode where it changes the step, several devices, an attention without masks, beam search
            in its generation config.
    """
    if not is_transformers_model(model):
        raise ConfigurationError(
            "model: expected a transformers causal language model, or a step function with cache= "
            f"and vocabulary=, got {type(model).__module__}.{type(model).__qualname__}"
        )
    if families.is_encoder_decoder(model):
        encoder_decoder_checks.check_forward(model)
    elif compat.cache_keyword(model) is None or not compat.takes_position_ids(model):
        raise ConfigurationError(
            f"model: expected a forward that takes a cache and position_ids, got "
            f"{type(model).__name__}, whose forward does not"
        )
    _check_use_cache(model)
    check_training(model)
    _check_one_device(model)
    _check_attention(model)
    check_beams(compat.generation_setting(model, "num_beams"), "generation_config.num_beams")


def is_transformers_model(model: Any) -> bool:
    """Whether ``model`` is a module with what the models of transformers have."""
    parts = ("config", "device", "dtype", "get_input_embeddings")
    return isinstance(model, torch.nn.Module) and all(hasattr(model, part) for part in parts)


def check_beams(beams: object, field: str = "num_beams") -> None:
    """Refuses beam search, which reorders cache rows between steps."""
    if beams not in (None, 1):
        raise ConfigurationError(
            f"{field}: expected 1, got {beams}: beam search reorders the cache between steps, "
            "which a replay cannot follow. Use greedy decoding, or sampling: "
            "sampling=Sampling(temperature=1.0)"
        )


def check_cache(model: Any, cache: Any) -> None:
    """Refuses a cache that is not static, or does not fit ``model``.

    Raises:
        CacheTypeError: Not a StaticKVCache.
        ConfigurationError: Another device, number of layers, heads or head sizes; names the layer.
    """
    check_static(cache)
    device = model.device
    if cache.device != device:
        raise ConfigurationError(
            f"cache device: expected {device} (the model's), got {cache.device}"
        )
    check_layers(model)
    shapes = compat.layer_shapes(model)
    windows = [window for _, window in compat.layer_kinds(compat.text_config(model))]
    if cache.num_layers != len(shapes):
        raise ConfigurationError(
            f"cache num_layers: expected {len(shapes)} (the model's), got {cache.num_layers}"
        )
    for index in compat.owning_layers(compat.text_config(model)):
        if index not in cache.owning_layers:
            raise ConfigurationError(
                f"cache owning_layers: expected layer {index} among them, the model stores K/V "
                f"there; got {cache.owning_layers}"
            )
        _check_layer(index, cache.layers[index], shapes[index])
        _check_window(index, cache.windows[index], windows[index])


def check_static(cache: Any) -> None:
    """Refuses every cache but a StaticKVCache.

    Raises:
        CacheTypeError: Says what is wrong with it.
    """
    if not isinstance(cache, StaticKVCache):
        raise CacheTypeError(_foreign_cache(cache))


def check_sizes(cache: StaticKVCache, max_seq_len: int | None, batch_size: int | None) -> None:
    """Refuses sizes that contradict those of ``cache``."""
    for field, given in (("max_seq_len", max_seq_len), ("batch_size", batch_size)):
        if given is not None and given != getattr(cache, field):
            raise ConfigurationError(
                f"{field}: expected {getattr(cache, field)} (the cache's), got {given}"
            )


def check_capacity(model: Any, max_seq_len: int) -> None:
    """Refuses a capacity past what the model's positions reach."""
    limit = getattr(compat.text_config(model), "max_position_embeddings", None)
    if limit is not None and max_seq_len > limit:
        raise ConfigurationError(
            f"max_seq_len: expected at most {limit} (the model's max_position_embeddings), got "
            f"{max_seq_len}"
        )


_refused_kinds = {
    "chunked_attention": "its tokens see their own chunk only, not a window",
    "local": "its own mask counts from the end of the buffer, not from the last token",
    "linear_attention": "it keeps a recurrent state instead of K and V",
    "conv": "it keeps a convolution's state instead of K and V",
    "hybrid": "it keeps a recurrent state beside K and V",
    "hybrid_sliding": "it keeps a recurrent state beside K and V",
    "mamba": "it keeps a recurrent state instead of K and V",
    "indexed_attention": "it keeps an index beside K and V",
    "compressed_sparse_attention": "it keeps compressed blocks beside K and V",
    "heavily_compressed_attention": "it keeps compressed blocks instead of K and V",
    "minimax_m3_sparse": "it keeps an index beside K and V",
    "reference_sliding_attention": "its window begins behind a prompt that is kept whole",
}


def check_layers(model: Any) -> None:
    """Refuses layers that are not attention over K and V of every token, or of a window.

    Raises:
        ConfigurationError: Names the layer, its kind and why.
    """
    config = compat.text_config(model)
    for index, (kind, _) in enumerate(compat.layer_kinds(config)):
        if not compat.is_attending(kind):
            why = _refused_kinds.get(kind, "no cache is known for it")
            raise ConfigurationError(
                f"layer {index}: expected full or sliding attention, got {kind!r}: {why}"
            )
    if compat.looks_ahead(config):
        raise ConfigurationError(
            "use_bidirectional_attention: expected tokens that see only those before them, got a "
            "configuration whose prompt sees itself as a whole, which no causal mask gives"
        )
    if not decoder_stack.masks_causally(model):
        raise ConfigurationError(
            f"model: expected tokens that see only those before them, got {type(model).__name__}, "
            "whose forward lets a prompt see itself as a whole"
        )
    if getattr(config, "alibi", False):
        raise ConfigurationError(
            "alibi: expected positions that are given to the forward, got biases that the model "
            "makes from a mask of tokens, while a static buffer needs one of slots"
        )
    loops = getattr(config, "n_recurrent_loops", None) or 1
    if loops > 1:
        raise ConfigurationError(
            f"n_recurrent_loops: expected layers that a step runs once, got {loops} loops, which "
            "keep K and V of their own in layers that the model adds to the cache"
        )
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        raise ConfigurationError(
            f"layer 0: expected attention over K and V, got multi-head latent attention "
            f"(kv_lora_rank {rank}), which keeps compressed states of other shapes"
        )


def check_driver(driver: Driver, device: torch.device) -> None:
    """Refuses what is no driver, and one of another device than the model's."""
    checked_driver(driver)
    expected = "emulated" if device.type == "cpu" else "cuda"
    ordinal = device.index if device.type == "cuda" else driver.device
    if driver.is_emulated != (expected == "emulated") or driver.device != ordinal:
        raise ConfigurationError(
            f"driver: expected the {expected} driver for the model on {device}, got "
            f"{driver.name}:{driver.device}"
        )


def _check_use_cache(model: Any) -> None:
    for config in (model.config, compat.text_config(model)):
        if getattr(config, "use_cache", True) is False:
            raise ConfigurationError(
                "use_cache: expected True, got False: without a cache the step has nothing static "
                "to read; set model.config.use_cache = True"
            )


def check_training(model: Any) -> None:
    """Refuses training mode where it changes the step: dropout, gradient checkpointing."""
    if not isinstance(model, torch.nn.Module):  # a step function
        return
    if model.training and compat.is_gradient_checkpointing(model):
        raise ConfigurationError(
            "model: gradient checkpointing in training mode drops the cache; call model.eval()"
        )
    for name, module in model.named_modules():
        source = _active_randomness(module) if module.training else None
        if source is not None:
            raise ConfigurationError(
                f"model: expected a step without randomness, got training mode with active "
                f"dropout: {source} of {name or 'the model'}; call model.eval()"
            )


def _active_randomness(module: Any) -> str | None:
    """What training mode makes random in ``module`` itself: "p=0.1", "attention_dropout=0.1"."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return f"p={module.p}" if module.p > 0 else None
    for name, value in vars(module).items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0:
            return f"{name}={value}"
    return None


def _check_one_device(model: Any) -> None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices[0] == "meta":
        raise ConfigurationError(f"model: expected one device for all weights, got {devices}")


def _check_attention(model: Any) -> None:
    name = (
        families.attention_implementation(model)
        if families.is_encoder_decoder(model)
        else compat.attention_implementation(model)
    )
    if name is None:
        raise ConfigurationError(
            f"attn_implementation: expected 'sdpa' or 'eager', which take a mask over the static "
            f"buffer, got {type(model).__name__}, whose attention is its own"
        )
    if name not in ("sdpa", "eager"):
        raise ConfigurationError(
            f"attn_implementation: expected 'sdpa' or 'eager', which take a mask over the static "
            f"buffer, got {name!r}; call model.set_attn_implementation('sdpa')"
        )


def _foreign_cache(cache: Any) -> str:
    kind = type(cache).__name__
    if isinstance(cache, compat.EncoderDecoderCache):
        return (
            f"cache: expected a graphcore StaticKVCache, got {kind}: the model is a decoder, it "
            "has no encoder whose K/V a second half could hold"
        )
    if isinstance(cache, compat.StaticCache):
        return (
            "cache: expected a graphcore StaticKVCache, got a transformers StaticCache, whose "
            "overflow is a device assert; convert it: "
            "StaticKVCache.from_transformers(cache, model)"
        )
    if isinstance(cache, compat.DynamicCache):
        return (
            "cache: expected a graphcore StaticKVCache, got a DynamicCache: it allocates new K/V "
            "at every step, so a captured graph would read freed memory; make a static one: "
            "StaticKVCache.for_model(model, max_seq_len=...)"
        )
    return f"cache: expected a graphcore StaticKVCache, got {kind}, whose buffers are not static"


def _check_window(index: int, held: int | None, window: int | None) -> None:
    """A layer may keep more than its window: the mask hides the rest. Not less, or others."""
    if held is not None and held != window:
        wanted = "None (the model's layer sees every token)" if window is None else f"{window}"
        raise ConfigurationError(
            f"cache windows of layer {index}: expected {wanted}, or None, which keeps every token; "
            f"got {held}"
        )


def _check_layer(index: int, layer: Any, shape: compat.LayerShape) -> None:
    held = (layer.num_heads, layer.k_head_dim, layer.v_head_dim)
    expected = (shape.kv_heads, shape.head_dim, shape.v_head_dim)
    for field, want, have in zip(
        ("num_kv_heads", "head_dim", "v_head_dim"), expected, held, strict=True
    ):
        if want != have:
            raise ConfigurationError(
                f"cache {field} of layer {index}: expected {want} (the model's), got {have}"
            )


def cache_for(
    model: Any,
    cache: Any,
    max_seq_len: int | None,
    batch_size: int | None,
    encoder_len: int | None = None,
) -> StaticKVCache | EncoderDecoderKVCache:
    """The caller's cache, checked and bound to ``model``, or a new one of these sizes."""
    if families.is_encoder_decoder(model):
        return encoder_decoder_checks.cache_for(model, cache, max_seq_len, batch_size, encoder_len)
    if cache is None:
        wanted = max_seq_len
        if wanted is None:
            wanted = compat.text_config(model).max_position_embeddings
        check_positive("max_seq_len", wanted)
        check_capacity(model, wanted)
        check_layers(model)
        return StaticKVCache.for_model(
            model, wanted, batch_size=1 if batch_size is None else batch_size
        )
    check_cache(model, cache)
    check_capacity(model, cache.max_seq_len)
    check_sizes(cache, max_seq_len, batch_size)
    cache.bind_model(model)
    made: StaticKVCache = cache
    return made
