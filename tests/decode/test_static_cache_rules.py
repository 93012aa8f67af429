"""The eleven rules that keep a static cache right under captured graphs, one test or more each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model, make_prompt
from helpers.encoder_decoder_models import (
    LAYERS,
    eager_ids,
    encoder_inputs,
    make_encoder_decoder,
)

import graphcore
from graphcore.decode import CUDAGraphAR, EncoderDecoderKVCache, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import (
    CapacityError,
    CaptureError,
    ConfigurationError,
    LifecycleError,
    OverwrittenOutputError,
)

KINDS = ("decoder", "encoder-decoder")


def make_cache(kind: str, model: Any) -> Any:
    if kind == "decoder":
        return StaticKVCache.for_model(model, 24)
    return EncoderDecoderKVCache.for_model(model, 24, 10)


def make_any(kind: str, device: str = "cpu") -> Any:
    return make_model(device=device) if kind == "decoder" else make_encoder_decoder(device=device)


def prompt_of(kind: str, runner: CUDAGraphAR, seed: int = 0, tokens: int = 6) -> dict[str, Any]:
    device = str(runner.cache.device)
    if kind == "decoder":
        return {"input_ids": make_prompt(tokens, device=device, seed=seed)}
    return encoder_inputs("t5", tokens, device=device, seed=seed)


def addresses(cache: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in cache.named_tensors().items()}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(graphcore_driver: Driver, kind: str) -> Any:
    model = make_any(kind, device_of(graphcore_driver))
    with CUDAGraphAR(model, make_cache(kind, model), driver=graphcore_driver) as made:
        yield made


def test_r1_every_buffer_is_made_before_the_capture_and_keeps_its_address(
    runner: CUDAGraphAR, kind: str
) -> None:
    before = addresses(runner.cache)
    cross = ["layer 1 cross keys", "layer 1 cross values", "cross length"]
    expected = ["layer 1 keys", "layer 1 values", "cache position"]
    assert set(expected + (cross if kind != "decoder" else [])) <= set(before)
    for seed in (1, 2):
        runner.generate(**prompt_of(kind, runner, seed), max_new_tokens=6)
        assert addresses(runner.cache) == before
    assert runner.captures == 1


def test_r2_initialising_again_is_nothing_with_equal_shapes_and_refused_with_others(
    kind: str,
) -> None:
    model = make_any(kind)
    cache = make_cache(kind, model)
    heads, head_dim = (2, 16) if kind == "decoder" else (4, 12)
    before = addresses(cache)
    cache.early_initialization(1, heads, head_dim, torch.float32, "cpu")
    assert addresses(cache) == before
    with pytest.raises(ConfigurationError, match="layer 0: initialised with"):
        cache.early_initialization(1, heads + 1, head_dim, torch.float32, "cpu")
    assert addresses(cache) == before


def test_r3_initialising_while_a_stream_captures_raises(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    cache = EncoderDecoderKVCache.shell(LAYERS, 24, 10)
    with (
        pytest.raises(CaptureError, match="not while a graph is captured"),
        graphcore.capture(driver=graphcore_driver),
    ):
        cache.early_initialization(1, 4, 12, torch.float32, device)
    assert not cache.is_initialized
    with (
        pytest.raises(CaptureError, match="not while a graph is captured"),
        graphcore.capture(driver=graphcore_driver),
    ):
        StaticKVCache(2, 1, 4, 24, 12, torch.float32, device)


def test_r4_reset_is_in_place_and_the_next_generation_is_a_fresh_one(
    runner: CUDAGraphAR, kind: str
) -> None:
    prompt = prompt_of(kind, runner)
    first = runner.generate(**prompt, max_new_tokens=6)
    before = addresses(runner.cache)
    runner.cache.reset()
    assert addresses(runner.cache) == before
    assert not any(bool(tensor.any()) for name, tensor in runner.cache.named_tensors().items())
    runner.generate(**prompt_of(kind, runner, seed=5), max_new_tokens=6)
    assert torch.equal(runner.generate(**prompt, max_new_tokens=6), first)
    assert runner.captures == 1


def test_r5_a_fresh_cache_never_meets_a_graph_of_the_old_one(
    runner: CUDAGraphAR, kind: str
) -> None:
    prompt = prompt_of(kind, runner)
    expected = runner.generate(**prompt, max_new_tokens=6)
    old = runner.cache
    fresh = make_cache(kind, runner.model)
    held = [tensor.clone() for tensor in old.named_tensors().values()]
    decoded = runner.generate(**prompt, max_new_tokens=6, cache=fresh)
    assert torch.equal(decoded, expected)
    now = old.named_tensors().values()
    assert all(torch.equal(was, tensor) for was, tensor in zip(held, now, strict=True))
    assert fresh.seen_tokens == old.seen_tokens
    assert runner.captures + runner.rebinds == 2


def test_r6_cross_keys_are_written_once_and_a_graph_only_reads_them(
    graphcore_driver: Driver,
) -> None:
    model = make_encoder_decoder(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, make_cache("", model), driver=graphcore_driver) as runner:
        projections = [block.layer[1].EncDecAttention.k for block in model.decoder.block]
        calls: list[int] = []
        for module in projections:
            module.register_forward_hook(lambda *_: calls.append(1))
        assert ("cross K/V", "not written") in runner._step.key
        runner.capture(**prompt_of("encoder-decoder", runner))
        assert ("cross K/V", "written") in runner._step.key
        assert len(calls) == LAYERS
        held = [layer.keys.clone() for layer in runner.cache.cross_attention_cache.layers]
        for _ in range(3):
            runner.replay()
        layers = runner.cache.cross_attention_cache.layers
        assert all(torch.equal(k, layer.keys) for k, layer in zip(held, layers, strict=True))
        assert len(calls) == LAYERS
        runner.cache.forget_encoder()
        with pytest.raises(LifecycleError, match="prompt"):
            runner.replay()


@pytest.mark.parametrize("exact", [False, True], ids=["padded", "exact"])
def test_r7_another_encoder_length_is_masked_or_another_graph(
    graphcore_driver: Driver, exact: bool
) -> None:
    model = make_encoder_decoder(device=device_of(graphcore_driver))
    with CUDAGraphAR(
        model, make_cache("", model), driver=graphcore_driver, exact_encoder=exact
    ) as runner:
        for tokens in (4, 9, 4):
            prompt = prompt_of("encoder-decoder", runner, tokens=tokens, seed=tokens)
            decoded = runner.generate(**prompt, max_new_tokens=8)
            assert torch.equal(decoded, eager_ids(model, prompt, 8))
        assert runner.captures == (2 if exact else 1)
        with pytest.raises(CapacityError, match="11 tokens; encoder_len is 10"):
            runner.capture(**prompt_of("encoder-decoder", runner, tokens=11))


def test_r8_heads_and_head_sizes_may_differ_by_layer_half_and_between_keys_and_values() -> None:
    cache = EncoderDecoderKVCache.shell(2, 8, 5)
    cache.early_initialization(
        1, [2, 3], [4, 6], torch.float32, "cpu", cross_num_heads=[5, 1], cross_head_dim=[2, 8]
    )
    shapes = {name: tuple(t.shape) for name, t in cache.named_tensors().items()}
    assert shapes["layer 0 keys"] == (1, 2, 8, 4)
    assert shapes["layer 1 keys"] == (1, 3, 8, 6)
    assert shapes["layer 0 cross keys"] == (1, 5, 5, 2)
    assert shapes["layer 1 cross keys"] == (1, 1, 5, 8)
    unequal = StaticKVCache(2, 1, 2, 8, 4, torch.float32, "cpu", v_head_dim=[6, 3])
    shapes = {name: tuple(t.shape) for name, t in unequal.named_tensors().items()}
    assert shapes["layer 0 keys"] == (1, 2, 8, 4)
    assert shapes["layer 1 values"] == (1, 2, 8, 3)


def test_r9_a_model_on_several_devices_is_declined(kind: str) -> None:
    model = make_any(kind)
    model.lm_head.to("meta")
    with pytest.raises(ConfigurationError, match=r"expected one device for all weights"):
        CUDAGraphAR(model, max_seq_len=16, **({} if kind == "decoder" else {"encoder_len": 8}))


def test_r10_an_output_that_was_overwritten_is_not_given_out(
    runner: CUDAGraphAR, kind: str
) -> None:
    runner.capture(**prompt_of(kind, runner))
    runner.replay()
    guard = graphcore.OutputGuard(runner.executable, runner.logits)
    clone = guard.clone()
    runner.replay()
    with pytest.raises(OverwrittenOutputError):
        guard.get()
    assert not torch.equal(clone, runner.logits)


def test_r11_one_token_too_many_is_refused_on_the_host_before_the_launch(
    runner: CUDAGraphAR, kind: str
) -> None:
    runner.capture(**prompt_of(kind, runner))
    while runner.cache.seen_tokens < 24:
        runner.replay()
    held = [tensor.clone() for tensor in runner.named_tensors().values()]
    with pytest.raises(CapacityError, match="max_seq_len is 24"):
        runner.replay()
    now = runner.named_tensors().values()
    assert all(torch.equal(was, tensor) for was, tensor in zip(held, now, strict=True))
    assert int(runner.position) == 24
