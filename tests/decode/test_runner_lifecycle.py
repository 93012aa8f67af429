"""A runner when something goes wrong: order of calls, stale buffers, failures, interrupts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import (
    CapacityError,
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
    StaleGraphError,
)

PROMPT = 5
NEW = 7


@pytest.fixture
def runner(graphcore_driver: Driver) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver) as made:
        yield made


@pytest.fixture
def prompt(runner: CUDAGraphAR) -> torch.Tensor:
    return make_prompt(PROMPT, device=str(runner.cache.device))


@pytest.fixture
def expected(runner: CUDAGraphAR, prompt: torch.Tensor) -> torch.Tensor:
    return eager_tokens(runner.model, prompt, NEW)


def assert_works(runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert runner.cache.seen_tokens == int(runner.position) == PROMPT + NEW


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
    assert "test_runner_lifecycle.py" in (caught.value.location or "")
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
