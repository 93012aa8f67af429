"""The one place that knows transformers' versions (5.17 to 5.24 are tested).

What differs between them is resolved by looking (a signature, an attribute), not by comparing
version numbers: the cache keyword of ``forward`` (``past_key_values``, later ``cache``), layers
that share K/V (``num_kv_shared_layers``, later ``kv_sharing_modes``), what varies by layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import torch
    from transformers import (
        Cache,
        DynamicCache,
        EncoderDecoderCache,
        GenerationConfig,
        StaticCache,
    )
    from transformers.cache_utils import CacheLayerMixin
except ImportError as error:
    raise ImportError(
        "graphcore.decode needs torch >= 2.11 and transformers >= 5.17: "
        f"pip install 'graphcore-cuda[transformers]' ({error})"
    ) from error

from graphcore.decode import transformers_sharding as sharding
from graphcore.errors import ConfigurationError

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "EncoderDecoderCache",
    "LayerShape",
    "StaticCache",
    "cache_keyword",
    "forward_logits",
    "generation_setting",
    "hidden_score",
    "is_gradient_checkpointing",
    "layer_kinds",
    "layer_shapes",
    "looks_ahead",
    "owning_layers",
    "sampling_setting",
    "text_config",
]

_default_sampling = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}
_attending_kinds = ("full_attention", "sliding_attention", "dummy")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer stores of a token: ``kv_heads`` heads of ``head_dim`` K, ``v_head_dim`` V."""

    kv_heads: int
    head_dim: int
    v_head_dim: int


def text_config(model: Any) -> Any:
    """The configuration of the decoder (the model's own, or the text part of a multimodal one)."""
    return model.config.get_text_config(decoder=True)


def cache_keyword(model: Any) -> str | None:
    """What ``model.forward`` calls its cache; None where it takes none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in accepted), None)


def takes_position_ids(model: Any) -> bool:
    """Whether positions can be given to ``model.forward``."""
    return "position_ids" in inspect.signature(model.forward).parameters


def forward_logits(
    model: Any,
    input_ids: torch.Tensor,
    *,
    position_ids: torch.Tensor,
    mask: torch.Tensor | dict[str, torch.Tensor],
    cache: Any,
) -> torch.Tensor:
    """One forward; logits ``[batch, vocabulary]`` of the last token.

    ``input_ids`` and ``position_ids`` are ``[batch, tokens]``, ``mask`` is 4-D and used as it is; a
    dict of them by layer type where the model takes one.

    Raises:
        ConfigurationError: The model has no language head.
    """
    arguments: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": mask,
        "use_cache": True,
        str(cache_keyword(model)): cache,
    }
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    logits: torch.Tensor | None = getattr(model(**arguments), "logits", None)
    if logits is None:
        raise ConfigurationError(
            "model: expected one whose forward gives logits (a ...ForCausalLM), got "
            f"{type(model).__name__}, which gives none"
        )
    return logits[:, -1]


def hidden_score(model: Any) -> float:
    """What is added to the score of a hidden token, in the model's dtype.

    The lowest finite number, so that a row that sees nothing does not become NaN; not enough in
    float16, where sdpa's scores, kept in float32, may be larger than it.
    """
    if model.dtype == torch.float16 and attention_implementation(model) == "sdpa":
        return float("-inf")
    return float(torch.finfo(model.dtype).min)


def attention_implementation(model: Any) -> str | None:
    """Which attention runs: "sdpa", "eager", "flash_attention_2" and others."""
    name: str | None = text_config(model)._attn_implementation
    return name


def generation_setting(model: Any, name: str) -> Any:
    """A setting of the model's generation config, or None."""
    return getattr(getattr(model, "generation_config", None), name, None)


def sampling_setting(model: Any, name: str) -> Any:
    """As :func:`generation_setting`; what is not set has the default that ``generate`` gives it."""
    setting = generation_setting(model, name)
    if setting is not None:
        return setting
    given: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    return {**_default_sampling, **given}.get(name)


def is_gradient_checkpointing(model: Any) -> bool:
    """Whether any module recomputes its forward (the model's own property changed its name)."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def layer_kinds(config: Any) -> list[tuple[str, int | None]]:
    """(kind, window) per layer: "full_attention", "sliding_attention" with its window, others."""
    layers = _layer_configs(config)
    named: Sequence[str] | None = getattr(config, "layer_types", None)
    if not named:  # GPT-Neo's "global" and "local"
        named = getattr(config, "attention_layers", None)
    kinds: list[tuple[str, int | None]] = []
    for index, layer in enumerate(layers):
        window = getattr(layer, "sliding_window", None)
        kind = named[index] if named else "sliding_attention" if window else "full_attention"
        kind = "full_attention" if kind == "global" else kind
        kinds.append((kind, window if kind == "sliding_attention" else None))
    return kinds


def looks_ahead(config: Any) -> bool:
    """Whether tokens of a prompt see those behind them, not only in images ("vision")."""
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return True
    return getattr(config, "is_causal", True) is False


def is_attending(kind: str) -> bool:
    """Whether a layer kind is attention over K/V (not a recurrent or compressed state)."""
    return kind in _attending_kinds


def owning_layers(config: Any) -> tuple[int, ...]:
    """Indices of the layers that store K/V of their own, where layers share them."""
    count = len(_layer_configs(config))
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return tuple(index for index, mode in enumerate(modes) if mode != "reuse")
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return tuple(range(count - shared))


def layer_shapes(model: Any) -> list[LayerShape]:
    """What each layer stores: from its projections where they show it, else from the config."""
    shapes = [_configured_shape(layer) for layer in _layer_configs(text_config(model))]
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        shape = _projected_shape(module)
        if shape is not None and isinstance(index, int) and 0 <= index < len(shapes):
            shapes[index] = shape
    return shapes


def _layer_configs(config: Any) -> list[Any]:
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is None:
        return [config] * int(config.num_hidden_layers)
    return list(_views(per_layer, config))


def _views(per_layer: Any, config: Any) -> Iterator[Any]:
    for index in range(int(config.num_hidden_layers)):
        yield per_layer[index]


def _configured_shape(layer: Any) -> LayerShape:
    heads = int(layer.num_attention_heads)
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    head_dim = getattr(layer, "head_dim", None) or int(layer.hidden_size) // heads
    return LayerShape(int(kv_heads), int(head_dim), int(head_dim))


def _projected_shape(module: Any) -> LayerShape | None:
    head_dim = getattr(module, "head_dim", None)
    keys = sharding.features_here(module, "k_proj", head_dim)
    values = sharding.features_here(module, "v_proj", head_dim)
    if head_dim and keys is None:
        sharding.refuse_fused(module)
        kept = _kept_heads(module)
        return None if kept is None else LayerShape(kept, head_dim, head_dim)
    if not head_dim or keys is None or values is None or keys % head_dim:
        return None
    heads = keys // head_dim
    return None if values % heads else LayerShape(heads, head_dim, values // heads)


def _kept_heads(module: Any) -> int | None:
    """K/V heads of an attention with one projection for all, where it says how many it keeps."""
    if getattr(module, "new_decoder_architecture", False):  # Falcon repeats K and V, then keeps all
        return int(module.num_heads)
    for name in ("num_kv_heads", "kv_heads"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    return None
