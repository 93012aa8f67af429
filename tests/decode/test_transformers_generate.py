"""transformers' own generate with a static cache gives the tokens of its DynamicCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import ARCHITECTURES, device_of, make_model, make_prompt

from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver
from graphcore.errors import CapacityError, LifecycleError

NEW = 9
TOKENS = 5


@pytest.fixture
def device(graphcore_driver: Driver) -> str:
    """The drivers stand for their devices: nothing is captured unless a test says so."""
    return device_of(graphcore_driver)


def decoded(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """What transformers' generate gives; random choices are the same in every call."""
    torch.manual_seed(5)
    ids: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), **{"max_new_tokens": NEW, **options}
    )
    return ids


def with_cache(model: Any, cache: StaticKVCache) -> dict[str, Any]:
    """The options that give ``cache``, under the keyword of this version of transformers."""
    return {str(compat.cache_keyword(model)): cache, "disable_compile": True}


ways: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.9, "repetition_penalty": 1.3},
    "beam search": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", ways)
def test_every_way_to_decode_gives_the_tokens_of_a_dynamic_cache_twice_with_a_reset_between(
    device: str, way: str
) -> None:
    model = make_model(device=device)
    cache = StaticKVCache.for_model(model, 32, batch_size=ways[way].get("num_beams", 1))
    buffers = {name: tensor.data_ptr() for name, tensor in cache.named_tensors().items()}
    for seed in range(2):
        prompt = make_prompt(TOKENS, device=device, seed=seed)
        expected = decoded(model, prompt, **ways[way])
        assert torch.equal(
            decoded(model, prompt, **with_cache(model, cache), **ways[way]), expected
        )
        assert type(cache.seen_tokens) is int
        assert cache.seen_tokens == int(cache.position) == TOKENS + NEW - 1
        cache.reset()
    assert {name: each.data_ptr() for name, each in cache.named_tensors().items()} == buffers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_beams_are_reordered_in_place_in_every_architecture(device: str, architecture: str) -> None:
    model = make_model(architecture, device=device)
    prompt = make_prompt(TOKENS, batch=2, device=device)
    cache = StaticKVCache.for_model(model, 32, batch_size=6)
    options = {"num_beams": 3, "length_penalty": 0.5}
    expected = decoded(model, prompt, **options)
    assert torch.equal(decoded(model, prompt, **with_cache(model, cache), **options), expected)
    assert not torch.equal(decoded(model, prompt), expected)  # beams matter here


def test_a_conversation_goes_on_behind_what_the_cache_holds(device: str) -> None:
    model = make_model(device=device)
    cache = StaticKVCache.for_model(model, 48)
    said = make_prompt(TOKENS, device=device)
    for turn in range(3):
        expected = decoded(model, said)
        assert torch.equal(decoded(model, said, **with_cache(model, cache)), expected)
        assert cache.seen_tokens == expected.shape[1] - 1
        said = torch.cat([expected, make_prompt(3, device=device, seed=turn + 1)], dim=1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_prompts_in_transformers_own_chunks_give_the_same_tokens(
    device: str, architecture: str
) -> None:
    model = make_model(architecture, device=device)
    cache = StaticKVCache.for_model(model, 32)
    for seed in range(2):
        prompt = make_prompt(TOKENS, device=device, seed=seed)
        options = {"prefill_chunk_size": 2, **with_cache(model, cache)}
        assert torch.equal(decoded(model, prompt, **options), decoded(model, prompt))
        cache.reset()


def test_a_cache_that_called_itself_not_compileable_would_be_read_without_masks(
    device: str,
) -> None:
    """Why ours says it is: transformers leaves masks of single tokens out for the others."""

    class Without(StaticKVCache):
        is_compileable = False

    model = make_model(device=device)
    model.set_attn_implementation("sdpa")
    prompt = make_prompt(TOKENS, device=device)
    logits = []
    for kind in (StaticKVCache, Without):
        cache = kind.for_model(model, 32)
        keyword = {str(compat.cache_keyword(model)): cache}
        with torch.no_grad():
            model(prompt, **keyword)
            logits.append(model(prompt[:, -1:], **keyword).logits)
    assert not torch.allclose(*logits, atol=1e-2)


def test_more_tokens_than_fit_are_refused_and_the_cache_is_usable_after_a_reset(
    device: str,
) -> None:
    model = make_model(device=device)
    prompt = make_prompt(TOKENS, device=device)
    cache = StaticKVCache.for_model(model, TOKENS + 3)
    with pytest.raises(CapacityError, match="capacity is 8 tokens and 8 are held"):
        decoded(model, prompt, **with_cache(model, cache))
    cache.reset()
    short = decoded(model, prompt, max_new_tokens=4)
    again = decoded(model, prompt, **with_cache(model, cache), max_new_tokens=4)
    assert torch.equal(again, short)


def test_a_captured_cache_still_serves_greedy_and_refuses_what_moves_its_rows_and_tokens(
    graphcore_driver: Driver,
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(TOKENS, batch=2, device=device_of(graphcore_driver))
    cache = StaticKVCache.for_model(model, 32, batch_size=2)
    expected = decoded(model, prompt)
    with CUDAGraphAR(model, cache, driver=graphcore_driver) as runner:
        assert torch.equal(runner.generate(prompt, NEW), expected)
        cache.reset()
        assert torch.equal(decoded(model, prompt, **with_cache(model, cache)), expected)
        with pytest.raises(LifecycleError, match="expected a prompt, or a forced token"):
            runner.replay()  # somebody else wrote the cache
        cache.reset()
        with pytest.raises(LifecycleError, match=r"reorder_cache: refused.*beam search reorders"):
            decoded(model, prompt[:1], **with_cache(model, cache), num_beams=2)
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert runner.captures == 1
    cache.reset()  # with the runner, the graph is gone
    beams = decoded(model, prompt[:1], num_beams=2)
    assert torch.equal(decoded(model, prompt[:1], **with_cache(model, cache), num_beams=2), beams)
