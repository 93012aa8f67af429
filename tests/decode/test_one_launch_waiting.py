"""How the host waits for a generation in one launch: looks, pauses, and what ends a wait.

A launch of the emulated driver returns when it has run. Here its tokens are hidden then, and appear
again as the time goes by that the host sleeps; so no test depends on a clock.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphcore_kernels.decode_loop import OVER, PUBLISHED, STOP
from helpers.decode_models import (
    POSITIONS,
    device_of,
    eager_tokens,
    make_model,
    make_prompt,
)
from helpers.slow_steps import add_spin

import graphcore
from graphcore.decode import CUDAGraphAR, one_launch
from graphcore.decode.one_launch import OneLaunch

PROMPT = 4
NEW = POSITIONS - PROMPT
STEP = 1.3e-3


class Device:
    """Publishes a token every ``STEP`` seconds of a time that passes while the host sleeps.

    Attributes:
        sleeps: Length of each, in seconds.
        asked: How often the driver was asked whether the launch is over.
        fails_at: After so many tokens nothing comes any more, and the launch has ended.
        press_in: Ctrl-C comes in the first sleep that is longer.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []
        self.asked = 0
        self.fails_at = 10**9
        self.press_in = float("inf")
        self._came: list[float] = []
        self._words: Any = None

    def run(self, loop: OneLaunch) -> None:
        """The loop has run; what it has published is hidden."""
        self._words = loop.ring._words
        self._came = [self.now + STEP * (k + 1) for k in range(self._words[PUBLISHED])]
        self._words[PUBLISHED] = self._words[OVER] = 0

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        assert len(self.sleeps) < 10_000, "a wait without an end"
        if seconds > self.press_in:
            raise KeyboardInterrupt
        self.now += seconds
        if self._words[STOP]:  # no further one is begun
            begun = sum(moment - STEP <= self.now - seconds for moment in self._came)
            del self._came[begun:]
        done = min(sum(moment <= self.now for moment in self._came), self.fails_at)
        self._words[PUBLISHED] = done
        self._words[OVER] = done == len(self._came)

    def has_ended(self) -> bool:
        self.asked += 1
        return bool(self._words[OVER]) or self._words[PUBLISHED] == self.fails_at

    @property
    def late(self) -> float:
        """Seconds since the last token."""
        return self.now - self._came[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, start = Device(), OneLaunch.start

    def start_and_hide(self: OneLaunch, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        made.run(self)

    clock = SimpleNamespace(perf_counter=lambda: made.now, sleep=made.sleep)
    monkeypatch.setattr(OneLaunch, "start", start_and_hide)
    monkeypatch.setattr(OneLaunch, "_has_ended", lambda self: made.has_ended())
    monkeypatch.setattr(one_launch, "time", clock)
    return made


@pytest.fixture
def runner() -> Iterator[CUDAGraphAR]:
    driver = graphcore.open_driver("emulated")
    with CUDAGraphAR(make_model(), max_seq_len=POSITIONS, driver=driver) as made:
        yield made


@pytest.fixture
def prompt() -> torch.Tensor:
    return make_prompt(PROMPT)


@pytest.fixture
def expected(runner: CUDAGraphAR, prompt: torch.Tensor) -> torch.Tensor:
    return eager_tokens(runner.model, prompt, NEW)


def unused(expected: torch.Tensor) -> int:
    return next(token for token in range(3, 97) if token not in expected)


@pytest.mark.parametrize("ends", [False, True], ids=["nothing ends it", "an end never comes"])
def test_a_whole_generation_is_waited_for_with_fewer_looks_than_tokens(
    device: Device, runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, ends: bool
) -> None:
    eos = unused(expected) if ends else ()
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW, eos, 2), expected)
    assert 8 < len(device.sleeps) < (NEW if ends else 28)
    assert device.late <= max(200e-6, 0.02 * NEW * STEP)
    # the driver only where nothing had come since the look before: at the two ends
    assert device.asked < 16
    assert runner.cache.seen_tokens == POSITIONS
    assert_looked_at_each_token(device, runner, prompt, expected)


