"""A runner's life: order of calls, capacity, stale buffers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.decode_runners import NEW, PROMPT, assert_works

from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import (
    CapacityError,
    ConfigurationError,
    CudaError,
    LifecycleError,
    StaleGraphError,
)

# ---- order of calls -----------------------------------------------------------------------------


def test_nothing_works_before_a_prompt_but_what_brings_one(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    assert runner.graph is None
    assert runner.executable is None
    for call in (runner.replay, lambda: runner.replay(3), lambda: runner.logits):
        with pytest.raises(LifecycleError, match="expected a prompt first"):
            call()
    assert_works(runner, prompt, expected)


def test_nothing_works_on_a_closed_runner_and_closing_twice_is_allowed(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    runner.capture(prompt)
    executable = runner.executable
    runner.close()
    runner.close()
    for call in (
        runner.replay,
        lambda: runner.replay(3),
        lambda: runner.capture(prompt),
        lambda: runner.generate(prompt, 2),
        lambda: runner.stream(prompt, 2),
    ):
        with pytest.raises(LifecycleError, match="the runner is closed"):
            call()
    assert runner.graph is None
    with pytest.raises(LifecycleError):
        executable.launch()
    assert not runner.cache.is_captured


def test_a_closed_runner_leaves_its_cache_to_the_next_one(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.generate(prompt, 2)
    runner.close()
    with CUDAGraphAR(runner.model, runner.cache, driver=runner.driver) as other:
        assert_works(other, prompt, expected)


def test_a_runner_that_is_dropped_frees_its_cache(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    runner = CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver)
    runner.generate(make_prompt(3, device=device_of(graphcore_driver)), 2)
    held = weakref.ref(runner.cache.layers[0].keys)
    graphcore_driver.synchronize()  # until then the last step may use the cache
    runner.close()
    del runner
    gc.collect()
    assert held() is None


def test_a_second_generation_ends_a_stream_that_was_left_half_way(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream(prompt, NEW)
    assert int(next(stream)) == int(expected[0, PROMPT])
    assert_works(runner, prompt, expected)
    with pytest.raises(LifecycleError, match="another generation has begun"):
        next(stream)


def test_a_second_runner_on_one_cache_takes_it_over_from_the_first(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    with CUDAGraphAR(runner.model, runner.cache, driver=runner.driver) as other:
        assert_works(other, prompt, expected)
        with pytest.raises(LifecycleError, match="another runner has used the cache"):
            runner.replay()
    assert_works(runner, prompt, expected)


def test_after_a_reset_a_replay_needs_a_prompt_or_a_forced_token(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    runner.cache.reset()
    with pytest.raises(LifecycleError, match="the cache was reset: expected a prompt, or a forced"):
        runner.replay()
    for token in prompt[0]:
        runner.replay(int(token))
    tokens = [int(runner.replay()) for _ in range(NEW)]
    assert tokens == expected[0, PROMPT:].tolist()
    assert runner.captures == 1


def test_after_a_rewind_a_forced_token_continues_from_there(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.generate(prompt, NEW)
    runner.cache.rewind(PROMPT)
    with pytest.raises(LifecycleError, match="rewound to 5 tokens"):
        runner.replay()
    runner.replay(int(expected[0, PROMPT]))
    assert int(runner.replay()) == int(expected[0, PROMPT + 1])


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("emptied", ["reset", "rewound", "another cache"])
@pytest.mark.parametrize("token", [97, -1, 1.0], ids=str)
def test_a_forced_token_that_is_refused_leaves_no_old_logits_to_choose_from(
    graphcore_driver: Driver, captured: bool, emptied: str, token: Any
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(PROMPT, device=str(model.device))
    with CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver, capture=captured) as runner:
        runner.capture(prompt)
        if emptied == "another cache":
            runner.use(StaticKVCache.for_model(model, 16))
        else:
            runner.cache.rewind(0 if emptied == "reset" else 2)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="token: expected"):
                runner.replay(token)
            with pytest.raises(LifecycleError, match="expected a prompt"):
                runner.replay()
        for each in prompt[0, runner.cache.seen_tokens :]:
            runner.replay(int(each))
        assert int(runner.replay()) == int(eager_tokens(model, prompt, 1)[0, -1])


def test_a_forced_token_whose_launch_fails_leaves_no_old_logits_to_choose_from() -> None:
    driver = EmulatedDriver()
    model, prompt = make_model(), make_prompt(PROMPT)
    with CUDAGraphAR(model, max_seq_len=16, driver=driver) as runner:
        runner.capture(prompt)
        runner.cache.reset()
        driver.faults.inject("launch_graph")
        with pytest.raises(CudaError):
            runner.replay(int(prompt[0, 0]))
        with pytest.raises(LifecycleError, match="the cache was reset: expected a prompt"):
            runner.replay()
        for each in prompt[0]:
            runner.replay(int(each))
        assert int(runner.replay()) == int(eager_tokens(model, prompt, 1)[0, -1])


# ---- capacity -----------------------------------------------------------------------------------


def test_a_replay_past_the_end_is_refused_and_the_next_generation_is_right(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    for _ in range(16 - PROMPT):
        runner.replay()
    before = {name: held.clone() for name, held in runner.named_tensors().items()}
    for token in (None, 3):
        with pytest.raises(CapacityError, match=r"max_seq_len is 16.*needs 17") as caught:
            runner.replay(token)
        assert isinstance(caught.value, ValueError)
    for name, held in runner.named_tensors().items():
        assert torch.equal(held, before[name]), name
    assert_works(runner, prompt, expected)
    assert runner.captures == 1


# ---- stale buffers ------------------------------------------------------------------------------


def _rebind_keys(cache: StaticKVCache) -> None:
    cache.layers[2].keys = cache.layers[2].keys.clone()


def _cast_keys(cache: StaticKVCache) -> None:
    cache.layers[1].keys = cache.layers[1].keys.to(torch.float16)


def _cast_values_to_fp8(cache: StaticKVCache) -> None:
    cache.layers[0].values = cache.layers[0].values.to(torch.float8_e4m3fn)


def _cast_values_to_int8(cache: StaticKVCache) -> None:
    cache.layers[0].values = cache.layers[0].values.to(torch.int8)


def _rebind_position(cache: StaticKVCache) -> None:
    cache.position = cache.position.clone()


stale_cases = [
    (_rebind_keys, "layer 2 keys"),
    (_cast_keys, "layer 1 keys.*float16"),
    (_cast_values_to_fp8, "layer 0 values.*float8"),
    (_cast_values_to_int8, "layer 0 values.*int8"),
    (_rebind_position, "position"),
]


@pytest.mark.parametrize(("change", "named"), stale_cases, ids=[case[1] for case in stale_cases])
def test_a_buffer_replaced_since_capture_is_named_and_nothing_is_launched(
    runner: CUDAGraphAR, prompt: torch.Tensor, change: Any, named: str
) -> None:
    runner.capture(prompt)
    change(runner.cache)
    before = {name: held.clone() for name, held in runner.named_tensors().items()}
    for token in (None, 3):
        with pytest.raises(StaleGraphError, match=named):
            runner.replay(token)
    for name, held in runner.named_tensors().items():
        assert torch.equal(held, before[name]), name
    assert runner.cache.seen_tokens == PROMPT


def _set_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.clone()


def _resize(tensor: torch.Tensor) -> None:
    tensor.resize_(tensor.shape[0], tensor.shape[1], 4 * tensor.shape[2], tensor.shape[3])


@pytest.mark.parametrize("change", [_set_data, _resize], ids=["data", "resized"])
def test_memory_exchanged_behind_the_setters_is_found_by_check(
    runner: CUDAGraphAR, prompt: torch.Tensor, change: Any
) -> None:
    runner.capture(prompt)
    assert runner.executable.check() == []
    assert runner.graph is not None
    with runner.graph.instantiate(guard="full") as guarded:
        guarded.launch()
        runner.driver.synchronize()
        position = int(runner.position)
        change(runner.cache.layers[1].keys)
        assert "layer 1 keys" in {stale.label for stale in runner.executable.check()}
        with pytest.raises(StaleGraphError, match="layer 1 keys"):
            guarded.launch()
        runner.driver.synchronize()
        assert int(runner.position) == position, "nothing was launched"


def test_the_next_prompt_captures_again_where_the_buffers_changed(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    _rebind_keys(runner.cache)
    assert_works(runner, prompt, expected)
    assert runner.captures == 2


def test_a_buffer_of_another_kind_is_refused_until_a_fitting_one_is_back(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    fitting = runner.cache.layers[0].values, runner.cache.position
    _cast_values_to_int8(runner.cache)
    with pytest.raises(ConfigurationError, match=r"layer 0 values: expected torch.float32.*int8"):
        runner.generate(prompt, 2)
    runner.cache.layers[0].values = fitting[0]
    runner.cache.position = torch.zeros(1, dtype=torch.int32, device=runner.cache.device)
    with pytest.raises(ConfigurationError, match=r"position: expected a 0-d torch.int64.*int32"):
        runner.generate(prompt, 2)
    runner.cache.position = fitting[1]
    assert_works(runner, prompt, expected)


def test_a_captured_cache_refuses_reorder_and_crop_with_the_reason(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    with pytest.raises(LifecycleError, match=r"reorder_cache: refused.*beam search"):
        runner.cache.reorder_cache(torch.tensor([0]))
    with pytest.raises(LifecycleError, match="crop: refused"):
        runner.cache.crop(-1)
    with pytest.raises(LifecycleError, match="crop the cache, not one layer"):
        runner.cache.layers[0].crop(-1)
    assert runner.cache.is_captured
    assert not runner.cache.is_croppable
    assert [int(runner.replay()) for _ in range(NEW)] == expected[0, PROMPT:].tolist()
