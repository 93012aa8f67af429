"""Holding: the half of a runner that tells what it holds: graph, static tensors, how it decodes.

Nothing here launches or changes anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from graphcore.decode.captured_step import CapturedStep
from graphcore.decode.guidance import Guide
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.step import DecodeStep
from graphcore.driver import Driver
from graphcore.errors import LifecycleError
from graphcore.executable import Graph, GraphExec
from graphcore.resources.fingerprint import Fingerprint


class Holding(ABC):
    """What a runner holds, to be read."""

    cache: StaticKVCache
    driver: Driver
    _step: DecodeStep
    _captured: CapturedStep | None
    _token: torch.Tensor
    _guide: Guide | None

    @abstractmethod
    def _eager_reason(self) -> str | None:
        """Why decoding is eager; None where it is not."""

    @property
    def graph(self) -> Graph | None:
        """The captured step; None before the first capture and where decoding is eager."""
        return self._captured.graph if self._captured else None

    @property
    def executable(self) -> GraphExec | None:
        """What replays launch; None where there is no graph."""
        return self._captured.executable if self._captured else None

    @property
    def execution(self) -> str:
        """How tokens are decoded: "graph" or "eager"."""
        return "eager" if self._eager_reason() else "graph"

    @property
    def reason(self) -> str:
        """Why :attr:`execution` is what it is."""
        return self._eager_reason() or f"the step is captured on the {self.driver.name} driver"

    @property
    def logits(self) -> torch.Tensor:
        """Static ``[batch, vocabulary]`` of the last forward, in the model's dtype.

        With guidance float32, the two branches combined. Under autocast the model's may be
        narrower: they lie in the same tensor, where there is one. The next step overwrites it.
        Another tensor only after the model was cast or got another vocabulary, or with a cache of
        another layout.

        Raises:
            LifecycleError: No prompt yet.
        """
        return self._step.logits

    @property
    def token(self) -> torch.Tensor:
        """Static int64 ``[batch]``: the last step's token. The next step overwrites it."""
        return self._token

    @property
    def seed(self) -> int | None:
        """Of the random numbers of the current generation; None where none are drawn."""
        return self._step.sampler.seed

    @property
    def position(self) -> torch.Tensor:
        """0-d int64 on the device: the slot the next token takes."""
        return self.cache.position

    @property
    def guidance(self) -> Guide | None:
        """The guidance inside the step, whose ``scale`` may be set; None: there is none."""
        return self._guide

    def fingerprint(self) -> Fingerprint:
        """What the captured step depends on; the static tensors count by name, not by address.

        Raises:
            LifecycleError: Nothing was captured.
        """
        if self._captured is None:
            raise LifecycleError("fingerprint: expected a captured step; call capture(input_ids)")
        return self._captured.graph.fingerprint(self.named_tensors())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every static tensor that the step reads or writes, by name (weights left out)."""
        return self._step.named_tensors()
