"""A whole generation in one launch: the same ids, the same state, one call of the driver."""

from __future__ import annotations

import functools
import gc
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.decode_models import (
    ARCHITECTURES,
    device_of,
    eager_tokens,
    make_model,
    make_prompt,
)

import graphcore
from graphcore.decode import CUDAGraphAR, Sampling, StaticKVCache
from graphcore.decode.one_launch import OneLaunch
from graphcore.driver import Driver, active
from graphcore.driver.records import NodeKind
from graphcore.errors import (
    CapacityError,
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
    PlanError,
    StaleGraphError,
)
from graphcore.testing import assert_no_growth, inject

PROMPT = 5
NEW = 9
ROOM = 24
ASKING = ("query_event", "exchange_capture_mode")
"""Calls of one look at whether a launch is over."""


def make_runner(driver: Driver, architecture: str = "llama", **options: Any) -> CUDAGraphAR:
    model = make_model(architecture, device=device_of(driver))
    return CUDAGraphAR(model, driver=driver, **({"max_seq_len": ROOM} | options))


@pytest.fixture
def runner(graphcore_driver: Driver) -> Any:
    with make_runner(graphcore_driver, batch_size=2) as made:
        yield made


@pytest.fixture
def prompt(runner: CUDAGraphAR) -> torch.Tensor:
    return make_prompt(PROMPT, batch=2, device=str(runner.cache.device))


@pytest.fixture
def expected(runner: CUDAGraphAR, prompt: torch.Tensor) -> torch.Tensor:
    return eager_tokens(runner.model, prompt, NEW)


def assert_mirror_is_position(runner: CUDAGraphAR, expected: int) -> None:
    assert runner._state.seen == expected  # known without asking the device
    assert int(runner.position) == runner.cache.seen_tokens == expected


def loop_of(runner: CUDAGraphAR) -> OneLaunch:
    captured = runner._captured
    assert captured is not None
    return captured.in_one_launch(runner._step)


# ---- equal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_launch_gives_the_ids_of_generate_and_of_transformers(
    graphcore_driver: Driver, architecture: str
) -> None:
    with make_runner(graphcore_driver, architecture, batch_size=2) as runner:
        prompt = make_prompt(PROMPT, batch=2, device=device_of(graphcore_driver))
        expected = eager_tokens(runner.model, prompt, NEW)
        decoded = runner.generate_in_one_launch(prompt, NEW)
        assert torch.equal(decoded, expected)
        assert_mirror_is_position(runner, PROMPT + NEW)
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert len(expected[:, PROMPT:].unique()) > 4


def test_every_number_of_tokens_and_every_prompt_uses_one_capture_and_one_executable(
    runner: CUDAGraphAR,
) -> None:
    executables = set()
    device = str(runner.cache.device)
    for tokens, new in ((5, 9), (5, 9), (2, 1), (11, 13), (1, 23)):
        prompt = make_prompt(tokens, batch=2, device=device, seed=tokens)
        decoded = runner.generate_in_one_launch(prompt, new)
        assert torch.equal(decoded, eager_tokens(runner.model, prompt, new))
        assert_mirror_is_position(runner, tokens + new)
        executables.add(loop_of(runner).executable)
    assert runner.captures == 1
    assert len(executables) == 1
    assert loop_of(runner).graph.resource.instantiations == 1


