"""A runner that is given another cache: rebound or captured again, never a stale replay."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.tensors import cuda_driver

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.decode.cache_binding import BindingRoute, CacheBinding
from graphcore.decode.captured_step import CapturedStep
from graphcore.driver import Driver
from graphcore.errors import (
    CacheTypeError,
    CapacityError,
    CaptureError,
    ConfigurationError,
    LifecycleError,
    StaleGraphError,
    UpdateRefused,
)

NEW = 7
SLOTS = 16


@pytest.fixture(params=["llama", "gpt2"])
def runner(graphcore_driver: Driver, request: pytest.FixtureRequest) -> Iterator[CUDAGraphAR]:
    model = make_model(request.param, device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=SLOTS, driver=graphcore_driver) as made:
        yield made


@pytest.fixture
def llama(graphcore_driver: Driver) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=SLOTS, driver=graphcore_driver) as made:
        yield made


def prompt_of(runner: CUDAGraphAR, tokens: int, seed: int = 0) -> torch.Tensor:
    return make_prompt(tokens, device=str(runner.cache.device), seed=seed)


def fresh_cache(runner: CUDAGraphAR, **options: Any) -> StaticKVCache:
    return StaticKVCache.for_model(runner.model, options.pop("max_seq_len", SLOTS), **options)


def poison(cache: StaticKVCache) -> dict[str, torch.Tensor]:
    """Fills K and V with NaN; what the buffers hold now, by name."""
    for tensor in cache.named_tensors().values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    return {name: tensor.clone() for name, tensor in cache.named_tensors().items()}


def assert_untouched(cache: StaticKVCache, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in cache.named_tensors().items():
        assert torch.equal(tensor.nan_to_num(7.5), before[name].nan_to_num(7.5)), name


def test_a_fresh_cache_is_rebound_and_the_poisoned_one_before_is_neither_read_nor_written(
    runner: CUDAGraphAR,
) -> None:
    first, second = prompt_of(runner, 5), prompt_of(runner, 4, seed=3)
    expected = eager_tokens(runner.model, second, NEW)
    runner.generate(first, NEW)
    token, logits = runner.token.data_ptr(), runner.logits.data_ptr()
    old, other = runner.cache, fresh_cache(runner)
    poisoned = poison(old)
    assert torch.equal(runner.generate(second, NEW, cache=other), expected)
    assert_untouched(old, poisoned)
    assert runner.cache is other
    assert (runner.captures, runner.rebinds) == (1, 1)
    assert runner.last_binding is not None
    assert runner.last_binding.route is BindingRoute.REBOUND
    assert other.seen_tokens == int(other.position) == 4 + NEW
    assert (runner.token.data_ptr(), runner.logits.data_ptr()) == (token, logits)


def test_caches_that_take_turns_each_decode_as_eager_and_leave_the_others_alone(
    runner: CUDAGraphAR,
) -> None:
    caches = [runner.cache, fresh_cache(runner), fresh_cache(runner)]
    prompts = [prompt_of(runner, 3 + seed, seed=seed) for seed in range(3)]
    expected = [eager_tokens(runner.model, prompt, NEW) for prompt in prompts]
    for turn in (0, 1, 0, 2, 1, 0):
        others = [cache for cache in caches if cache is not caches[turn]]
        held = [
            {name: tensor.clone() for name, tensor in cache.named_tensors().items()}
            for cache in others
        ]
        decoded = runner.generate(prompts[turn], NEW, cache=caches[turn])
        assert torch.equal(decoded, expected[turn])
        for cache, before in zip(others, held, strict=True):
            assert_untouched(cache, before)
    assert (runner.captures, runner.rebinds) == (1, 5)


def test_two_conversations_take_turns_by_their_caches_behind_what_each_holds(
    llama: CUDAGraphAR,
) -> None:
    prompts = [prompt_of(llama, 4), prompt_of(llama, 5, seed=2)]
    caches = [llama.cache, fresh_cache(llama)]
    said = []
    for prompt, cache in zip(prompts, caches, strict=True):
        said.append(llama.generate(prompt, 3, cache=cache, eos_token_id=()))
    for index in (0, 1, 0):
        # the last token was chosen and forwarded: what comes next is asked by a prompt of one
        more = prompt_of(llama, 1, seed=9 + index)
        expected = eager_tokens(llama.model, torch.cat([said[index], more], dim=1), 2)
        got = llama.generate(more, 2, cache=caches[index], keep_cache=True)
        said[index] = expected
        assert torch.equal(got[:, 1:], expected[:, -2:])
    assert llama.captures == 1


def test_a_forced_token_continues_behind_what_the_other_cache_holds(llama: CUDAGraphAR) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)
    llama.capture(prompt)
    other = fresh_cache(llama)
    with CUDAGraphAR(llama.model, other, driver=llama.driver, capture=False) as filling:
        filling.capture(prompt)
    llama.use(other)
    with pytest.raises(LifecycleError, match="given another cache: expected a prompt"):
        llama.replay()
    assert int(llama.replay(int(expected[0, 5]))) == int(expected[0, 5])
    assert [int(llama.replay()) for _ in range(NEW - 1)] == expected[0, 6:].tolist()
    assert llama.captures == 1


@pytest.mark.parametrize("how", ["capture", "stream", "one launch"])
def test_every_way_to_begin_a_generation_takes_a_cache(llama: CUDAGraphAR, how: str) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)[0, 5:].tolist()
    llama.generate(prompt, 2)
    other = fresh_cache(llama)
    if how == "capture":
        llama.capture(prompt, cache=other)
        tokens = [int(llama.replay()) for _ in range(NEW)]
    elif how == "stream":
        tokens = [int(ids) for ids in llama.stream(prompt, NEW, cache=other)]
    else:
        llama.generate_in_one_launch(prompt, 2)
        poisoned = poison(llama.cache)
        old = llama.cache
        tokens = llama.generate_in_one_launch(prompt, NEW, cache=other)[0, 5:].tolist()
        assert_untouched(old, poisoned)
    assert tokens == expected
    assert llama.cache is other


def test_a_cache_given_before_the_first_prompt_needs_nothing(llama: CUDAGraphAR) -> None:
    other = fresh_cache(llama)
    first = weakref.ref(llama.cache)
    binding = llama.use(other)
    assert (binding.route, binding.reason) == (BindingRoute.SAME, "no step is captured yet")
    gc.collect()
    assert first() is None
    prompt = prompt_of(llama, 5)
    assert torch.equal(llama.generate(prompt, NEW), eager_tokens(llama.model, prompt, NEW))
    assert llama.use(other).reason == "it is the runner's cache"
    assert (llama.captures, llama.rebinds) == (1, 0)


def test_a_runner_without_graphs_takes_other_caches(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=SLOTS, driver=graphcore_driver, capture=False) as runner:
        prompt = prompt_of(runner, 5)
        expected = eager_tokens(model, prompt, NEW)
        runner.generate(prompt, NEW)
        old = runner.cache
        poisoned = poison(old)
        assert torch.equal(runner.generate(prompt, NEW, cache=fresh_cache(runner)), expected)
        assert_untouched(old, poisoned)


# ---- caches of another kind ---------------------------------------------------------------------

other_kinds: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"max_seq_len": 24}, "max_seq_len is 24 instead of 16"),
    "batch": ({"batch_size": 2}, "batch_size is 2 instead of 1"),
    "dtype": ({"dtype": torch.float16}, "not both caches have: scratch"),
}


@pytest.mark.parametrize("kind", other_kinds)
def test_a_cache_of_another_kind_is_captured_again_and_the_decision_says_in_what_it_differs(
    llama: CUDAGraphAR, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, reason = other_kinds[kind]
    prompt = prompt_of(llama, 5)
    llama.generate(prompt, NEW)
    old = llama.cache
    other = fresh_cache(llama, **options)
    poisoned = poison(old)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        binding = llama.use(other)
    assert binding.route is BindingRoute.DROPPED
    assert binding.dropped == 1
    assert binding.reason.startswith(reason)
    assert f"the runner works on another cache: {binding}" in caplog.text
    assert llama.graph is None
    rows = prompt.expand(other.batch_size, -1).contiguous()
    with CUDAGraphAR(
        llama.model, fresh_cache(llama, **options), driver=llama.driver, capture=False
    ) as eager:
        expected = eager.generate(rows, NEW)
    assert torch.equal(llama.generate(rows, NEW), expected)
    assert llama.token.shape == (other.batch_size,)
    assert_untouched(old, poisoned)
    assert (llama.captures, llama.rebinds) == (2, 0)
    assert torch.equal(
        llama.generate(prompt, NEW, cache=old), eager_tokens(llama.model, prompt, NEW)
    )


def test_what_a_refused_cache_leaves_is_the_runner_as_it_was(llama: CUDAGraphAR) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)[0, 5:].tolist()
    llama.capture(prompt)
    cache = llama.cache
    device = cache.device
    wrong: list[tuple[Any, type[Exception]]] = [
        (object(), CacheTypeError),
        (StaticKVCache(2, 1, 2, SLOTS, 16, torch.float32, device), ConfigurationError),
        (StaticKVCache(3, 1, 4, SLOTS, 16, torch.float32, device), ConfigurationError),
        (fresh_cache(llama, max_seq_len=65), ConfigurationError),
    ]
    tokens = []
    for other, error in wrong:
        tokens.append(int(llama.replay()))
        with pytest.raises(error):
            llama.use(other)
        assert llama.cache is cache
    with graphcore.capture(driver=llama.driver), pytest.raises(CaptureError, match=r"use\(\)"):
        llama.use(cache)
    tokens += [int(llama.replay()) for _ in range(NEW - len(tokens))]
    assert tokens == expected
    llama.close()
    with pytest.raises(LifecycleError, match=r"use\(\): expected an open runner"):
        llama.use(cache)


# ---- graphs that cannot be rebound --------------------------------------------------------------


def test_where_the_graph_takes_no_other_buffers_the_step_is_captured_again(
    llama: CUDAGraphAR, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)
    llama.generate(prompt, NEW)
    old, other = llama.cache, fresh_cache(llama)

    def refuse(*_: Any) -> None:
        raise UpdateRefused("copies of several rows")

    with monkeypatch.context() as patched:
        patched.setattr(CapturedStep, "rebind", refuse)
        binding = llama.use(other)
    assert binding == CacheBinding(
        BindingRoute.DROPPED, "the graph takes no other buffers: copies of several rows", dropped=1
    )
    poisoned = poison(old)
    assert torch.equal(llama.generate(prompt, NEW), expected)
    assert_untouched(old, poisoned)
    assert (llama.captures, llama.rebinds) == (2, 0)


def _before_rebinding(rebind: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    return interrupted


def _after_rebinding(rebind: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(step: CapturedStep, buffers: Any) -> None:
        rebind(step, buffers)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("interrupt", [_before_rebinding, _after_rebinding])
def test_an_interrupted_change_of_caches_is_captured_again_on_either_cache(
    llama: CUDAGraphAR, monkeypatch: pytest.MonkeyPatch, interrupt: Any
) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)
    llama.generate(prompt, NEW)
    old, other = llama.cache, fresh_cache(llama)
    with monkeypatch.context() as patched:
        patched.setattr(CapturedStep, "rebind", interrupt(CapturedStep.rebind))
        with pytest.raises(KeyboardInterrupt):
            llama.use(other)
    with pytest.raises(LifecycleError, match="the last change of caches failed"):
        llama.replay()
    assert llama.cache is old
    assert torch.equal(llama.generate(prompt, NEW), expected)
    assert torch.equal(llama.generate(prompt, NEW, cache=other), expected)
    assert llama.captures == 2


def test_a_stale_graph_is_not_rebound_but_captured_again(llama: CUDAGraphAR) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)
    llama.capture(prompt)
    llama.cache.layers[2].keys = llama.cache.layers[2].keys.clone()
    with pytest.raises(StaleGraphError, match="layer 2 keys"):
        llama.replay()
    binding = llama.use(fresh_cache(llama))
    assert binding.route is BindingRoute.DROPPED
    assert "layer 2 keys" in binding.reason
    assert torch.equal(llama.generate(prompt, NEW), expected)
    # after the change the new cache is watched as the first one was
    llama.cache.layers[1].values = llama.cache.layers[1].values.clone()
    with pytest.raises(StaleGraphError, match="layer 1 values"):
        llama.replay()


def test_a_cache_replaced_behind_the_runners_back_is_not_replayed_after_a_rebind_either(
    llama: CUDAGraphAR,
) -> None:
    prompt = prompt_of(llama, 5)
    llama.generate(prompt, NEW)
    old, other = llama.cache, fresh_cache(llama)
    llama.capture(prompt, cache=other)
    old.layers[0].keys = old.layers[0].keys.clone()  # is nobody's any more
    llama.replay()
    other.layers[0].keys = other.layers[0].keys.clone()
    with pytest.raises(StaleGraphError, match="layer 0 keys"):
        llama.replay()


def test_a_stream_of_before_the_change_does_not_go_on_in_the_other_cache(
    llama: CUDAGraphAR,
) -> None:
    stream = llama.stream(prompt_of(llama, 5), NEW)
    next(stream)
    llama.use(fresh_cache(llama))
    with pytest.raises(LifecycleError, match="another generation has begun"):
        next(stream)


# ---- what is kept -------------------------------------------------------------------------------


def test_nothing_keeps_a_cache_that_was_exchanged(runner: CUDAGraphAR) -> None:
    prompt = prompt_of(runner, 5)
    for _ in range(3):
        runner.generate(prompt, NEW)
        old = runner.cache
        kept = [weakref.ref(old), weakref.ref(old.position)]
        kept += [weakref.ref(layer.keys) for layer in old.layers]
        runner.use(fresh_cache(runner))
        assert not old.is_captured
        del old
        gc.collect()
        assert [found() for found in kept] == [None] * len(kept)
    assert runner.captures == 1
    assert runner.cache.is_captured


@pytest.mark.gpu
def test_the_memory_of_a_cache_that_was_exchanged_is_free() -> None:
    driver = cuda_driver()
    model = make_model(device=device_of(driver))
    with CUDAGraphAR(model, max_seq_len=64, batch_size=64, driver=driver) as runner:
        prompt = make_prompt(5, batch=64, device=device_of(driver))
        expected = runner.generate(prompt, NEW)
        kv_bytes = runner.cache.kv_bytes
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated()
        for _ in range(4):
            other = StaticKVCache.for_model(model, 64, batch_size=64)
            assert torch.cuda.memory_allocated() >= used + kv_bytes
            assert torch.equal(runner.generate(prompt, NEW, cache=other), expected)
            del other
            gc.collect()
            assert torch.cuda.memory_allocated() <= used + kv_bytes // 8
        assert (runner.captures, runner.rebinds) == (1, 4)


def test_the_fingerprint_is_the_same_by_names_after_a_rebind(llama: CUDAGraphAR) -> None:
    prompt = prompt_of(llama, 5)
    llama.generate(prompt, NEW)
    before = llama.fingerprint()
    llama.generate(prompt, NEW, cache=fresh_cache(llama))
    assert llama.fingerprint() == before
    assert llama.executable is not None
    assert llama.executable.check() == []


# ---- several runners ----------------------------------------------------------------------------


def test_two_runners_share_one_cache_and_each_keeps_its_own(llama: CUDAGraphAR) -> None:
    prompt = prompt_of(llama, 5)
    expected = eager_tokens(llama.model, prompt, NEW)
    with CUDAGraphAR(llama.model, max_seq_len=SLOTS, driver=llama.driver) as other:
        own = other.cache
        for runner in (llama, other):
            runner.generate(prompt, 2)
        other.use(llama.cache)
        assert torch.equal(other.generate(prompt, NEW), expected)
        with pytest.raises(LifecycleError, match="another runner has used the cache"):
            llama.replay()
        assert torch.equal(llama.generate(prompt, NEW), expected)
        assert torch.equal(other.generate(prompt, NEW, cache=own), expected)
        assert llama.captures == other.captures == 1
        llama.cache.reset()
        llama.capture(prompt)
        other.generate(prompt, 2)  # on its own cache again: the first runner's logits stay
        assert [int(llama.replay()) for _ in range(NEW)] == expected[0, 5:].tolist()


def test_the_capacity_of_the_new_cache_counts(llama: CUDAGraphAR) -> None:
    prompt = prompt_of(llama, 5)
    llama.generate(prompt, NEW)
    with pytest.raises(CapacityError, match="max_seq_len is 8"):
        llama.generate(prompt, NEW, cache=fresh_cache(llama, max_seq_len=8))
    llama.capture(prompt)
    for _ in range(3):
        llama.replay()
    with pytest.raises(CapacityError, match="max_seq_len is 8 tokens and 8 are held"):
        llama.replay()
