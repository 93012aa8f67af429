"""Our ways of decoding, for suite decode: a captured step, a compiled one, and a single launch."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch

from graphcore.bench.harness import Arm
from graphcore.bench.suites.decode_arms import (
    behind_a_step,
    clocked,
    generating,
    looping,
    on_device,
    submitting,
)
from graphcore.bench.suites.decode_models import Subject
from graphcore.decode import CUDAGraphAR, TokenStream
from graphcore.decode.one_launch import OneLaunch
from graphcore.driver import Driver

PLAIN, COMPILED, ONE_LAUNCH = "ours plain", "ours compiled", "ours in one launch"

Note = Mapping[str, Any]


class OurWay:
    """One runner, warmed up: its arms, and what was paid once.

    Args:
        name: Of its arm.
        subject: What it decodes.
        driver: Where.
        end: An id that ends a row, which none chooses.
        options: Further options of the runner.
    """

    def __init__(
        self, name: str, subject: Subject, driver: Driver, end: int, **options: Any
    ) -> None:
        self.name = name
        self._subject, self._driver, self._end = subject, driver, end
        if subject.is_encoder_decoder:
            options["encoder_len"] = subject.prompt.shape[1]
        self.runner = CUDAGraphAR(
            subject.model, max_seq_len=subject.capacity, driver=driver, **options
        )
        self.capture_seconds = self._timed(lambda: self.runner.capture(subject.prompt))
        self._held = self.runner.cache.seen_tokens
        self.first_replay_seconds = self._timed(self.runner.replay)
        self.prompt_seconds = self._timed(self.again)

    def generate(self, tokens: int) -> torch.Tensor:
        """Prompt and new ids."""
        return self.runner.generate(self._subject.prompt, tokens, self._end, 0)

    def arm(self) -> Arm:
        """The whole ``generate``."""
        return generating(self.name, self.generate, self._driver)

    def one_launch(self) -> Arm:
        """The whole generation by one launch; AttributeError where the runner cannot."""
        runner: Any = self.runner
        run = functools.partial(runner.generate_in_one_launch, self._subject.prompt)
        return generating(ONE_LAUNCH, lambda tokens: run(tokens, self._end, 0), self._driver)

    def step_arm(self) -> Arm:
        """The step's graph alone, by the device's clock."""
        assert self.runner.executable is not None
        return on_device(
            f"{self.name}: step", self.begin, self.runner.executable.launch, self._driver
        )

    def loop_arm(self) -> Arm:
        """A loop of replays, without what ``generate`` does besides."""
        return looping(f"{self.name}: loop", self.begin, self.runner.replay, self._driver)

    def host_arm(self) -> Arm:
        """The replay call alone, by the host's clock."""
        return submitting("ours", self.begin, self.runner.replay, self._driver)

    def host_arm_behind_a_step(self) -> Arm:
        """The same, each call made while a step runs."""
        return behind_a_step("ours", self.begin, clocked(self.runner.replay), self._driver)

    def begin(self) -> None:
        """Back to the end of the prompt."""
        self.runner.cache.seek(self._held)

    def again(self) -> None:
        """Forwards the prompt anew, into an empty cache."""
        self.runner.cache.reset()
        self.runner.capture(self._subject.prompt)

    def take_off(self, tokens: int) -> TokenStream:
        """Launches a generation behind the prompt, as ``generate_in_one_launch`` does."""
        self.runner._step.set_eos((self._end,), 0)
        return self.runner._take_off(tokens, (self._end,))

    @property
    def loop(self) -> OneLaunch:
        """What :meth:`take_off` launches."""
        assert self.runner._captured is not None
        return self.runner._captured.in_one_launch(self.runner._step)

    @property
    def nodes(self) -> int:
        """Nodes of the step."""
        assert self.runner.graph is not None
        return len(self.runner.graph.snapshot().nodes)

    def one_time_notes(self, case: str) -> list[Note]:
        """What was paid once, and what the step is made of."""
        once = max(0.0, self.capture_seconds - self.prompt_seconds)
        what = "compile and capture" if self.name == COMPILED else "capture"
        return [
            _note(f"{case} {self.name}: {what}", "ms", once * 1e3),
            _note(f"{case} {self.name}: first replay", "us", self.first_replay_seconds * 1e6),
            _note(f"{case} {self.name}: nodes", "nodes", self.nodes),
        ]

    def close(self) -> None:
        """Gives the runner back."""
        self.runner.close()

    def _timed(self, act: Any) -> float:
        self._driver.synchronize()
        start = time.perf_counter()
        act()
        self._driver.synchronize()
        return time.perf_counter() - start


def _note(case: str, unit: str, value: float) -> Note:
    return {"case": case, "unit": unit, "ours": round(value, 2)}
