"""Guarding: the part of a runner that gives out its static outputs with the step they belong to.

Every step writes the same tensors again. A guard sees the launches of all graphs of the runner:
each captured variant, those captured later, and whole generations in one launch.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcore.decode.captured_step import CapturedStep
from graphcore.decode.step import DecodeStep
from graphcore.decode.variants import Variants
from graphcore.errors import LifecycleError
from graphcore.executable import GraphExec, OutputGuard
from graphcore.executable.runs import Runs


class Guarding:
    """What a runner does with outputs that outlive a step."""

    _captured: CapturedStep | None
    _step: DecodeStep
    _token: torch.Tensor
    _variants: Variants
    _prompts: Runs | None = None
    """Prompts as runs, since the first guard: they write the logits, eagerly."""
    _eager_steps: Runs | None = None
    """Steps that were not replays, as runs, since the first guard."""

    def guarded_token(self) -> OutputGuard:
        """The token of the newest step, readable until the next one: as :meth:`guarded`.

        ``guard.get()`` after another step raises :class:`OverwrittenOutputError`; ``guard.clone()``
        before it is a tensor of its own. Where several rows share one choice (guidance pairs) it is
        the one token of the pair. ``stream`` gives tensors of its own, which need no guard.
        """
        return self.guarded(self._token, "token")

    def guarded(self, tensor: Any, name: str = "output") -> OutputGuard:
        """A static output of the step, or what was made of one without a copy, of the newest step.

        A view, or a ``.to()`` that changes nothing, is the same memory: guard that too. ``logits``
        are also written by the next prompt, which counts as a step for them.

        Args:
            tensor: :attr:`token`, :attr:`logits`, an alias of one, or a list or mapping of them.
            name: What errors call it.

        Raises:
            LifecycleError: No step is captured: none yet, or decoding is eager.
            CacheTypeError, ConfigurationError: As of :class:`graphcore.OutputGuard`.
        """
        if self._captured is None:
            raise LifecycleError(
                f"guarded: {name}: expected a captured step whose runs can be counted, got none: "
                "call capture(input_ids) first; where decoding is eager, clone what is to be kept"
            )
        guard = OutputGuard(self._captured.executable, tensor, name)
        self._prompts = self._prompts or Runs()
        self._eager_steps = self._eager_steps or Runs()
        guard.watch(self._eager_steps)
        if guard.overlaps(self._step.logits):
            guard.watch(self._prompts)
        for step in self._variants:
            for executable in step.executables:
                self._count_for_guards(executable)
        return guard

    def _count_for_guards(self, executable: GraphExec) -> None:
        """Lets guards of static outputs count the runs of a graph that writes them."""
        if self._prompts is not None:
            # guards of the same memory learn of each other's runs
            OutputGuard(executable, [self._token, self._step.logits])

    def _step_ran_eagerly(self) -> None:
        """A step has written token and logits without a graph, which was disabled meanwhile."""
        if self._eager_steps is not None:
            self._eager_steps.note(None, None)

    def _prompt_is_written(self) -> None:
        """A prompt has written the logits."""
        if self._prompts is not None:
            self._prompts.note(None, None)
