"""Which forward serves what a runner is given: a model or a step function, guided or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcore.decode import checks
from graphcore.decode.forward import DecoderForward, Feed, Forward
from graphcore.decode.function_forward import FunctionForward, check_function
from graphcore.decode.guidance import (
    Guidance,
    Guide,
    GuidedForward,
    check_guidance,
    negative_prompt,
    pair_rows,
    paired,
)
from graphcore.decode.prompt import Prompt, check_prompt
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError


def is_function(model: Any, cache: Any, vocabulary: object) -> bool:
    """Whether ``model`` is to be called as a step function, not as a transformers model."""
    if checks.is_transformers_model(model) or not callable(model):
        return False
    return cache is not None or vocabulary is not None


def cache_for(
    model: Any,
    cache: Any,
    max_seq_len: int | None,
    batch_size: int | None,
    *,
    vocabulary: int | None = None,
    guidance: Guidance | None = None,
) -> StaticKVCache:
    """The caller's cache, checked against all else that is given, or a new one.

    Raises:
        ConfigurationError, CacheTypeError: What cannot work, each with its own message.
    """
    check_guidance(guidance)
    if is_function(model, cache, vocabulary):
        check_function(model, cache, vocabulary)
        checks.check_static(cache)
    else:
        checks.check_model(model)
        if vocabulary is not None:
            raise ConfigurationError(
                f"vocabulary: expected None for a transformers model, which has its own, got "
                f"{vocabulary!r}"
            )
    rows = batch_size if guidance is None else pair_rows(cache, batch_size)
    if is_function(model, cache, vocabulary):
        checks.check_sizes(cache, max_seq_len, rows)
        made: StaticKVCache = cache
        return made
    return checks.cache_for(model, cache, max_seq_len, rows)


def forward_for(
    model: Any,
    cache: StaticKVCache,
    feed: Feed,
    *,
    vocabulary: int | None = None,
    guide: Guide | None = None,
) -> Forward:
    """The forward of ``model`` over ``cache``, both of which :func:`cache_for` has checked."""
    forward: Forward
    if vocabulary is None:
        forward = DecoderForward(model, cache, feed)
    else:
        forward = FunctionForward(model, cache, vocabulary, feed)
    return forward if guide is None else GuidedForward(forward, guide)


def checked_prompt(
    forward: Forward, input_ids: Any, attention_mask: Any, inputs: Mapping[str, Any]
) -> Prompt:
    """A prompt that ``forward`` takes, from what a caller gave.

    Raises:
        ConfigurationError: As :func:`check_prompt`; or an input that the forward does not know.
    """
    guided = isinstance(forward, GuidedForward)
    known = ("negative_input_ids", "negative_attention_mask") if guided else ()
    for name in inputs:
        if name not in known:
            where = " without guidance" if name.startswith("negative_") else ""
            raise ConfigurationError(f"{name}: this runner takes no such input{where}")
    prompt = check_prompt(forward, input_ids, attention_mask)
    if not isinstance(forward, GuidedForward):
        return prompt
    return paired(prompt, negative_prompt(forward, **inputs))
