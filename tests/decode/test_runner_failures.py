"""A runner when something fails: captures, interrupted steps, other threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.decode_models import device_of, make_model
from helpers.decode_runners import NEW, PROMPT, assert_works

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.driver import Driver, active
from graphcore.errors import (
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
)

# ---- failed captures ----------------------------------------------------------------------------


class ReadsTheHost(torch.nn.Module):
    """Stands for any layer whose forward reads a device value."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        out.sum().item()
        return out


def test_a_step_that_reads_the_host_fails_to_capture_and_leaves_the_cache_as_it_was(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    mlp = runner.model.model.layers[1].mlp
    runner.model.model.layers[1].mlp = ReadsTheHost(mlp)
    with pytest.raises(CaptureError) as caught:
        runner.capture(prompt)
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert "test_runner_failures.py" in (caught.value.location or "")
    assert runner.cache.seen_tokens == int(runner.position) == 0
    assert not any(layer.keys.any() for layer in runner.cache.layers)
    with pytest.raises(LifecycleError, match="the last prompt failed"):
        runner.replay()
    runner.model.model.layers[1].mlp = mlp
    assert_works(runner, prompt, expected)
    assert runner.captures == 1


def test_a_step_that_fails_half_way_through_its_capture_leaves_nothing(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    calls = 0

    def fail_in_capture(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # the prompt and two warm-up steps come first
            raise ZeroDivisionError("half way")

    hook = runner.model.model.layers[2].register_forward_pre_hook(fail_in_capture)
    with pytest.raises(ZeroDivisionError, match="half way"):
        runner.capture(prompt)
    hook.remove()
    assert runner.cache.seen_tokens == int(runner.position) == 0
    assert not any(layer.values.any() for layer in runner.cache.layers)
    assert_works(runner, prompt, expected)


def test_runners_and_caches_are_not_made_or_used_inside_a_capture(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    calls: dict[str, Any] = {
        "CUDAGraphAR": lambda: CUDAGraphAR(runner.model, max_seq_len=8, driver=runner.driver),
        "StaticKVCache": lambda: StaticKVCache.for_model(runner.model, 8),
        "capture": lambda: runner.capture(prompt),
        "generate": lambda: runner.generate(prompt, 2),
        "reset": runner.cache.reset,
        "prefix": lambda: runner.cache.prefix(0),
        "early_initialization": lambda: runner.cache.early_initialization(
            1, 2, 16, torch.float32, "cpu"
        ),
    }
    scratchless = StaticKVCache(1, 1, 1, 4, 4, torch.float16, runner.cache.device)
    states = torch.zeros(1, 1, 1, 4, device=runner.cache.device)
    calls["scratch pair"] = lambda: scratchless.update(states, states, 0)
    with graphcore.capture(driver=runner.driver):
        for name, call in calls.items():
            with pytest.raises(CaptureError, match=name):
                call()
    assert_works(runner, prompt, expected)


def test_a_step_of_the_callers_own_may_be_captured_with_the_cache(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    """transformers' own positions and masks come from the device inside a capture."""
    from graphcore.decode import transformers_compat as compat

    cache = StaticKVCache.for_model(runner.model, 16)
    options = {str(compat.cache_keyword(runner.model)): cache}
    token = torch.zeros(1, 1, dtype=torch.int64, device=cache.device)
    with torch.no_grad():
        token.copy_(runner.model(prompt, **options).logits[:, -1:].argmax(dim=-1))

        def step() -> None:
            logits = runner.model(token, **options).logits
            token.copy_(logits[:, -1:].argmax(dim=-1))

        capturing = graphcore.capture(driver=runner.driver)
        capturing.warm_up(step, 2)
        cache.rewind(PROMPT)
        token.copy_(expected[:, PROMPT : PROMPT + 1])
        runner.driver.synchronize()
        with capturing:
            step()
    assert cache.seen_tokens == int(cache.position) == PROMPT
    with capturing.graph.instantiate() as executable:
        tokens = []
        for _ in range(NEW - 1):
            executable.launch()
            runner.driver.synchronize()
            tokens.append(int(token))
    assert tokens == expected[0, PROMPT + 1 :].tolist()
    assert int(cache.position) == PROMPT + NEW - 1


# ---- interrupted steps --------------------------------------------------------------------------


def interrupt(runner: CUDAGraphAR, error: BaseException, *, after_launch: bool) -> Any:
    """Makes the next launch raise ``error``; returns what puts the launch back."""
    launch = runner._launch

    def failing() -> None:
        runner._launch = launch
        if after_launch:
            launch()
        raise error

    runner._launch = failing
    return launch


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
@pytest.mark.parametrize("after_launch", [False, True], ids=["before", "after the launch"])
def test_an_interrupt_in_a_generation_leaves_runner_and_context_usable(
    runner: CUDAGraphAR,
    prompt: torch.Tensor,
    expected: torch.Tensor,
    error: BaseException,
    after_launch: bool,
) -> None:
    runner.capture(prompt)
    runner.replay()
    interrupt(runner, error, after_launch=after_launch)
    with pytest.raises(type(error)):
        runner.replay()
    assert runner.cache.seen_tokens == int(runner.position) == PROMPT + 1 + after_launch
    if after_launch:
        with pytest.raises(LifecycleError, match="the last step was interrupted"):
            runner.replay()
    else:  # nothing ran: the next replay is the step that was interrupted
        assert int(runner.replay()) == int(expected[0, PROMPT + 1])
    assert_works(runner, prompt, expected)
    assert runner.captures == 1


def test_a_forced_token_whose_launch_fails_is_forgotten(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    interrupt(runner, KeyboardInterrupt(), after_launch=False)
    with pytest.raises(KeyboardInterrupt):
        runner.replay((int(expected[0, PROMPT]) + 1) % 97)
    assert int(runner.replay()) == int(expected[0, PROMPT])


def test_a_launch_that_the_driver_fails_loses_nothing(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    error = CudaError("CUDA_ERROR_OUT_OF_MEMORY", "cuGraphLaunch", number=2)
    interrupt(runner, error, after_launch=False)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        runner.replay()
    assert [int(runner.replay()) for _ in range(NEW)] == expected[0, PROMPT:].tolist()


def test_where_the_position_cannot_be_read_after_a_failure_the_first_error_says_so(
    runner: CUDAGraphAR, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def item(self) -> int:
            raise RuntimeError("the context is lost")

    runner.capture(prompt)
    interrupt(runner, RuntimeError("illegal address"), after_launch=False)
    with monkeypatch.context() as patched:
        patched.setattr(StaticKVCache, "position", property(lambda cache: Lost()))
        with pytest.raises(RuntimeError, match="illegal address") as caught:
            runner.replay()
    assert "the context is lost" in caught.value.__notes__[0]
    with pytest.raises(LifecycleError, match="the last step failed: illegal address"):
        runner.replay()


def test_a_failure_while_emptying_the_cache_again_becomes_a_note(
    runner: CUDAGraphAR, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("second")

    with monkeypatch.context() as patched:
        patched.setattr(StaticKVCache, "rewind", broken)
        patched.setattr(runner.model, "forward", broken)
        with pytest.raises(ConfigurationError, match="forward"):
            CUDAGraphAR(runner.model, runner.cache, driver=runner.driver)
    hook = runner.model.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with monkeypatch.context() as patched:
        patched.setattr(StaticKVCache, "rewind", broken)
        with pytest.raises(ZeroDivisionError) as caught:
            runner.capture(prompt)
    hook.remove()
    assert "while emptying the cache again: second" in caught.value.__notes__[0]


def test_an_interrupted_stream_leaves_the_runner_usable(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    tokens: list[int] = []

    def listen() -> None:
        for ids in runner.stream(prompt, NEW):
            tokens.append(int(ids))
            if len(tokens) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        listen()
    assert tokens == expected[0, PROMPT : PROMPT + 3].tolist()
    assert int(runner.replay()) == int(expected[0, PROMPT + 3])
    assert_works(runner, prompt, expected)


# ---- several runners in several threads ---------------------------------------------------------


def _replay_elsewhere_while_capturing(
    capturing: CUDAGraphAR, other: CUDAGraphAR, prompt: torch.Tensor
) -> list[BaseException]:
    """Captures; another thread replays the other runner meanwhile; what that raised."""
    errors: list[BaseException] = []

    def replay(*_: Any) -> None:
        if active.current() is not None:
            try:
                in_thread(other.replay)
            except CaptureError as error:
                errors.append(error)

    hook = capturing.model.model.layers[0].register_forward_pre_hook(replay)
    try:
        capturing.capture(prompt)
    finally:
        hook.remove()
    return errors


def test_a_replay_without_a_stream_beside_another_runners_capture_is_refused_and_breaks_neither(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    with CUDAGraphAR(runner.model, max_seq_len=16, driver=runner.driver) as other:
        (error,) = _replay_elsewhere_while_capturing(other, runner, prompt)
        assert "on_legacy_work='ignore'" in str(error)
        assert_works(other, prompt, expected)
    tokens = [int(runner.replay()) for _ in range(NEW)]
    assert tokens == expected[0, PROMPT:].tolist()


def test_a_runner_that_ignores_legacy_work_is_captured_while_others_replay(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt)
    with CUDAGraphAR(
        runner.model, max_seq_len=16, driver=runner.driver, on_legacy_work="ignore"
    ) as other:
        assert _replay_elsewhere_while_capturing(other, runner, prompt) == []
        assert_works(other, prompt, expected)
    assert runner.cache.seen_tokens == PROMPT + 1
    tokens = [int(runner.replay()) for _ in range(NEW - 1)]
    assert tokens == expected[0, PROMPT + 1 :].tolist()


def test_an_unknown_choice_for_legacy_work_is_refused(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    with pytest.raises(ConfigurationError, match="on_legacy_work: expected one of"):
        CUDAGraphAR(model, max_seq_len=8, driver=graphcore_driver, on_legacy_work="warn")  # type: ignore[arg-type]
