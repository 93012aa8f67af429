"""What a runner refuses of encoder-decoders and their caches, each with its own message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import make_model, make_prompt
from helpers.encoder_decoder_models import eager_ids, encoder_inputs, make_encoder_decoder

import graphcore.decode
from graphcore.decode import CUDAGraphAR, EncoderDecoderKVCache, StaticKVCache
from graphcore.decode import transformers_compat as compat
from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError


def halves(heads: int = 4, head_dim: int = 12, **options: Any) -> EncoderDecoderKVCache:
    """A cache for the T5 of the tests, but for the options, which are those of the cross half."""
    sizes = {"num_layers": 2, "batch_size": 1, "max_seq_len": 16, "device": "cpu"}
    own = StaticKVCache(num_kv_heads=4, head_dim=12, dtype=torch.float32, **sizes)
    cross = {"num_kv_heads": heads, "head_dim": head_dim, "dtype": torch.float32} | sizes
    return EncoderDecoderKVCache(own, StaticKVCache(**(cross | options)))


def foreign() -> Any:
    return compat.EncoderDecoderCache(compat.DynamicCache(), compat.DynamicCache())


_caches: dict[str, tuple[Any, type[Exception], str]] = {
    "StaticKVCache": (
        lambda: halves().self_attention_cache,
        CacheTypeError,
        "expected a graphcore EncoderDecoderKVCache, got a StaticKVCache: T5.* is an encoder-dec",
    ),
    "transformers": (foreign, CacheTypeError, "a transformers EncoderDecoderCache of DynamicCache"),
    "DynamicCache": (compat.DynamicCache, CacheTypeError, "an encoder-decoder, got DynamicCache"),
    "shell": (
        lambda: EncoderDecoderKVCache.shell(2, 16, 16),
        LifecycleError,
        "expected early_initialization",
    ),
    "cross heads": (
        lambda: halves(heads=3),
        ConfigurationError,
        r"cache num_kv_heads of layer 0 cross: expected 4 \(the model's\), got 3",
    ),
    "cross head_dim": (
        lambda: halves(head_dim=10),
        ConfigurationError,
        "cache head_dim of layer 0 cross: expected 12",
    ),
    "cross dtype": (
        lambda: halves(dtype=torch.bfloat16),
        ConfigurationError,
        "cache dtype of the cross half: expected torch.float32",
    ),
}


@pytest.mark.parametrize("case", _caches)
def test_a_cache_that_does_not_fit_an_encoder_decoder_is_refused(case: str) -> None:
    make, error, message = _caches[case]
    with pytest.raises(error, match=message):
        CUDAGraphAR(make_encoder_decoder(), make())


def test_another_number_of_layers_is_refused() -> None:
    model = make_encoder_decoder("bart")
    cache = EncoderDecoderKVCache.shell(3, 16, 16)
    cache.early_initialization(1, 4, 8, torch.float32, "cpu")
    with pytest.raises(ConfigurationError, match=r"num_layers: expected 2 \(the model's decoder\)"):
        CUDAGraphAR(model, cache)


def test_a_decoder_refuses_an_encoder_decoder_cache() -> None:
    with pytest.raises(CacheTypeError, match="got EncoderDecoderKVCache: the model is a decoder"):
        CUDAGraphAR(make_model(), halves())


_sizes: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5 without a length": ("t5", {"max_seq_len": 16}, "encoder_len: expected a capacity, got No"),
    "BART too long": ("bart", {"max_seq_len": 65}, r"max_seq_len: expected at most 64 \(the"),
    "BART's encoder": ("bart", {"encoder_len": 65}, r"encoder_len: expected at most 64 \(the"),
    "Whisper's encoder": ("whisper", {"encoder_len": 13}, "encoder_len: expected at most 12"),
    "a bool": ("bart", {"encoder_len": True}, "encoder_len: expected a positive int, got True"),
    "beams": ("bart", {"num_beams": 2}, "generation_config.num_beams: expected 1, got 2"),
    "no cache": ("bart", {"use_cache": False}, "use_cache: expected True, got False"),
    "attention": ("bart", {"attention": "flex_attention"}, "attn_implementation: expected 'sdpa'"),
}


@pytest.mark.parametrize("case", _sizes)
def test_a_configuration_that_cannot_work_is_refused(case: str) -> None:
    family, options, message = _sizes[case]
    options = dict(options)
    model = make_encoder_decoder(family)
    if "num_beams" in options:
        model.generation_config.num_beams = options.pop("num_beams")
    if "use_cache" in options:
        model.config.use_cache = options.pop("use_cache")
    if "attention" in options:
        model.get_decoder().config._attn_implementation = options.pop("attention")
    with pytest.raises(ConfigurationError, match=message):
        CUDAGraphAR(model, **options)


def test_training_mode_with_dropout_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="active dropout"):
        CUDAGraphAR(make_encoder_decoder("bart").train(), max_seq_len=16)


def test_a_decoder_takes_nothing_of_an_encoder() -> None:
    model = make_model()
    for options in ({"encoder_len": 4}, {"exact_encoder": True}):
        with pytest.raises(ConfigurationError, match="the model has no encoder"):
            CUDAGraphAR(model, max_seq_len=16, **options)
    runner = CUDAGraphAR(model, max_seq_len=16)
    with pytest.raises(ConfigurationError, match="decoder_input_ids: this runner takes no such"):
        runner.capture(make_prompt(3), decoder_input_ids=make_prompt(3))


def test_an_encoder_decoder_without_a_language_head_is_refused() -> None:
    model = make_encoder_decoder("bart").model
    runner = CUDAGraphAR(model, max_seq_len=16, encoder_len=8)
    with pytest.raises(ConfigurationError, match="ForConditionalGeneration"):
        runner.capture(torch.tensor([[5, 6]]))


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_the_one_call_makes_a_cache_of_the_right_sizes(family: str) -> None:
    model = make_encoder_decoder(family)
    inputs = encoder_inputs(family, 6, batch=2, padded=1)
    expected = eager_ids(model, inputs, 8)
    if family == "whisper":
        made = graphcore.decode.generate(model, inputs["input_features"], 8)
    else:
        made = graphcore.decode.generate(model, max_new_tokens=8, **inputs)
    assert torch.equal(made.ids, expected)
    assert torch.equal(made.new_ids, expected[:, 1:])
    assert (made.prompt_length, made.execution, made.captures) == (1, "graph", 1)