def test_every_token_comes_from_the_launch_and_none_from_a_replay_or_a_launch_before(
    runner: CUDAGraphAR,
    prompt: torch.Tensor,
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a replay")

    runner.generate_in_one_launch(prompt, NEW)
    monkeypatch.setattr(runner, "replay", refuse)
    monkeypatch.setattr(runner, "_run_eagerly", refuse)
    loop_of(runner).ring._tokens.fill_(-9)
    runner._step.history.fill_(-9)
    runner.token.fill_(-9)
    seen: list[torch.Tensor] = []
    decoded = runner.generate_in_one_launch(prompt, NEW, on_token=seen.append)
    assert torch.equal(decoded, expected)
    assert torch.equal(torch.stack(seen, dim=1), expected[:, PROMPT:].cpu())


def test_the_state_behind_one_launch_is_that_behind_as_many_replays(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    eos = (int(expected[0, PROMPT + 2]),)
    held: list[dict[str, torch.Tensor]] = []
    for in_one_launch in (True, False):
        runner.cache.reset()
        runner.capture(prompt)
        runner._step.set_eos(eos, 3)
        if in_one_launch:
            loop = loop_of(runner)
            loop.start(6)
            loop.wait()
            runner._state.seen = None
        else:
            for _ in range(6):
                runner.replay()
        runner.driver.synchronize()
        held.append({name: each.clone() for name, each in runner.named_tensors().items()})
    assert held[0].keys() == held[1].keys()
    assert held[0]["finished rows"].any()
    for name, each in held[0].items():
        assert torch.equal(each, held[1][name]), name


def test_replay_goes_on_behind_one_launch(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.generate_in_one_launch(prompt, 4)
    following = torch.stack([runner.replay().clone() for _ in range(NEW - 4)], dim=1)
    assert torch.equal(following, expected[:, PROMPT + 4 :])
    assert_mirror_is_position(runner, PROMPT + NEW)
    assert int(runner.replay(7)[0]) == 7


def test_a_generation_may_continue_behind_what_the_cache_holds(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.capture(prompt[:, :2])
    decoded = runner.generate_in_one_launch(prompt[:, 2:], NEW, keep_cache=True)
    assert torch.equal(decoded, expected[:, 2:])
    assert_mirror_is_position(runner, PROMPT + NEW)


@pytest.mark.parametrize("seed", range(3))
def test_the_loop_is_right_in_every_order_that_its_dependencies_allow(seed: int) -> None:
    driver = graphcore.open_driver("emulated", order="adversarial", seed=seed)
    with make_runner(driver, batch_size=2) as runner:
        prompt = make_prompt(PROMPT, batch=2)
        expected = eager_tokens(runner.model, prompt, 4)
        assert torch.equal(runner.generate_in_one_launch(prompt, 4), expected)


# ---- where it ends ------------------------------------------------------------------------------


def eos_cases(ids: torch.Tensor) -> dict[str, int]:
    """End-of-sequence ids that end the rows of ``ids [2, new]`` at different steps."""
    first, second = ids.tolist()
    return {
        "first token of a row": first[0],
        "middle of a row": first[3],
        "last token of the other row": second[-1],
        "never": next(token for token in range(3, 97) if token not in first + second),
    }


@pytest.mark.parametrize(
    "case", ["first token of a row", "middle of a row", "last token of the other row", "never"]
)
def test_rows_that_end_at_different_steps_are_padded_as_eager_generate_pads_them(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, case: str
) -> None:
    eos = eos_cases(expected[:, PROMPT:])[case]
    eager = eager_tokens(runner.model, prompt, NEW, eos_token_id=eos, pad_token_id=2)
    decoded = runner.generate_in_one_launch(prompt, NEW, eos_token_id=eos, pad_token_id=2)
    assert torch.equal(decoded, eager)
    assert torch.equal(runner.generate(prompt, NEW, eos, 2), eager)


def test_the_launch_ends_with_the_step_in_which_the_last_row_finishes(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    ends = [int(expected[0, PROMPT]), int(expected[1, PROMPT + 3])]
    eager = eager_tokens(runner.model, prompt, NEW, eos_token_id=ends, pad_token_id=2)
    steps = eager.shape[1] - PROMPT
    assert steps < NEW
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW, ends, 2), eager)
    # generate() looks only every few steps, and so would have run further
    assert_mirror_is_position(runner, PROMPT + steps)


def test_a_single_row_may_end_with_its_first_token(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        prompt = make_prompt(PROMPT, device=device_of(graphcore_driver))
        first = int(eager_tokens(runner.model, prompt, 1)[0, -1])
        decoded = runner.generate_in_one_launch(prompt, NEW, first)
        assert decoded.tolist() == [[*prompt[0].tolist(), first]]
        assert_mirror_is_position(runner, PROMPT + 1)


def test_no_token_is_too_few_and_is_refused_as_generate_refuses_it(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    for decode in (runner.generate, runner.generate_in_one_launch, runner.stream_in_one_launch):
        with pytest.raises(ConfigurationError, match="max_new_tokens: expected a positive int"):
            decode(prompt, 0)


def test_more_tokens_than_fit_are_refused_and_nothing_is_launched(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.generate_in_one_launch(prompt, NEW)
    before = {name: held.clone() for name, held in runner.named_tensors().items()}
    with pytest.raises(CapacityError, match=rf"max_new_tokens.*max_seq_len is {ROOM}"):
        runner.generate_in_one_launch(prompt, ROOM - PROMPT + 1)
    for name, held in runner.named_tensors().items():
        assert torch.equal(held, before[name]), name
    full = runner.generate_in_one_launch(prompt, ROOM - PROMPT)
    assert full.shape == (2, ROOM)
    assert torch.equal(full[:, : PROMPT + NEW], expected)
    with pytest.raises(CapacityError):
        runner.replay()


# ---- what the host does -------------------------------------------------------------------------


def recorded_calls(driver: Driver, action: Callable[[], object]) -> list[str]:
    """The driver methods that ``action`` calls, and "bound launch" for the call of the hot path."""
    calls: list[str] = []

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "bind_launch":
                return recording("bound launch", method(*args, **kwargs))
            calls.append(name)
            return method(*args, **kwargs)

        return call

    names = [name for name, member in vars(Driver).items()
             if callable(member) and not name.startswith("_")]  # fmt: skip
    for name in names:
        setattr(driver, name, recording(name, getattr(driver, name)))
    try:
        action()
    finally:
        for name in names:
            delattr(driver, name)
    return calls


def test_the_host_makes_one_launch_and_waits_for_nothing_until_the_end(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    runner.generate_in_one_launch(prompt, 2)
    counts = {}
    for new in (3, 15):
        loop = loop_of(runner)
        runner.cache.reset()
        runner.capture(prompt)

        def decode(loop: OneLaunch = loop, new: int = new) -> None:
            loop.start(new)
            loop.wait()

        calls = recorded_calls(runner.driver, decode)
        assert calls.count("bound launch") == 1
        assert "launch" not in calls
        assert not [call for call in calls if "synchronize" in call or call in ("read", "copy")]
        made = Counter(calls)
        # how often the host asks whether the end has come depends on the device's pace; the answer
        # "yes" gives the event back at once, and without it the next launch does
        assert made.pop("destroy_event", 0) <= min(made["query_event"], 1)
        counts[new] = Counter({call: times for call, times in made.items() if call not in ASKING})
        runner._state.seen = None
        assert runner.cache.seen_tokens == PROMPT + new
    assert counts[3] == counts[15]  # not one call more for twelve tokens more
    assert counts[3]["create_event"] == counts[3]["record_event"] == 1


def test_on_token_is_called_with_every_step_in_order(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    seen: list[torch.Tensor] = []
    decoded = runner.generate_in_one_launch(prompt, NEW, on_token=seen.append)
    assert torch.equal(torch.stack(seen, dim=1), expected[:, PROMPT:].cpu())
    assert torch.equal(decoded, expected)


def test_an_exception_of_on_token_ends_the_generation_and_comes_through(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    def fail(ids: torch.Tensor) -> None:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        runner.generate_in_one_launch(prompt, NEW, on_token=fail)
    assert_mirror_is_position(runner, int(runner.position))
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)


# ---- what the loop holds ------------------------------------------------------------------------


def test_the_body_is_the_captured_step_without_copy_nodes(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    runner.capture(prompt)
    assert runner.graph is not None
    first, loop = loop_of(runner).graph.snapshot().nodes
    assert (first.kind, loop.kind) == (NodeKind.KERNEL, NodeKind.CONDITIONAL)
    step, end = loop.bodies[0].nodes
    assert end.kind is NodeKind.KERNEL
    assert step.child is not None
    assert len(step.child.nodes) == len(runner.graph.snapshot().nodes)
    assert NodeKind.MEMCPY not in {node.kind for node in loop.bodies[0].walk()}


def test_a_step_with_host_callbacks_is_refused_and_the_runner_goes_on(
    graphcore_driver: Driver,
) -> None:
    called: list[int] = []
    with make_runner(graphcore_driver) as runner:
        prompt = make_prompt(PROMPT, device=device_of(graphcore_driver))
        expected = eager_tokens(runner.model, prompt, NEW)

        def call_host(*_: Any) -> None:
            capture = active.current()
            if capture is not None:
                graphcore_driver.launch_host(lambda: called.append(1), capture.stream)

        runner.model.lm_head.register_forward_pre_hook(call_host)
        with pytest.raises(PlanError, match=r"conditional body.*host"):
            runner.generate_in_one_launch(prompt, NEW)
        assert not called
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert len(called) == NEW


def test_closing_gives_both_executables_back(graphcore_driver: Driver) -> None:
    runner = make_runner(graphcore_driver)
    prompt = make_prompt(PROMPT, device=device_of(graphcore_driver))
    runner.generate_in_one_launch(prompt, 2)
    loop = loop_of(runner)
    executable, ring = loop.executable, weakref.ref(loop.ring)
    keys = weakref.ref(runner.cache.layers[0].keys)
    runner.close()
    with pytest.raises(LifecycleError):
        executable.launch()
    assert loop.graph.is_closed
    for call in (runner.generate_in_one_launch, runner.stream_in_one_launch):
        with pytest.raises(LifecycleError, match="the runner is closed"):
            call(prompt, 2)
    del loop, executable, runner, call
    gc.collect()
    assert ring() is None
    assert keys() is None


@pytest.mark.exclusive
def test_generations_and_runners_that_end_take_no_memory(graphcore_driver: Driver) -> None:
    prompt = make_prompt(PROMPT, device=device_of(graphcore_driver))
    model = make_model(device=device_of(graphcore_driver))

    def decode_and_close() -> None:
        with CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver) as runner:
            runner.generate_in_one_launch(prompt, 2)

    # a leaked executable of the loop would be some hundred KB each time
    assert_no_growth(decode_and_close, driver=graphcore_driver, repeats=12, allowance=2 << 20)
    with CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver) as runner:
        runner.generate_in_one_launch(prompt, 2)
        before = runner.fingerprint()
        addresses = {name: held.data_ptr() for name, held in runner.named_tensors().items()}
        decode = functools.partial(runner.generate_in_one_launch, prompt, 2)
        assert_no_growth(decode, driver=graphcore_driver, repeats=40, allowance=1 << 20)
        assert runner.fingerprint() == before
        assert {n: held.data_ptr() for n, held in runner.named_tensors().items()} == addresses


def test_a_runner_that_never_decodes_in_one_launch_makes_no_second_executable(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    runner.generate(prompt, 3)
    assert runner._captured is not None
    assert runner._captured._loop is None


# ---- stale, eager, failures ---------------------------------------------------------------------


def _rebind_keys(runner: CUDAGraphAR) -> None:
    runner.cache.layers[2].keys = runner.cache.layers[2].keys.clone()


def test_a_buffer_that_is_replaced_after_the_prompt_is_named_and_nothing_is_launched(
    runner: CUDAGraphAR,
    prompt: torch.Tensor,
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner.generate_in_one_launch(prompt, 2)
    take_off = runner._take_off

    def rebind_first(*args: Any) -> Any:
        _rebind_keys(runner)
        return take_off(*args)

    monkeypatch.setattr(runner, "_take_off", rebind_first)
    with pytest.raises(StaleGraphError, match="layer 2 keys"):
        runner.generate_in_one_launch(prompt, NEW)
    assert_mirror_is_position(runner, PROMPT)
    monkeypatch.undo()
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)
    assert runner.captures == 2


def test_a_buffer_that_was_replaced_before_the_prompt_is_captured_again(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.generate_in_one_launch(prompt, 2)
    old = loop_of(runner)
    _rebind_keys(runner)
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)
    assert runner.captures == 2
    assert loop_of(runner) is not old
    assert old.graph.is_closed


def test_another_cache_is_decoded_into_and_nothing_keeps_the_one_before(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    runner.generate_in_one_launch(prompt, 2)
    first = weakref.ref(runner.cache.layers[0].keys)
    other = StaticKVCache.for_model(runner.model, ROOM, batch_size=2)
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW, cache=other), expected)
    assert (runner.captures, runner.rebinds) == (1, 1)
    assert_mirror_is_position(runner, PROMPT + NEW)
    assert other.layers[0].keys[:, :, : PROMPT + NEW].abs().sum(dim=-1).all()
    gc.collect()
    assert first() is None


@pytest.mark.parametrize("why", ["capture=False", "GRAPHCORE_DISABLE=1"])
def test_where_decoding_is_eager_it_is_eager_here_too_and_says_why(
    graphcore_driver: Driver,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if why != "capture=False":
        monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    with make_runner(graphcore_driver, capture=why != "capture=False") as runner:
        prompt = make_prompt(PROMPT, device=device_of(graphcore_driver))
        expected = eager_tokens(runner.model, prompt, NEW)
        with caplog.at_level(logging.INFO, "graphcore"):
            assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)
        assert re.search(f"decoding eagerly: {why}", caplog.text)
        assert (runner.execution, runner.captures) == ("eager", 0)
        with runner.stream_in_one_launch(prompt, NEW) as tokens:
            assert [int(ids) for ids in tokens] == expected[0, PROMPT:].tolist()
        assert_mirror_is_position(runner, PROMPT + NEW)


def test_it_is_refused_inside_a_capture(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    with graphcore.capture(driver=runner.driver):
        for call in (runner.generate_in_one_launch, runner.stream_in_one_launch):
            with pytest.raises(CaptureError, match=call.__name__):
                call(prompt, 2)
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)


FAULTS = {
    "pinned memory": ("alloc_pinned", 0),
    "a conditional handle": ("create_conditional", 0),
    "the second instantiation": ("instantiate", 1),
    "the launch": ("launch_graph", 0),
    "the event behind it": ("record_event", 0),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_driver_that_fails_leaves_runner_and_context_usable(case: str) -> None:
    driver = graphcore.open_driver("emulated")
    with make_runner(driver, batch_size=2) as runner:
        prompt = make_prompt(PROMPT, batch=2)
        expected = eager_tokens(runner.model, prompt, NEW)
        if case in ("the launch", "the event behind it"):
            runner.generate_in_one_launch(prompt, 2)
        call, after = FAULTS[case]
        with inject(driver, call, after=after) as fault, pytest.raises(CudaError, match="UNKNOWN"):
            runner.generate_in_one_launch(prompt, NEW)
        assert fault.fired == 1
        assert int(runner.position) == runner.cache.seen_tokens
        if runner.cache.seen_tokens == PROMPT:  # nothing ran: the prompt is still good
            assert torch.equal(runner.replay(), expected[:, PROMPT])
        assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert runner.captures == 1


def test_a_step_that_fails_on_its_way_is_told_and_the_next_generation_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device such a failure ends the context; the emulated driver shows what is left."""
    from graphcore.driver.emulated.torch_operation import TorchOperation

    driver = graphcore.open_driver("emulated")
    with make_runner(driver, batch_size=2) as runner:
        prompt = make_prompt(PROMPT, batch=2)
        expected = eager_tokens(runner.model, prompt, NEW)
        runner.generate_in_one_launch(prompt, 2)
        run, count = TorchOperation.run, 0

        def fail_in_the_third_step(self: Any, *arguments: Any) -> None:
            nonlocal count
            count += 1
            if count == 350:
                raise ZeroDivisionError("half way")
            run(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(TorchOperation, "run", fail_in_the_third_step)
            with pytest.raises(ZeroDivisionError, match="half way"):
                runner.generate_in_one_launch(prompt, NEW)
        assert runner.cache.seen_tokens == int(runner.position) == PROMPT + 2
        with pytest.raises(LifecycleError, match="the last launch was interrupted"):
            runner.replay()
        assert torch.equal(runner.generate_in_one_launch(prompt, NEW), expected)


def test_two_runners_in_one_process_do_not_interfere(graphcore_driver: Driver) -> None:
    prompt = make_prompt(PROMPT, device=device_of(graphcore_driver))
    with make_runner(graphcore_driver) as first, make_runner(graphcore_driver, "qwen3") as second:
        tokens = {each: each.stream_in_one_launch(prompt, NEW) for each in (first, second)}
        for runner, stream in tokens.items():
            ids = torch.stack(list(stream), dim=1)
            expected = eager_tokens(runner.model, prompt, NEW)[:, PROMPT:].cpu()
            assert torch.equal(ids, expected)


# ---- sampling -----------------------------------------------------------------------------------


def test_one_launch_draws_what_generate_draws_with_the_same_seed(graphcore_driver: Driver) -> None:
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)
    with make_runner(graphcore_driver, batch_size=2, sampling=sampling) as runner:
        prompt = make_prompt(PROMPT, batch=2, device=device_of(graphcore_driver))
        drawn = {seed: runner.generate(prompt, NEW, seed=seed) for seed in (3, 4)}
        assert not torch.equal(drawn[3], drawn[4])
        for seed, expected in drawn.items():
            decoded = runner.generate_in_one_launch(prompt, NEW, seed=seed)
            assert torch.equal(decoded, expected)
            streamed = torch.stack(list(runner.stream_in_one_launch(prompt, NEW, seed=seed)), dim=1)
            assert torch.equal(streamed, expected[:, PROMPT:].cpu())
        # the numbers go on behind it as behind replays
        runner.generate_in_one_launch(prompt, 4, seed=3)
        following = torch.stack([runner.replay().clone() for _ in range(NEW - 4)], dim=1)
        assert torch.equal(following, drawn[3][:, PROMPT + 4 :])
        assert runner.captures == 1
