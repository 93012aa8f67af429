"""Decoding under torch.autocast: rotary models too, whose K is wider than their V there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model, make_prompt
from helpers.encoder_decoder_models import (
    START,
    eager_logits,
    encoder_inputs,
    make_encoder_decoder,
)

from graphcore.decode import CUDAGraphAR, Sampling, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

NEW = 10


def autocast(driver: Driver) -> torch.autocast:
    return torch.autocast(torch.device(device_of(driver)).type, torch.bfloat16)


def make_runner(driver: Driver, architecture: str = "llama", **options: Any) -> CUDAGraphAR:
    model = make_model(architecture, device=device_of(driver))
    return CUDAGraphAR(model, driver=driver, **({"max_seq_len": 32} | options))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float = 5e-2) -> None:
    """``bound`` of the largest logit: bfloat16 rounds elsewhere over a padded buffer."""
    error = float((actual.double() - expected.double()).abs().max())
    assert error <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gemma3"])
def test_a_step_under_autocast_decodes_as_eager_and_near_to_transformers(
    graphcore_driver: Driver, architecture: str, attention: str
) -> None:
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with autocast(graphcore_driver), make_runner(graphcore_driver, architecture) as runner:
        runner.model.set_attn_implementation(attention)
        with make_runner(graphcore_driver, architecture, capture=False) as eager:
            eager.model.set_attn_implementation(attention)
            ids = runner.generate(prompt, NEW)
            assert torch.equal(ids, eager.generate(prompt, NEW))
        assert runner.execution == "graph"
        assert runner.captures == 1
        # a ring past its window, too: every token of a longer run is forced
        with torch.no_grad():
            whole = runner.model(ids, use_cache=False).logits
        runner.cache.reset()
        runner.capture(prompt)
        for position in range(5, ids.shape[1]):
            runner.logits.fill_(float("nan"))
            runner.replay(ids[:, position])
            assert_near(runner.logits, whole[:, position])
        # the control: autocast is in force
        assert runner.logits.dtype == torch.bfloat16
        assert runner.cache.dtype == torch.float32


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_encoder_decoders_keep_cross_keys_in_their_own_dtype_under_autocast(
    graphcore_driver: Driver, family: str
) -> None:
    model = make_encoder_decoder(family, device=device_of(graphcore_driver))
    inputs = encoder_inputs(family, batch=2, padded=2, device=str(model.device))
    sizes = {"max_seq_len": 32, "encoder_len": 12, "batch_size": 2, "driver": graphcore_driver}
    with autocast(graphcore_driver), CUDAGraphAR(model, **sizes) as runner:
        ids = runner.generate(**({"input_ids": None} | inputs), max_new_tokens=NEW)
        with CUDAGraphAR(model, capture=False, **sizes) as eager:
            expected = eager.generate(**({"input_ids": None} | inputs), max_new_tokens=NEW)
        assert torch.equal(ids, expected)
        assert runner.captures == 1
        assert runner.cache.encoder_half.dtype == torch.float32
        assert_near(runner.logits, eager_logits(model, inputs, ids)[:, -1])
        assert bool((ids[:, 0] == START).all())


def test_a_prompt_is_followed_by_steps_of_its_own_precision(graphcore_driver: Driver) -> None:
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with make_runner(graphcore_driver) as runner:
        runner.capture(prompt)
        for _ in range(2):
            runner.replay()
        plain = runner.logits.clone()
        keys = [runner._step.key]
        with autocast(graphcore_driver):
            runner.generate(prompt, 2)
            under = runner.logits.clone()
            keys.append(runner._step.key)
        runner.generate(prompt, 2)
        assert torch.equal(runner.logits, plain)
        assert torch.equal(under, under.bfloat16()), "the control: autocast was in force"
        assert keys == [(), (("autocast", "bfloat16"),)]
        assert_near(under, plain)
        assert not torch.equal(under.float(), plain)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_prompts_under_autocast_and_without_it_take_turns_and_each_keeps_its_graphs(
    graphcore_driver: Driver, sampled: bool
) -> None:
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    options: dict[str, Any] = {"prefill_chunk_size": 2}
    if sampled:
        options["sampling"] = Sampling(temperature=0.9, repetition_penalty=1.2)
    with make_runner(graphcore_driver, capture_prefill=True, **options) as runner:
        runner.capture(prompt)
        logits = runner.logits
        for turn in range(6):
            with (
                autocast(graphcore_driver) if turn % 2 else nullcontext(),
                make_runner(graphcore_driver, capture=False, **options) as eager,
            ):
                expected = eager.generate(prompt, NEW, seed=7)
                assert torch.equal(runner.generate(prompt, NEW, seed=7), expected)
                assert torch.equal(runner.logits, eager.logits.to(runner.logits.dtype))
            assert runner.logits is logits
        assert runner.captures == 4, "a step and a chunk, of each precision"


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_prompts_under_autocast_and_without_it_take_turns_too(
    graphcore_driver: Driver, family: str
) -> None:
    model = make_encoder_decoder(family, device=device_of(graphcore_driver))
    inputs = encoder_inputs(family, batch=2, padded=2, device=str(model.device))
    given = {"input_ids": None} | inputs | {"max_new_tokens": NEW}
    sizes = {"max_seq_len": 32, "encoder_len": 12, "batch_size": 2, "driver": graphcore_driver}
    with CUDAGraphAR(model, capture_first_step=True, **sizes) as runner:
        captures = []
        for turn in range(8):
            with (
                autocast(graphcore_driver) if turn % 2 else nullcontext(),
                CUDAGraphAR(model, capture=False, **sizes) as eager,
            ):
                assert torch.equal(runner.generate(**given), eager.generate(**given))
            captures.append(runner.captures)
        # the first turn under autocast makes a buffer for its K and V, which all graphs name
        assert captures[3:] == captures[3:4] * 5


@pytest.mark.parametrize("how", ["captured chunks", "one launch", "padded"])
def test_other_ways_to_decode_give_the_same_ids_under_autocast(
    graphcore_driver: Driver, how: str
) -> None:
    device = device_of(graphcore_driver)
    prompt = make_prompt(6, batch=2, device=device)
    given: dict[str, Any] = {}
    if how == "padded":
        given["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], device=device)
    options: dict[str, Any] = {"batch_size": 2}
    if how == "captured chunks":
        options |= {"prefill_chunk_size": 3, "capture_prefill": True}
    with autocast(graphcore_driver), make_runner(graphcore_driver, **options) as runner:
        with make_runner(graphcore_driver, **(options | {"capture": False})) as eager:
            expected = eager.generate(prompt, NEW, **given)
        decode = runner.generate_in_one_launch if how == "one launch" else runner.generate
        for _ in range(2):
            assert torch.equal(decode(prompt, NEW, **given), expected)


def test_a_changed_weight_is_followed_under_autocast(graphcore_driver: Driver) -> None:
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with autocast(graphcore_driver), make_runner(graphcore_driver) as runner:
        before = runner.generate(prompt, NEW)
        with torch.no_grad():
            runner.model.lm_head.weight.neg_()
        torch.clear_autocast_cache()  # eager forwards in this block use what it keeps
        ids = runner.generate(prompt, NEW)
        assert runner.captures == 1
        assert not torch.equal(ids, before)
        with CUDAGraphAR(
            runner.model, max_seq_len=32, capture=False, driver=graphcore_driver
        ) as eager:
            assert torch.equal(ids, eager.generate(prompt, NEW))


def test_outside_of_autocast_keys_and_values_of_two_dtypes_are_refused() -> None:
    cache = StaticKVCache(1, 1, 2, 8, 4, torch.float32, "cpu")
    keys, values = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="one floating dtype"):
        cache.update(keys, values, 0)
    with torch.autocast("cpu", torch.bfloat16):
        got = cache.update(keys, values * 3, 0)
    assert [tensor.dtype for tensor in got] == [torch.float32] * 2
    assert got[1][:, :, 0].unique().tolist() == [3.0]
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigurationError, match="floating dtype"),
    ):
        cache.update(keys, values.to(torch.int64), 0)
