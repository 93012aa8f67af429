"""What stands around a runner's calls changes no token: modes, default devices, aliases, copies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.decode_models import eager_tokens, make_model, make_prompt
from helpers.encoder_decoder_models import encoder_inputs, make_encoder_decoder
from helpers.interrupts import press_at

from graphcore.decode import CUDAGraphAR, Sampling, StaticKVCache
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import ConfigurationError, LifecycleError, OverwrittenOutputError

NEW = 8
_sampling = Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> torch.Tensor:
    return eager_tokens(model, make_prompt(5), NEW)


def make_runner(model: Any, **options: Any) -> CUDAGraphAR:
    return CUDAGraphAR(model, driver=EmulatedDriver(), **({"max_seq_len": 32} | options))


@contextmanager
def default_device_without_data() -> Iterator[None]:
    """As "cuda" is to host tensors, and more: nothing can be copied from it."""
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(before)


@contextmanager
def default_dtype_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


around = {
    "default device": default_device_without_data,
    "default dtype": default_dtype_float64,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
}


def all_ways(model: Any, prompt: torch.Tensor, capture: bool) -> list[list[int]]:
    """Ids of every way to decode, and of a forced token behind them."""
    found = []
    with make_runner(model, sampling=_sampling, capture=capture) as runner:
        options = {"eos_token_id": (3, 4), "seed": 1}
        for generate in (runner.generate, runner.generate_in_one_launch):
            found += generate(prompt, NEW, **options).tolist()
        for stream in (runner.stream, runner.stream_in_one_launch):
            found += [list(map(int, stream(prompt, NEW, **options)))]
        found.append([int(runner.replay(7)), int(runner.replay())])
        runner.capture(prompt, seed=2)
        found.append([int(runner.replay())])
    return found


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("name", around)
def test_modes_and_defaults_of_torch_change_no_token(model: Any, name: str, capture: bool) -> None:
    prompt = make_prompt(5)
    wanted = all_ways(model, prompt, capture)
    with around[name]():
        assert all_ways(model, prompt, capture) == wanted
    assert len(set(map(str, wanted))) > 2


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_a_stream_goes_on_where_inference_mode_ends(
    model: Any, expected: torch.Tensor, capture: bool
) -> None:
    with make_runner(model, capture=capture) as runner:
        with torch.inference_mode():
            stream = runner.stream(make_prompt(5), NEW)
            first = next(stream)
        ids = torch.stack([first, *stream], dim=1)
    assert torch.equal(ids, expected[:, 5:])


def test_the_runners_own_token_can_be_the_next_prompt(model: Any) -> None:
    with make_runner(model) as runner:
        runner.generate(make_prompt(5), 3)
        token = runner.replay()
        kept = token.clone()[:, None]
        assert torch.equal(runner.generate(token[:, None], 4), eager_tokens(model, kept, 4))


def test_a_graph_does_not_use_the_casts_that_autocast_keeps_for_its_block() -> None:
    model = make_model("gpt2")
    seen = []

    def look(*_: Any) -> None:
        seen.append(torch.is_autocast_cache_enabled())

    with torch.autocast("cpu", torch.bfloat16):
        with make_runner(model, prefill_chunk_size=3, capture_prefill=True) as runner:
            runner.capture(make_prompt(2))
            model.transformer.h[0].mlp.register_forward_hook(look)
            runner.cache.layers[0].keys = runner.cache.layers[0].keys.clone()
            runner.capture(make_prompt(3, seed=1))
        assert torch.is_autocast_cache_enabled()
    # a chunk's warm-up and capture, a step's two warm-ups and capture
    assert seen == [False] * 5


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_a_dropped_runner_leaves_no_memory_to_the_collector(model: Any, capture: bool) -> None:
    runner = make_runner(model, capture=capture)
    runner.generate(make_prompt(5), 2)
    runner.generate_in_one_launch(make_prompt(5), 2)
    cache = weakref.ref(runner.cache)
    gc.collect()
    gc.disable()
    try:
        del runner
        assert cache() is None
    finally:
        gc.enable()


def test_ctrl_c_at_any_line_of_close_leaves_a_runner_that_can_be_closed(model: Any) -> None:
    files = ("decode/runner.py", "decode/variants.py", "decode/captured_step.py")

    def made() -> CUDAGraphAR:
        runner = make_runner(model)
        runner.generate(make_prompt(5), 2)
        return runner

    places, _ = press_at(0, made().close, files)
    assert places > 15
    for number in range(1, places + 1, 2):
        runner = made()
        press_at(number, runner.close, files)
        runner.close()
        assert runner.executable is None
        assert not runner.cache.is_captured
        with pytest.raises(LifecycleError, match="closed"):
            runner.replay()


@pytest.mark.parametrize("position", [-1, 33, True, 2.0, None], ids=str)
def test_a_cache_is_not_set_to_a_position_outside_of_its_buffers(model: Any, position: Any) -> None:
    cache = StaticKVCache.for_model(model, 32)
    moves: list[Callable[[Any], None]] = [cache.seek, cache.rewind]
    for move in moves:
        with pytest.raises(ConfigurationError, match="position: expected 0 to 32"):
            move(position)
    assert cache.seen_tokens == int(cache.position) == 0


def test_end_ids_may_be_any_iterable(model: Any, expected: torch.Tensor) -> None:
    end = int(expected[0, 7])
    with make_runner(model) as runner:
        wanted = runner.generate(make_prompt(5), NEW, eos_token_id=[end])
        assert wanted.shape[1] < 5 + NEW
        for ends in ({end}, iter([end]), (each for each in [end]), torch.tensor([end])):
            assert torch.equal(runner.generate(make_prompt(5), NEW, eos_token_id=ends), wanted)


def test_cache_and_model_of_a_runner_are_not_exchanged_by_assigning(
    model: Any, expected: torch.Tensor
) -> None:
    with make_runner(model) as runner:
        cache = runner.cache
        with pytest.raises(ConfigurationError, match=r"cache: expected .* got StaticKVCache: use"):
            runner.cache = StaticKVCache.for_model(model, 32)
        with pytest.raises(ConfigurationError, match=r"model: expected .* got LlamaForCausalLM"):
            runner.model = make_model()
        assert runner.cache is cache
        assert runner.model is model
        assert torch.equal(runner.generate(make_prompt(5), NEW), expected)
        other = StaticKVCache.for_model(model, 32)
        runner.use(other)
        assert runner.cache is other


def test_a_guarded_token_is_overwritten_by_a_step_without_its_graph_too(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_runner(model) as runner:
        runner.capture(make_prompt(5))
        runner.replay()
        guard = runner.guarded_token()
        monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
        runner.capture(make_prompt(5, seed=1))
        guard.get()  # a prompt leaves the token
        runner.replay()
        with pytest.raises(OverwrittenOutputError):
            guard.get()


def test_a_decoder_goes_on_behind_the_runners_own_token() -> None:
    model = make_encoder_decoder("bart")
    encoder = encoder_inputs("bart")
    found = []
    with make_runner(model, max_seq_len=16) as runner:
        for kept in (False, True):
            runner.generate(**encoder, max_new_tokens=3)
            token = runner.replay()[:, None]
            ids = token.clone() if kept else token
            more = runner.generate(None, 4, decoder_input_ids=ids, keep_cache=True)
            found.append(more.tolist())
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 1
