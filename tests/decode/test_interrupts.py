"""Ctrl-C at any line of a generation, and one driver call failing: the runner works on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import eager_tokens, make_prompt
from helpers.every_fault import each_fault, interrupts_instead
from helpers.interrupts import press_at
from transformers import LlamaConfig, LlamaForCausalLM

from graphcore.decode import CUDAGraphAR, DecodeBuckets, StaticKVCache
from graphcore.driver import active
from graphcore.driver.emulated import EmulatedDriver

NEW = 3
SLOTS = 8
_FILES = tuple(
    f"decode/{name}.py"
    for name in (
        "cache_binding", "cache_layer", "cache_state", "captured_step", "forward", "generating",
        "masks", "runner", "sampler", "static_cache", "step", "variants",
    )
)  # fmt: skip
_PLACES = 25
"""How many places of each kind of generation are tried, spread evenly."""


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=97, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=None, pad_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return make_prompt(4)


@pytest.fixture(scope="module")
def expected(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    return eager_tokens(model, prompt, NEW)


@pytest.fixture
def runner(model: Any) -> Iterator[CUDAGraphAR]:
    with CUDAGraphAR(model, max_seq_len=SLOTS, driver=EmulatedDriver()) as made:
        yield made


def assert_works(runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor) -> None:
    assert active.current() is None
    assert gc.isenabled()
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert runner.cache.seen_tokens == int(runner.position) == 4 + NEW
    assert runner.executable is not None


def _generate(runner: CUDAGraphAR, prompt: torch.Tensor) -> None:
    runner.generate(prompt, NEW, eos_token_id=(), poll_every=2)


def _stream(runner: CUDAGraphAR, prompt: torch.Tensor) -> None:
    list(runner.stream(prompt, NEW))


def _use_another_cache(runner: CUDAGraphAR, prompt: torch.Tensor) -> None:
    runner.generate(prompt, 1, cache=StaticKVCache.for_model(runner.model, SLOTS))


def _use_a_larger_cache(runner: CUDAGraphAR, prompt: torch.Tensor) -> None:
    runner.generate(prompt, 1, cache=StaticKVCache.for_model(runner.model, SLOTS + 4))


def _capture_again(runner: CUDAGraphAR, prompt: torch.Tensor) -> None:
    runner.cache.layers[0].keys = runner.cache.layers[0].keys.clone()
    runner.generate(prompt, 1)


actions: dict[str, Callable[[CUDAGraphAR, torch.Tensor], None]] = {
    "generate": _generate,
    "stream": _stream,
    "another cache": _use_another_cache,
    "a larger cache": _use_a_larger_cache,
    "capture again": _capture_again,
}


# in a finalizer nothing can be raised: Python prints it and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("action", actions)
def test_ctrl_c_at_any_line_leaves_a_runner_that_decodes_as_eager(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, action: str
) -> None:
    def act() -> None:
        actions[action](runner, prompt)

    runner.generate(prompt, 1)
    places, _ = press_at(0, act, _FILES)
    assert places > _PLACES
    stopped = set()
    for number in range(1, places, places // _PLACES + 1):
        _, where = press_at(number, act, _FILES)
        stopped.add(where)
        assert_works(runner, prompt, expected)
    assert len(stopped - {None}) > _PLACES // 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_of_a_growing_generation_leaves_buckets_that_work(
    model: Any, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    files = (*_FILES, "decode/buckets.py", "decode/bucket_rows.py", "decode/cache_view.py")
    options = {"driver": EmulatedDriver(), "progress": False}
    with DecodeBuckets(model, [5, SLOTS], [2], **options) as buckets:

        def act() -> None:
            buckets.generate(prompt, NEW, grow=True)

        places, _ = press_at(0, act, files)
        for number in range(1, places, places // _PLACES + 1):
            press_at(number, act, files)
            for grow in (True, False):
                assert torch.equal(buckets.generate(prompt, NEW, grow=grow).ids, expected)
        assert buckets.captures == 2


# a finalizer whose call fails tells it as a warning
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::graphcore.errors.GraphcoreWarning")
@pytest.mark.parametrize("kind", ["error", "ctrl-c"])
def test_one_driver_call_that_fails_leaves_a_runner_that_decodes_as_eager(
    model: Any,
    prompt: torch.Tensor,
    expected: torch.Tensor,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "ctrl-c":
        interrupts_instead(monkeypatch)

    def prepare(driver: EmulatedDriver) -> CUDAGraphAR:
        return CUDAGraphAR(model, max_seq_len=SLOTS, driver=driver)

    def operate(runner: CUDAGraphAR) -> None:
        runner.generate(prompt, 1)
        runner.generate(prompt, 1, cache=StaticKVCache.for_model(model, SLOTS))

    tried = 0
    for _driver, faulted in each_fault(prepare, operate):
        assert_works(faulted.state, prompt, expected)
        faulted.state.close()
        tried += 1
    assert tried > 20


@pytest.mark.parametrize("layer", ["embed_tokens", "layers.0.self_attn", "layers.0.mlp", "norm"])
@pytest.mark.parametrize("call", [1, 2, 4], ids=["prompt", "warm-up", "capture"])
def test_a_model_that_raises_anywhere_leaves_a_runner_that_decodes_as_eager(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, layer: str, call: int
) -> None:
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ZeroDivisionError(layer)

    hook = runner.model.model.get_submodule(layer).register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError, match=layer):
        runner.generate(prompt, NEW)
    assert runner.cache.seen_tokens == int(runner.position) == 0
    hook.remove()
    assert_works(runner, prompt, expected)
