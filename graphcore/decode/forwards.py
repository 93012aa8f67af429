"""Which forward serves what a runner is given: a decoder, an encoder-decoder, a step function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcore.decode import checks
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.encoder_decoder_forward import EncoderDecoderForward
from graphcore.decode.encoder_decoder_prompt import check_prompt as encoder_prompt
from graphcore.decode.first_step import FirstStep
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
from graphcore.decode.guided_encoder import guided_prompt
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
    encoder_len: int | None = None,
    vocabulary: int | None = None,
    guidance: Guidance | None = None,
    exact_encoder: bool = False,
) -> StaticKVCache | EncoderDecoderKVCache:
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
    if not families.is_encoder_decoder(model):
        for field, given in (("encoder_len", encoder_len), ("exact_encoder", exact_encoder)):
            if given:
                raise ConfigurationError(
                    f"{field}: expected none, got {given}: the model has no encoder"
                )
    if is_function(model, cache, vocabulary):
        checks.check_sizes(cache, max_seq_len, rows)
        made: StaticKVCache = cache
        return made
    return checks.cache_for(model, cache, max_seq_len, rows, encoder_len)


def forward_for(
    model: Any,
    cache: StaticKVCache | EncoderDecoderKVCache,
    feed: Feed,
    first: FirstStep | None = None,
    *,
    vocabulary: int | None = None,
    guide: Guide | None = None,
    exact_encoder: bool = False,
) -> Forward:
    """The forward of ``model`` over ``cache``, both of which :func:`cache_for` has checked."""
    forward: Forward
    if isinstance(cache, EncoderDecoderKVCache):
        forward = EncoderDecoderForward(model, cache, feed, first, exact=exact_encoder)
    elif vocabulary is None:
        forward = DecoderForward(model, cache, feed)
    else:
        forward = FunctionForward(model, cache, vocabulary, feed)
    return forward if guide is None else GuidedForward(forward, guide)


_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _advice(name: str) -> str:
    """Where a setting belongs that callers of transformers' ``generate`` look for here."""
    if name in _SETTINGS:
        return (
            "; sampling is part of the graph and given to the runner: "
            f"sampling=Sampling({name}=...)"
        )
    if name == "do_sample":
        return (
            "; sampling is part of the graph and given to the runner: "
            "sampling=Sampling(temperature=...)"
        )
    if name == "one_launch":
        return "; call generate_in_one_launch"
    return ""


def checked_prompt(
    forward: Forward, input_ids: Any, attention_mask: Any, inputs: Mapping[str, Any]
) -> Prompt:
    """A prompt that ``forward`` takes, from what a caller gave.

    Raises:
        ConfigurationError: As :func:`check_prompt`; or an input that the forward does not know.
    """
    inner = forward.inner if isinstance(forward, GuidedForward) else forward
    guided = inner is not forward
    known = ("negative_input_ids", "negative_attention_mask") if guided else ()
    for name in inputs:
        is_negative = name.startswith("negative_")
        if isinstance(inner, EncoderDecoderForward):
            takes = guided or not is_negative
        else:
            takes = name in known
        if not takes:
            where = " without guidance" if is_negative else ""
            raise ConfigurationError(
                f"{name}: this runner takes no such input{where}{_advice(name)}"
            )
    if isinstance(inner, EncoderDecoderForward):
        check = guided_prompt if guided else encoder_prompt
        return check(inner.model, inner.cache, input_ids, attention_mask, inputs)
    prompt = check_prompt(forward, input_ids, attention_mask)
    if not isinstance(forward, GuidedForward):
        return prompt
    return paired(prompt, negative_prompt(forward, **inputs))


def check_continues(forward: Forward) -> None:
    """Raises LifecycleError where a token cannot be fed behind what the cache holds now."""
    inner = forward.inner if isinstance(forward, GuidedForward) else forward
    if isinstance(inner, EncoderDecoderForward):
        inner.check_continues()
