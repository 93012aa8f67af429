"""The captured variants of one step, by key, and what has become of them.

A step that cannot be one graph (cross K/V written or not, rows of unequal length or not) has a key
that says which it is now; each key has a graph of its own. When a buffer, a weight or a setting of
the step changes, all variants are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import torch

from graphcore.decode.captured_step import CapturedStep
from graphcore.decode.model_settings import ModelSettings, Name

Key = tuple[Hashable, ...]


class Variants:
    """Owns captured steps. Not locked."""

    def __init__(self) -> None:
        self._steps: dict[Key, CapturedStep] = {}
        self.stale: str | None = None
        self._moving: frozenset[Name] = frozenset()  # settings that prompts change themselves

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[CapturedStep]:
        return iter(self._steps.values())

    def get(self, key: Key) -> CapturedStep | None:
        """The variant of ``key``; None where it was not captured, or any is stale."""
        return None if self.stale else self._steps.get(key)

    def put(self, key: Key, step: CapturedStep, before: ModelSettings | None = None) -> None:
        """Keeps ``step`` as the variant of ``key``.

        Args:
            key: Of it.
            step: Captured behind a prompt.
            before: The model's settings before that; None: nobody looked.
        """
        if before is not None:
            self._moving |= before.changes(step.settings)
        step.settings.leave_out(self._moving)
        self._steps[key] = step

    def drop(self, key: Key) -> None:
        """Gives the variant of ``key`` back, if there is one."""
        step = self._steps.pop(key, None)
        if step is not None:
            step.close()

    def mark_stale(self, name: str, how: str) -> None:
        """A static buffer was replaced: no variant may be launched any more."""
        if self._steps:
            self.stale = f"{name}: {how}"
        for step in self._steps.values():
            step.mark_stale(how, name)

    def look(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]], model: object) -> None:
        """Finds out whether a variant uses what the step would not use now."""
        if not self._steps:
            return
        settings = ModelSettings(model)
        for step in self._steps.values():
            self.stale = self.stale or step.what_changed(model, named(), settings)

    def close(self) -> None:
        """Gives all back; the next one is captured anew."""
        steps, self._steps = self._steps, {}
        self.stale = None
        for step in steps.values():
            step.close()
