"""Where a static cache's sizes and contents come from: a model, or a transformers StaticCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graphcore.decode import transformers_compat as compat
from graphcore.decode.cache_layer import StaticLayer
from graphcore.errors import CacheTypeError, ConfigurationError

if TYPE_CHECKING:
    from graphcore.decode.static_cache import StaticKVCache


def for_model(
    kind: type[StaticKVCache],
    model: Any,
    max_seq_len: int | None,
    batch_size: int,
    dtype: torch.dtype | None,
) -> StaticKVCache:
    """A cache with the model's layers, windows, heads, dtype and device."""
    shapes = compat.layer_shapes(model)
    config = compat.text_config(model)
    cache = kind(
        num_layers=len(shapes),
        batch_size=batch_size,
        num_kv_heads=[shape.kv_heads for shape in shapes],
        max_seq_len=config.max_position_embeddings if max_seq_len is None else max_seq_len,
        head_dim=[shape.head_dim for shape in shapes],
        dtype=model.dtype if dtype is None else dtype,
        device=model.device,
        v_head_dim=[shape.v_head_dim for shape in shapes],
        windows=[window for _, window in compat.layer_kinds(config)],
        owning_layers=compat.owning_layers(config),
    )
    cache.bind_model(model)
    return cache


def from_transformers(
    kind: type[StaticKVCache], source: Any, model: Any, max_seq_len: int | None
) -> StaticKVCache:
    """A cache with the size and the contents of a transformers ``StaticCache``."""
    _check_source(source)
    capacity = _capacity(source, max_seq_len)
    filled = [layer for layer in source.layers if layer.keys is not None]
    if not filled:
        return for_model(kind, model, capacity, 1, None)
    made = for_model(kind, model, capacity, filled[0].keys.shape[0], filled[0].keys.dtype)
    seen = int(filled[0].get_seq_length())
    for target in made.layers:
        if isinstance(target, StaticLayer):
            _copy_layer(source.layers[target.index], target, seen)
    made.seek(seen)
    return made


def _check_source(source: Any) -> None:
    if not isinstance(source, compat.StaticCache) or any(source.is_linear):
        raise CacheTypeError(
            "cache: expected a transformers StaticCache of full-attention and sliding-window "
            f"layers, got {type(source).__name__}"
        )


def _capacity(source: Any, max_seq_len: int | None) -> int:
    if max_seq_len is not None:
        return max_seq_len
    pairs = zip(source.layers, source.is_sliding, strict=True)
    whole = [int(layer.get_max_length()) for layer, slides in pairs if not slides]
    if not whole or max(whole) <= 0:
        raise ConfigurationError(
            "max_seq_len: expected a number: all layers of this StaticCache slide, and it does not "
            "say how many tokens it was made for"
        )
    return max(whole)


def _copy_layer(source: Any, target: StaticLayer, seen: int) -> None:
    """Copies the held tokens; a transformers layer with a window keeps them oldest first."""
    first = max(seen - source.max_cache_len, 0)
    if seen > target.get_max_length() or seen - first < min(seen, target.max_cache_len):
        raise ConfigurationError(
            f"{target.name}: expected the last {min(seen, target.max_cache_len)} of {seen} tokens "
            f"(max_seq_len {target.get_max_length()}), got {seen - first}"
        )
    held = (source.keys[:, :, : seen - first], source.values[:, :, : seen - first])
    target.put_tokens(held, first)
