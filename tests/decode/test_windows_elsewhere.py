"""Models with a sliding window where caches are exchanged, shared, or given to transformers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

from graphcore.decode import CUDAGraphAR, DecodeBuckets, StaticKVCache
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver

NEW = 20  # far past the window

# every layer has a window; every other one has
ARCHITECTURES = ("mistral-window", "gemma2")


@pytest.fixture(params=ARCHITECTURES)
def model(graphcore_driver: Driver, request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, device=device_of(graphcore_driver))


def test_caches_that_take_turns_wrap_each_by_itself(
    model: Any, graphcore_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "graphcore")  # says why anything is captured again
    prompts = [make_prompt(3 + seed, device=str(model.device), seed=seed) for seed in range(2)]
    expected = [eager_tokens(model, prompt, NEW) for prompt in prompts]
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver) as runner:
        caches = [runner.cache, StaticKVCache.for_model(model, 32)]
        for turn in (0, 1, 0, 1):
            other = caches[1 - turn]
            before = {name: each.clone() for name, each in other.named_tensors().items()}
            decoded = runner.generate(prompts[turn], NEW, cache=caches[turn])
            assert torch.equal(decoded, expected[turn])
            for name, each in other.named_tensors().items():
                assert torch.equal(each, before[name]), name
        assert (runner.captures, runner.rebinds) == (1, 3)


def test_buckets_below_and_above_the_window_share_its_ring(
    model: Any, graphcore_driver: Driver
) -> None:
    device = str(model.device)
    with DecodeBuckets(model, [6, 12, 32], [4], driver=graphcore_driver, progress=False) as buckets:
        prompt = make_prompt(5, batch=3, device=device)
        expected = eager_tokens(model, prompt, NEW)
        for grow in (False, True, False):
            result = buckets.generate(prompt, NEW, grow=grow)
            assert torch.equal(result.ids, expected)
            assert len(result.path) == (3 if grow else 1)
        mask = torch.ones_like(prompt)
        mask[1, :2] = 0
        result = buckets.generate(prompt, NEW, grow=True, attention_mask=mask)
        for row, pads in enumerate((0, 2, 0)):
            alone = eager_tokens(model, prompt[row : row + 1, pads:], NEW)
            assert torch.equal(result.new_ids[row], alone[0, 5 - pads :])


@pytest.mark.parametrize("beams", [1, 3])
def test_transformers_own_generate_goes_past_the_window_twice(model: Any, beams: int) -> None:
    cache = StaticKVCache.for_model(model, 32, batch_size=beams)
    options = {str(compat.cache_keyword(model)): cache, "disable_compile": True}
    for seed in range(2):
        prompt = make_prompt(5, device=str(model.device), seed=seed)
        expected = eager_tokens(model, prompt, NEW, num_beams=beams)
        assert torch.equal(eager_tokens(model, prompt, NEW, num_beams=beams, **options), expected)
        cache.reset()
