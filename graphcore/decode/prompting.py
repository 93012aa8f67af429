"""Prompting: the part of a runner that takes prompts in, and captures the step for what follows.

Guarantees: everything is checked before the cache is touched; a prompt that fails leaves the cache
as it was, and no step is launched behind it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from graphcore.decode import checks
from graphcore.decode.cache_state import refuse_inside_capture
from graphcore.decode.capture_lane import CaptureLane
from graphcore.decode.captured_step import CapturedStep, capture_step
from graphcore.decode.compiled_step import Compile
from graphcore.decode.exchanging import Exchanging
from graphcore.decode.forwards import check_continues, checked_prompt
from graphcore.decode.guarding import Guarding
from graphcore.decode.model_settings import ModelSettings
from graphcore.decode.prompt import Prompt
from graphcore.decode.sampling import check_seed
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.step import DecodeStep
from graphcore.decode.undoing import taken_back
from graphcore.decode.variants import Variants
from graphcore.driver import Driver

_log = logging.getLogger("graphcore")


class StepChoice(Enum):
    """What becomes of the captured step behind a prompt, from the boldest to the most cautious."""

    KEEP = "replay"
    CAPTURE = "capture"
    """There is none of this kind yet."""
    ANEW = "capture anew"
    """What it works on has changed: all variants go."""


class Prompting(Guarding, Exchanging):
    """Checks and forwards prompts, and finds or captures the variant of the step behind them."""

    driver: Driver
    captures: int
    _step: DecodeStep
    _token: torch.Tensor
    _variants: Variants
    _captured: CapturedStep | None
    _compile: Compile
    _lane: CaptureLane

    # ---- what the runner does -------------------------------------------------------------------

    @abstractmethod
    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every static tensor that the step reads or writes, by name."""

    @abstractmethod
    def _arm(self) -> None:
        """Lets ``replay`` decode."""

    # ---- prompts --------------------------------------------------------------------------------

    def _checked_prompt(
        self,
        caller: str,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        cache: StaticKVCache | None,
        seed: int | None,
        inputs: Mapping[str, Any],
    ) -> Prompt:
        """The prompt, checked; ends what is in flight, and takes over ``cache``."""
        check_seed(seed)
        self._refuse_closed(caller)
        refuse_inside_capture(caller)
        self._end_flight()
        if cache is not None:
            self.use(cache)
        self.cache.check_buffers()
        checks.check_training(self._step.forward.model)
        checked = checked_prompt(self._step.forward, input_ids, attention_mask, inputs)
        return replace(checked, seed=seed)

    def _begin(self, checked: Prompt) -> None:
        """Forwards a checked prompt, captures if need be, and arms ``replay``."""
        start = self.cache.seen_tokens
        self._state.check_continues()
        self._generation += 1
        self.cache.taken_over(self)
        self._disarm("the prompt is being forwarded")
        # where nothing is captured yet: what the prompt's forward changes itself is found out once
        is_first = not self._variants and self._eager_reason() is None
        before = ModelSettings(self._step.forward.model) if is_first else None
        try:
            with self._state.written_by(self):
                with torch.no_grad():
                    self._step.set_eos((), 0)
                    self._step.prefill(checked)
                    self.captures += self._prompt_graphs.new_captures()
                    self._prompt_is_written()
                self._captured = None if self._eager_reason() else self._captured_variant(before)
                # last: where the prompt or the capture fails, it is not part of what goes on
                self._step.sampler.begin(
                    checked.ids, checked.mask, seed=checked.seed, continues=start > 0
                )
        except BaseException as error:
            taken_back(self.cache, start, error)
            self._disarm("the last prompt failed: capture another one")
            raise
        self._arm()

    def _continue(self, other: Prompting) -> None:
        """Goes on where ``other`` stopped, whose cache is a smaller view of the same storage."""
        self._end_flight()
        cache = self.cache
        cache.rewind(cache.seen_tokens)  # what lies behind is of other generations
        self._generation += 1
        self._step.take_over(other._step)
        self._captured = None if self._eager_reason() else self._captured_variant()
        self._arm()

    def _captured_variant(self, before: ModelSettings | None = None) -> CapturedStep:
        """The captured step for what comes next; captured now where there is none.

        ``before``: the model's settings before the first prompt.
        """
        # once a prompt: a replay of old weights behind a prompt of new ones would give neither's
        self._variants.look(self.named_tensors().items, self._step.forward.model)
        stale, found = self._variants.stale, self._variants.get(self._step.key)
        choice = StepChoice.ANEW if stale else StepChoice.CAPTURE if not found else StepChoice.KEEP
        choice = self._choose_step(choice, stale or "")
        if choice is StepChoice.KEEP and found is not None:
            return found
        self._captured = None
        if choice is StepChoice.ANEW:
            _log.info("capturing the decode step again: %s", stale or "for another rank")
            self._variants.close()
            self._prompt_graphs.look(self._step.forward)
        else:
            self._variants.drop(self._step.key)
        made = capture_step(self._step, self._lane, compile_how=self._compile)
        try:
            self._step_is_captured()
        except BaseException:
            made.close()
            raise
        self._variants.put(self._step.key, made, before)
        self._count_for_guards(made.executable)
        self.captures += 1
        _log.info("captured the decode step on driver %s", self.driver.name)
        return made

    def _choose_step(self, choice: StepChoice, why: str) -> StepChoice:
        """What becomes of the captured step; where several ranks decode: the same on all."""
        del why
        return choice

    def _step_is_captured(self) -> None:
        """Nothing; where several ranks decode: waits until it is captured on all."""

    def _arm_behind_others(self) -> None:
        """Goes on behind what the cache holds, whoever wrote it."""
        check_continues(self._step.forward)
        self._state.check_continues()
        self.cache.taken_over(self)
        with self._state.written_by(self), torch.no_grad():
            self._captured = None if self._eager_reason() else self._captured_variant()
        self._arm()
