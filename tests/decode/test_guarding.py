"""Static outputs under guard: read after the next step they raise, their clones do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

from graphcore import OutputGuard
from graphcore.decode import CUDAGraphAR, Guidance, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import LifecycleError, OverwrittenOutputError

NEW = 6
OVERWRITTEN = "expected the output of"


@pytest.fixture
def runner(graphcore_driver: Driver) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=24, driver=graphcore_driver) as made:
        made.capture(make_prompt(5, device=device_of(graphcore_driver)))
        yield made


@pytest.fixture
def expected(runner: CUDAGraphAR) -> list[int]:
    prompt = make_prompt(5, device=str(runner.cache.device))
    return eager_tokens(runner.model, prompt, NEW)[0, 5:].tolist()


def test_a_token_read_after_the_next_replay_raises_and_its_clone_does_not(
    runner: CUDAGraphAR, expected: list[int]
) -> None:
    clones, guards = [], []
    for _ in range(NEW):
        runner.replay()
        guard = runner.guarded_token()
        clones.append(guard.clone())
        assert int(guard.get()) == expected[len(clones) - 1]
        if len(clones) > 1:
            with pytest.raises(OverwrittenOutputError, match=f"token: {OVERWRITTEN}"):
                guards[-1].get()
        guards.append(guard)
    assert [int(clone) for clone in clones] == expected


def test_a_guard_made_by_hand_sees_the_replays_too(runner: CUDAGraphAR) -> None:
    runner.replay()
    assert runner.executable is not None
    guard = OutputGuard(runner.executable, runner.token, "token")
    assert guard.get() is runner.token
    runner.replay(3)
    assert guard.is_overwritten
    with pytest.raises(OverwrittenOutputError):
        guard.clone()
    assert int(guard.latest().get()) == 3


def test_an_alias_that_a_conversion_without_effect_made_is_guarded_as_the_output_itself(
    runner: CUDAGraphAR,
) -> None:
    """The second pass of a guidance pair overwrote what ``.to()`` had not copied."""
    runner.replay()
    alias = runner.logits.to(runner.logits.dtype).to(runner.logits.device)
    view = runner.logits[:, :7]
    assert alias.data_ptr() == view.data_ptr() == runner.logits.data_ptr()
    guards = runner.guarded(alias, "alias"), runner.guarded({"view": view}, "views")
    kept = guards[0].clone()
    assert torch.equal(guards[0].get(), kept)
    runner.replay()
    for guard in guards:
        with pytest.raises(OverwrittenOutputError, match=OVERWRITTEN):
            guard.get()
    assert not torch.equal(kept, runner.logits)


def _fresh(runner: CUDAGraphAR, slots: int) -> StaticKVCache:
    return StaticKVCache.for_model(runner.model, slots)


def _captured_again(runner: CUDAGraphAR, prompt: torch.Tensor) -> None:
    runner.cache.layers[0].keys = runner.cache.layers[0].keys.clone()
    runner.generate(prompt, 2)
    assert runner.captures == 2


writers: dict[str, Callable[[CUDAGraphAR, torch.Tensor], object]] = {
    "replay": lambda runner, _: runner.replay(),
    "forced replay": lambda runner, _: runner.replay(3),
    "generate": lambda runner, prompt: runner.generate(prompt, 2),
    "stream": lambda runner, prompt: list(runner.stream(prompt, 2)),
    "one launch": lambda runner, prompt: runner.generate_in_one_launch(prompt, 2),
    "another cache": lambda runner, prompt: runner.generate(prompt, 2, cache=_fresh(runner, 24)),
    "a capture again": _captured_again,
}


@pytest.mark.parametrize("writer", writers)
def test_whatever_steps_the_runner_overwrites_what_was_guarded(
    runner: CUDAGraphAR, writer: str
) -> None:
    prompt = make_prompt(5, device=str(runner.cache.device))
    runner.replay()
    token, logits = runner.guarded_token(), runner.guarded(runner.logits, "logits")
    value = int(token.clone())
    assert int(token.get()) == value
    writers[writer](runner, prompt)
    for guard in (token, logits):
        assert guard.is_overwritten
        with pytest.raises(OverwrittenOutputError):
            guard.get()


def test_a_prompt_overwrites_the_logits_and_leaves_the_token(runner: CUDAGraphAR) -> None:
    runner.replay()
    token, logits = runner.guarded_token(), runner.guarded(runner.logits, "logits")
    value = int(token.get())
    runner.cache.reset()
    runner.capture(make_prompt(3, device=str(runner.cache.device), seed=4))
    assert int(token.get()) == value
    with pytest.raises(OverwrittenOutputError, match="another graph that writes the same memory"):
        logits.get()


def test_a_launch_of_the_loop_is_a_run_for_guards_of_its_last_token(runner: CUDAGraphAR) -> None:
    prompt = make_prompt(5, device=str(runner.cache.device))
    ids = runner.generate_in_one_launch(prompt, 3)
    runner.replay()
    guard = runner.guarded_token()
    assert int(guard.get()) != -1
    runner.cache.reset()
    again = runner.generate_in_one_launch(prompt, 3)
    assert torch.equal(again, ids)
    assert guard.is_overwritten


def test_the_one_token_of_a_guidance_pair_is_guarded(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    options = {"max_seq_len": 16, "batch_size": 2, "guidance": Guidance(scale=3.0)}
    prompt = make_prompt(4, batch=2, device=device_of(graphcore_driver))
    with CUDAGraphAR(model, **options, driver=graphcore_driver) as runner:
        tokens = runner.generate(prompt, 3)[:, 4:]
        runner.cache.reset()
        runner.capture(prompt)
        for index in range(3):
            runner.replay()
            guard = runner.guarded_token()
            kept = guard.clone()
            assert torch.equal(guard.get(), tokens[:, index])
        runner.replay()
        with pytest.raises(OverwrittenOutputError, match="token: expected the output of"):
            guard.get()
        assert torch.equal(kept, tokens[:, 2])


def test_what_another_variant_of_the_step_writes_is_seen(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(5, batch=2, device=device_of(graphcore_driver))
    ragged = torch.tensor([[0, 1, 1, 1, 1], [1] * 5], device=prompt.device)
    with CUDAGraphAR(model, max_seq_len=8, batch_size=2, driver=graphcore_driver) as runner:
        for _ in range(2):  # where the variant is captured after the guard, and where it is there
            runner.generate(prompt, 2)
            guard = runner.guarded_token()
            guard.get()
            runner.generate(prompt, 2, attention_mask=ragged)
            with pytest.raises(OverwrittenOutputError, match="another graph that writes the same"):
                guard.get()
        assert runner.captures == 2


def test_a_guard_of_a_step_that_has_not_run_says_so(runner: CUDAGraphAR) -> None:
    guard = runner.guarded_token()
    with pytest.raises(LifecycleError, match="has not run yet"):
        guard.get()
    runner.replay()
    assert guard.get() is runner.token


def test_without_a_captured_step_there_is_nothing_to_guard(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=8, driver=graphcore_driver, capture=False) as runner:
        with pytest.raises(LifecycleError, match="token: expected a captured step"):
            runner.guarded_token()
        runner.capture(make_prompt(3, device=device_of(graphcore_driver)))
        runner.replay()
        with pytest.raises(LifecycleError, match="clone what is to be kept"):
            runner.guarded(runner.logits)