def assert_looked_at_each_token(
    device: Device, runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    """The control: a callback wants each token, in time."""
    device.sleeps.clear()
    began, late = device.now, []

    def on_token(_: torch.Tensor) -> None:
        late.append(device.now - began - STEP * (len(late) + 1))

    decoded = runner.generate_in_one_launch(prompt, NEW, (), on_token=on_token)
    assert torch.equal(decoded, expected)
    assert len(device.sleeps) > 5 * NEW
    assert max(device.sleeps) == 200e-6
    assert 0 <= min(late) <= max(late) <= 200e-6


@pytest.mark.parametrize("at", [0, 2, 9, 40])
def test_a_generation_that_ends_early_is_over_soon_after_its_last_token(
    device: Device, runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor, at: int
) -> None:
    eos = int(expected[0, PROMPT + at])
    eager = eager_tokens(runner.model, prompt, NEW, eos_token_id=eos, pad_token_id=2)
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW, eos, 2), eager)
    assert 0 <= device.late <= 4 * STEP


def test_ctrl_c_in_a_long_pause_ends_the_generation_after_its_token(
    device: Device, runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor
) -> None:
    device.press_in = 2 * STEP
    with pytest.raises(KeyboardInterrupt):
        runner.generate_in_one_launch(prompt, NEW, ())
    pressed = next(k for k, seconds in enumerate(device.sleeps) if seconds > 2 * STEP)
    behind = device.sleeps[pressed + 1 :]
    assert behind  # the token that the device works on
    assert sum(behind) <= STEP + 200e-6  # and no longer: none of these is an estimate
    assert max(behind) <= 200e-6
    device.press_in = float("inf")
    assert runner.cache.seen_tokens == int(runner.position)
    assert torch.equal(runner.generate_in_one_launch(prompt, NEW, ()), expected)


def test_a_launch_that_fails_on_its_way_is_found_within_two_pauses(
    device: Device, runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    device.fails_at = 20
    runner.generate_in_one_launch(prompt, NEW, ())
    assert device.now - 20 * STEP <= 2 * 50e-3


def test_a_signal_ends_a_wait_at_once(runner: CUDAGraphAR, prompt: torch.Tensor,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """By the real clock: a loop that was never launched, and a driver that says it still runs."""
    runner.generate_in_one_launch(prompt, 2)
    assert runner._captured is not None
    loop = runner._captured.in_one_launch(runner._step)
    loop.ring.begin(NEW)
    monkeypatch.setattr(loop, "_has_ended", lambda: False)
    main = threading.main_thread().ident
    assert main is not None
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Timer(0.2, press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.wait()
    assert time.perf_counter() - pressed[0] < 5.0
    thread.join()
    loop.ring._words[OVER] = 1


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [False, True], ids=["nothing ends it", "an end never comes"])
def test_on_a_device_the_end_takes_far_fewer_looks_than_its_tokens(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = graphcore.open_driver("cuda")
    model = make_model(device=device_of(driver))
    prompt = make_prompt(PROMPT, device=device_of(driver))
    expected = eager_tokens(model, prompt, NEW)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)
    monkeypatch.setattr(one_launch, "time", clock)
    with CUDAGraphAR(model, max_seq_len=POSITIONS, driver=driver) as runner:
        kept = add_spin(runner, 2)
        eos = unused(expected) if ends else ()
        looks = []
        for on_token in (None, lambda ids: None):
            sleeps.clear()
            ids = runner.generate_in_one_launch(prompt, NEW, eos, 2, on_token=on_token)
            assert torch.equal(ids, expected)
            looks.append(len(sleeps))
        assert 0 < looks[0] < looks[1] / 3
        kept.close()
