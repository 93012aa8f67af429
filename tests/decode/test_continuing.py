"""What continues behind held tokens: the same whoever wrote them, and however they were decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

from graphcore.decode import CUDAGraphAR, Sampling, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import LifecycleError

PROMPT, NEW = 5, 30


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the last token, from one forward without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[:, -1]
    return logits


samplings = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.9, top_k=20, seed=11),
}


@pytest.mark.parametrize("sampling", samplings.values(), ids=samplings)
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_what_follows_a_generation_does_not_depend_on_how_often_its_end_was_looked_for(
    graphcore_driver: Driver, sampling: Sampling, capture: bool
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt, more = make_prompt(PROMPT, device=device), make_prompt(3, seed=9, device=device)
    options = {"max_seq_len": 64, "driver": graphcore_driver, "sampling": sampling}
    with CUDAGraphAR(model, capture=capture, **options) as runner:
        end = int(runner.generate(prompt, NEW, eos_token_id=())[0, PROMPT + 2])
        found = []
        for poll_every in (1, 2, 16):
            first = runner.generate(prompt, NEW, eos_token_id=end, poll_every=poll_every)
            assert runner.cache.seen_tokens == int(runner.position) == first.shape[1] < PROMPT + 4
            second = runner.generate(more, 5, eos_token_id=(), keep_cache=True)
            assert runner.cache.seen_tokens == first.shape[1] + 8
            found.append((first.tolist(), second.tolist()))
        one_launch = runner.generate_in_one_launch(prompt, NEW, eos_token_id=end)
        second = runner.generate(more, 5, eos_token_id=(), keep_cache=True)
        found.append((one_launch.tolist(), second.tolist()))
    assert all(each == found[0] for each in found)
    if sampling.is_greedy:
        held = torch.cat([first, more], dim=1)
        assert found[0][1][0][3:] == eager_tokens(model, held, 5)[0, held.shape[1] :].tolist()


def test_behind_what_was_decoded_past_the_end_only_what_needs_no_logits_follows(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt = make_prompt(PROMPT, device=device)
    with CUDAGraphAR(model, max_seq_len=64, driver=graphcore_driver) as runner:
        end = int(runner.generate(prompt, 4)[0, -1])
        ids = runner.generate(prompt, NEW, eos_token_id=end, poll_every=4)
        with pytest.raises(LifecycleError, match="rewound"):
            runner.replay()
        runner.replay(7)
        held = torch.cat([ids, torch.full_like(ids[:, :1], 7)], dim=1)
        torch.testing.assert_close(runner.logits, logits_of(model, held), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_a_forced_token_behind_pads_of_another_runner_does_not_see_them(
    graphcore_driver: Driver, capture: bool
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt = make_prompt(PROMPT, batch=2, device=device)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    cache = StaticKVCache.for_model(model, 32, batch_size=2)
    options = {"driver": graphcore_driver, "capture": capture}
    with (
        CUDAGraphAR(model, cache, **options) as plain,
        CUDAGraphAR(model, cache, **options) as other,
    ):
        plain.generate(prompt, 3)
        cache.reset()
        other.capture(prompt, attention_mask=mask)
        plain.replay(7)
        sevens = torch.full_like(prompt[:, :1], 7)
        alone = logits_of(model, torch.cat([prompt, sevens], dim=1)[:1, 3:])
        torch.testing.assert_close(plain.logits[:1], alone, rtol=1e-4, atol=1e-4)
        assert cache.seen_tokens == int(cache.position) == PROMPT + 1


def test_a_forced_token_that_takes_a_cache_over_stops_the_runner_that_filled_it(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt = make_prompt(PROMPT, device=device)
    cache = StaticKVCache.for_model(model, 32)
    options = {"driver": graphcore_driver}
    with (
        CUDAGraphAR(model, cache, **options) as first,
        CUDAGraphAR(model, cache, **options) as second,
    ):
        first.generate(prompt, 3)
        second.generate(prompt, 3)
        first.replay(7)
        with pytest.raises(LifecycleError, match="another runner has used the cache"):
            second.replay()


def test_a_forced_token_behind_an_emptied_cache_uses_the_weights_of_now(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver) as runner:
        runner.generate(make_prompt(PROMPT, device=device), 3)
        runner.cache.reset()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * -1)
        runner.replay(7)
        ids = torch.full((1, 1), 7, device=device)
        torch.testing.assert_close(runner.logits, logits_of(model, ids), rtol=1e-4, atol=1e-4)


def test_prompts_in_captured_chunks_follow_a_vocabulary_that_grows(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt = make_prompt(8, device=device)
    options = {"prefill_chunk_size": 4, "capture_prefill": True, "driver": graphcore_driver}
    with CUDAGraphAR(model, max_seq_len=32, **options) as runner:
        runner.generate(prompt, 3)
        model.resize_token_embeddings(120)
        assert torch.equal(runner.generate(prompt, 6), eager_tokens(model, prompt, 6))


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_tokens_of_an_emptied_cache_are_not_penalised(
    graphcore_driver: Driver, capture: bool
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    options = {"driver": graphcore_driver, "capture": capture}
    sampling = Sampling(repetition_penalty=1e6)
    with CUDAGraphAR(model, max_seq_len=32, sampling=sampling, **options) as runner:
        runner.generate(make_prompt(PROMPT, device=device), NEW - 10)
        runner.cache.reset()
        found = [int(runner.replay(7))] + [int(runner.replay()) for _ in range(5)]
        seven = torch.full((1, 1), 7, device=device)
        assert runner.generate(seven, 5)[0].tolist() == found


def test_nothing_follows_a_window_that_was_decoded_past_the_end_until_it_is_emptied(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model("mistral-window", device=device)
    prompt, more = make_prompt(PROMPT, device=device), make_prompt(3, seed=9, device=device)
    with CUDAGraphAR(model, max_seq_len=64, driver=graphcore_driver) as runner:
        end = int(runner.generate(prompt, 6)[0, -1])
        wanted = runner.generate(prompt, NEW, eos_token_id=end, poll_every=1)
        follows = runner.generate(more, 5, eos_token_id=(), keep_cache=True)
        assert torch.equal(runner.generate(prompt, NEW, eos_token_id=end), wanted)
        held = runner.cache.seen_tokens
        with pytest.raises(LifecycleError, match="past the end of a generation"):
            runner.replay()
        for follow in (runner.generate, runner.stream, runner.generate_in_one_launch):
            with pytest.raises(LifecycleError, match="poll_every=1 decodes none"):
                follow(more, 5, keep_cache=True)
        for action in (lambda: runner.capture(more), lambda: runner.replay(7)):
            with pytest.raises(LifecycleError, match="past the end of a generation"):
                action()
        assert runner.cache.seen_tokens == held == int(runner.position)
        runner.generate(prompt, NEW, eos_token_id=end, poll_every=1)
        assert torch.equal(runner.generate(more, 5, eos_token_id=(), keep_cache=True), follows)
