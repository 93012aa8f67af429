"""Tokens of a generation that runs in one launch: read late, early, never, or not to the end."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import POSITIONS, device_of, eager_tokens, make_model, make_prompt
from helpers.interrupts import press_at
from helpers.slow_steps import add_spin

import graphcore
from graphcore.decode import CUDAGraphAR
from graphcore.decode.one_launch import OneLaunch
from graphcore.driver import Driver
from graphcore.errors import CaptureError, LifecycleError

PROMPT = 5
NEW = 9


@pytest.fixture
def runner(graphcore_driver: Driver) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=POSITIONS, driver=graphcore_driver) as made:
        yield made


@pytest.fixture
def prompt(runner: CUDAGraphAR) -> torch.Tensor:
    return make_prompt(PROMPT, device=str(runner.cache.device))


@pytest.fixture
def expected(runner: CUDAGraphAR, prompt: torch.Tensor) -> torch.Tensor:
    return eager_tokens(runner.model, prompt, POSITIONS - PROMPT)[0, PROMPT:].cpu()


def loop_of(runner: CUDAGraphAR) -> OneLaunch:
    assert runner._captured is not None
    return runner._captured.in_one_launch(runner._step)


def assert_works(runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor) -> None:
    """A whole generation either way, and position and mirror in step."""
    assert runner.cache.seen_tokens == int(runner.position)
    for decode in (runner.generate_in_one_launch, runner.generate):
        assert torch.equal(decode(prompt, NEW)[0, PROMPT:].cpu(), expected[:NEW])
        assert runner.cache.seen_tokens == int(runner.position) == PROMPT + NEW


# ---- to the end ---------------------------------------------------------------------------------


def test_a_stream_gives_every_token_as_a_tensor_of_its_own(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    tokens = list(runner.stream_in_one_launch(prompt, NEW))
    assert all(ids.device.type == "cpu" and ids.shape == (1,) for ids in tokens)
    assert len({ids.data_ptr() for ids in tokens}) == NEW
    assert torch.cat(tokens).tolist() == expected[:NEW].tolist()
    assert runner._state.seen == PROMPT + NEW
    assert_works(runner, prompt, expected)


def test_a_stream_ends_with_the_token_that_ends_the_last_row(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    end = int(expected[4])
    until = expected.tolist().index(end) + 1
    tokens = [int(ids) for ids in runner.stream_in_one_launch(prompt, 40, eos_token_id=end)]
    assert tokens == expected[:until].tolist()
    assert runner.cache.seen_tokens == int(runner.position) == PROMPT + until


def test_a_stream_that_is_over_stays_over(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, 3)
    assert len(list(stream)) == 3
    assert list(stream) == []
    runner.generate_in_one_launch(prompt, NEW)
    stream.close()
    assert list(stream) == []
    assert runner.cache.seen_tokens == PROMPT + NEW


def test_a_reader_that_comes_late_finds_every_token(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    """The ring holds a token for every slot of the cache, so the device waits for nobody."""
    stream = runner.stream_in_one_launch(prompt, POSITIONS - PROMPT)
    runner.driver.synchronize()
    assert loop_of(runner).ring.is_over
    assert torch.equal(torch.cat(list(stream)), expected)
    assert runner.cache.seen_tokens == int(runner.position) == POSITIONS


@pytest.mark.parametrize("read", [0, 2])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_waiting_for_the_end_drops_what_was_not_read_and_decodes_all_of_it(
    graphcore_driver: Driver, captured: bool, read: int
) -> None:
    device = device_of(graphcore_driver)
    model, prompt = make_model(device=device), make_prompt(PROMPT, device=device)
    expected = eager_tokens(model, prompt, NEW + 1)[0, PROMPT:].cpu()
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver, capture=captured) as runner:
        stream = runner.stream_in_one_launch(prompt, NEW)
        assert [int(next(stream)) for _ in range(read)] == expected[:read].tolist()
        stream.wait()
        assert runner._state.seen == int(runner.position) == PROMPT + NEW
        assert list(stream) == []
        stream.wait()
        assert int(runner.replay()) == int(expected[NEW])
        assert_works(runner, prompt, expected)


def test_the_end_is_not_waited_for_inside_a_capture(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, NEW)
    with graphcore.capture(driver=runner.driver), pytest.raises(CaptureError, match=r"wait\(\)"):
        stream.wait()
    assert torch.equal(torch.cat(list(stream)), expected[:NEW])


@pytest.mark.gpu
def test_tokens_come_while_the_launch_still_runs() -> None:
    driver = graphcore.open_driver("cuda")
    model = make_model(device=device_of(driver))
    with CUDAGraphAR(model, max_seq_len=POSITIONS, driver=driver) as runner:
        kept = add_spin(runner, 5)
        prompt = make_prompt(PROMPT, device=device_of(driver))
        expected = eager_tokens(model, prompt, 40)[0, PROMPT:].tolist()
        early = 0
        tokens = []
        for ids in runner.stream_in_one_launch(prompt, 40):
            tokens.append(int(ids))
            early += not loop_of(runner).ring.is_over
        assert tokens == expected
        assert early > 20
        kept.close()


# ---- not to the end -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "with", "exception"])
def test_a_stream_that_is_ended_early_leaves_position_and_mirror_in_step(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, how: str
) -> None:
    stream = runner.stream_in_one_launch(prompt, 40)
    assert int(next(stream)) == int(expected[0])
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            assert int(next(stream)) == int(expected[1])
    else:
        with pytest.raises(ZeroDivisionError), stream:
            raise ZeroDivisionError
    held = runner._state.seen
    assert held == int(runner.position)
    assert list(stream) == []
    # replay goes on behind the last token that the device made
    assert int(runner.replay()) == int(expected[held - PROMPT])
    assert_works(runner, prompt, expected)


def test_the_device_stops_after_the_token_it_works_on(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    """Asked from another thread, since a launch of the emulated driver returns when it has run."""
    kept = add_spin(runner, 2)
    runner.capture(prompt)
    loop = loop_of(runner)

    def stop_at_the_second_token() -> None:
        until = time.perf_counter() + 30
        while loop.ring.published < 2 and time.perf_counter() < until:
            time.sleep(0)
        loop.stop()

    loop.ring.begin(0)  # or the thread sees tokens of another launch
    thread = threading.Thread(target=stop_at_the_second_token)
    thread.start()
    loop.start(POSITIONS - PROMPT)
    loop.wait()
    thread.join()
    made = loop.ring.published
    assert 2 <= made < POSITIONS - PROMPT
    assert [int(loop.ring.token(index)) for index in range(made)] == expected[:made].tolist()
    runner._state.seen = None
    assert runner.cache.seen_tokens == PROMPT + made
    assert int(runner.replay()) == int(expected[made])
    kept.close()


def test_a_forgotten_stream_asks_the_device_to_stop_and_the_next_call_waits_for_it(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, 40)
    next(stream)
    stops: list[int] = []
    ring = loop_of(runner).ring
    ring.stop, stop = lambda: (stops.append(1), stop()), ring.stop  # type: ignore[method-assign]
    del stream
    gc.collect()
    assert stops
    assert_works(runner, prompt, expected)


CALLS: dict[str, Any] = {
    "replay": lambda runner, prompt: runner.replay(),
    "replay(token)": lambda runner, prompt: runner.replay(7),
    "capture": lambda runner, prompt: runner.capture(prompt),
    "generate": lambda runner, prompt: runner.generate(prompt, 2),
    "generate_in_one_launch": lambda runner, prompt: runner.generate_in_one_launch(prompt, 2),
    "close": lambda runner, prompt: runner.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_any_call_on_the_runner_ends_the_generation_first(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, call: str
) -> None:
    stream = runner.stream_in_one_launch(prompt, 40)
    assert int(next(stream)) == int(expected[0])
    CALLS[call](runner, prompt)
    assert runner.cache.seen_tokens == int(runner.position)
    with pytest.raises(LifecycleError, match="another call on this runner has ended"):
        next(stream)
    stream.close()
    if call != "close":
        assert_works(runner, prompt, expected)


@pytest.mark.parametrize("call", ["replay", "generate_in_one_launch"])
def test_the_end_of_a_generation_that_another_call_has_ended_is_not_waited_for(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, call: str
) -> None:
    stream = runner.stream_in_one_launch(prompt, 40)
    CALLS[call](runner, prompt)
    with pytest.raises(LifecycleError, match="another call on this runner has ended"):
        stream.wait()
    stream.wait()  # closed by the error
    assert_works(runner, prompt, expected)


@pytest.mark.parametrize("end", ["close", "forget"])
def test_an_old_stream_does_not_end_the_generation_after_it(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, end: str
) -> None:
    kept = add_spin(runner, 1)
    old = runner.stream_in_one_launch(prompt, 40)
    next(old)
    stream = runner.stream_in_one_launch(prompt, NEW)
    if end == "close":
        old.close()
    else:
        del old
        gc.collect()
    assert torch.equal(torch.cat(list(stream)), expected[:NEW])
    kept.close()


@pytest.mark.parametrize("how", ["another stream", "closed"])
def test_a_stream_that_was_never_read_gives_no_tokens_of_the_generation_after_it(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, how: str
) -> None:
    old = runner.stream_in_one_launch(prompt, NEW)
    if how == "closed":
        runner.close()
        with pytest.raises(LifecycleError, match="another call on this runner has ended"):
            next(old)
        return
    new = runner.stream_in_one_launch(prompt.flip(1), NEW)
    with pytest.raises(LifecycleError, match="another call on this runner has ended"):
        next(old)
    right = eager_tokens(runner.model, prompt.flip(1), NEW)[0, PROMPT:]
    assert torch.equal(torch.stack(list(new), dim=1)[0], right.cpu())
    assert_works(runner, prompt, expected)


@pytest.mark.parametrize("at", [2, NEW], ids=["a token between", "the last token"])
@pytest.mark.parametrize("call", ["generate", "replay"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_what_on_token_decodes_on_the_same_runner_is_never_taken_for_the_generation(
    graphcore_driver: Driver, captured: bool, call: str, at: int
) -> None:
    device = device_of(graphcore_driver)
    model, prompt, count = make_model(device=device), make_prompt(PROMPT, device=device), 0
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver, capture=captured) as runner:

        def on_token(_: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == at:
                runner.replay() if call == "replay" else runner.generate(prompt.flip(1), NEW + 2)

        with pytest.raises(LifecycleError, match="another call on this runner has ended"):
            runner.generate_in_one_launch(prompt, NEW, on_token=on_token)
        assert count == at
        assert_works(runner, prompt, eager_tokens(model, prompt, NEW)[0, PROMPT:].cpu())


def test_a_cache_that_is_reset_under_a_stream_needs_a_prompt_again(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, NEW)
    next(stream)
    runner.cache.reset()
    stream.close()
    assert runner.cache.seen_tokens == int(runner.position) == 0
    with pytest.raises(LifecycleError, match="the cache was reset"):
        runner.replay()
    assert_works(runner, prompt, expected)


def test_a_stream_is_not_read_inside_a_capture_and_goes_on_behind_it(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, NEW)
    next(stream)
    with graphcore.capture(driver=runner.driver), pytest.raises(CaptureError, match=r"next\(\)"):
        next(stream)
    assert torch.equal(torch.cat(list(stream)), expected[1:NEW])
    assert_works(runner, prompt, expected)


def test_a_stream_that_is_closed_inside_a_capture_stops_and_is_ended_behind_it(
    runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, NEW)
    refused = pytest.raises(CaptureError, match="ending a generation")
    with graphcore.capture(driver=runner.driver), refused:
        stream.close()
    stream.close()
    assert_works(runner, prompt, expected)


def test_a_runner_that_is_closed_inside_a_capture_gives_its_loop_back_behind_it(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    stream = runner.stream_in_one_launch(prompt, NEW)
    loop = loop_of(runner)
    with graphcore.capture(driver=runner.driver):
        runner.close()
    runner.driver.synchronize()
    assert loop.graph.is_closed
    assert loop.ring.is_over
    stream.close()


# ---- interrupts ---------------------------------------------------------------------------------


def test_ctrl_c_while_a_token_is_waited_for_ends_the_generation(
    runner: CUDAGraphAR,
    prompt: torch.Tensor,
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = runner.stream_in_one_launch(prompt, 40)
    assert int(next(stream)) == int(expected[0])
    wait_for, pressed = OneLaunch.wait_for, False

    def press_once(self: OneLaunch, count: int) -> bool:
        nonlocal pressed
        if not pressed:
            pressed = True
            raise KeyboardInterrupt
        return wait_for(self, count)

    monkeypatch.setattr(OneLaunch, "wait_for", press_once)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    held = runner._state.seen
    assert held == int(runner.position)
    assert list(stream) == []
    assert int(runner.replay()) == int(expected[held - PROMPT])
    assert_works(runner, prompt, expected)


_FILES = tuple(
    f"decode/{name}.py" for name in ("flight", "generating", "one_launch", "pace",
                                     "token_ring", "token_stream")
)  # fmt: skip
_EVERY = 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "first", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in range(2, _EVERY + 1))]
)
@pytest.mark.parametrize("on_token", [None, len], ids=["waiting for the end", "reading"])
def test_ctrl_c_at_any_line_leaves_a_runner_that_decodes_right(first: int, on_token: Any) -> None:
    driver = graphcore.open_driver("emulated")
    with CUDAGraphAR(make_model(), max_seq_len=POSITIONS, driver=driver) as runner:
        prompt = make_prompt(PROMPT)
        expected = eager_tokens(runner.model, prompt, 3)
        runner.generate_in_one_launch(prompt, 2)

        def decode() -> None:
            runner.generate_in_one_launch(prompt, 2, on_token=on_token)

        places, _ = press_at(0, decode, _FILES)
        assert places > 80
        for number in range(first, places, _EVERY):
            _, where = press_at(number, decode, _FILES)
            assert where is not None
            assert runner.cache.seen_tokens == int(runner.position), where
            decoded = runner.generate_in_one_launch(prompt, 2)
            assert torch.equal(decoded, expected[:, : PROMPT + 2]), where
            assert torch.equal(runner.replay(), expected[:, PROMPT + 2]), where
        assert runner.captures == 1
