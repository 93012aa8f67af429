"""Exchanging: the half of a runner that goes over to another cache, its captured steps with it.

Guarantees: a graph of the old cache is never launched in between, and an interrupt leaves one cache
in use.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch

from graphcore.decode.cache_binding import (
    BindingRoute,
    CacheBinding,
    bind_variants,
    layout_difference,
)
from graphcore.decode.cache_state import CacheState, refuse_inside_capture
from graphcore.decode.captured_step import CapturedStep
from graphcore.decode.forwards import cache_for
from graphcore.decode.prompt_graphs import AllPromptGraphs
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.step import DecodeStep
from graphcore.decode.variants import Variants

_log = logging.getLogger("graphcore")


class Exchanging(ABC):
    """Takes over caches for a runner, which watches the one that it has."""

    model: Any
    cache: StaticKVCache
    rebinds: int
    last_binding: CacheBinding | None
    _kind: dict[str, Any]
    _step: DecodeStep
    _state: CacheState
    _variants: Variants
    _prompt_graphs: AllPromptGraphs
    _captured: CapturedStep | None
    _token: torch.Tensor
    _generation: int
    _may_force: bool

    # ---- what the runner does -------------------------------------------------------------------

    @property
    @abstractmethod
    def holds_graph(self) -> bool:
        """Whether a graph with the cache's addresses exists."""

    @abstractmethod
    def cache_changed(self, name: str, how: str) -> None:
        """A captured buffer was replaced."""

    @abstractmethod
    def cache_was_emptied(self, reason: str) -> None:
        """The contents are not those of the last step."""

    @abstractmethod
    def _step_for(self, cache: StaticKVCache) -> DecodeStep:
        """A step with buffers of its own for caches of the layout of ``cache``."""

    @abstractmethod
    def _refuse_closed(self, caller: str) -> None:
        """Raises LifecycleError where the runner is closed."""

    @abstractmethod
    def _end_flight(self, number: int | None = None) -> None:
        """Ends a generation that runs in one launch."""

    @abstractmethod
    def _disarm(self, why: str) -> None:
        """Lets ``replay`` refuse, saying why."""

    @abstractmethod
    def _eager_reason(self) -> str | None:
        """Why decoding is eager; None where it is not."""

    # ---- another cache --------------------------------------------------------------------------

    def use(self, cache: StaticKVCache) -> CacheBinding:
        """Works on another cache from now on, and lets go of the one before.

        Where it has the same layout (batch, capacity, dtype, heads), captured graphs are rebound to
        its buffers; otherwise they are given back and the next prompt captures again, with other
        static outputs (``token``, ``logits``). What was done and why is returned, kept as
        ``last_binding`` and logged at INFO. What the cache holds stays: :meth:`capture` continues
        behind it, and so does ``replay(token)`` where a graph is there. The other cache keeps its
        contents. To serve several sizes, use :class:`DecodeBuckets`.

        Waits for the launches before, so that nothing here keeps the old cache's memory.

        Raises:
            ConfigurationError, CacheTypeError: As at construction; nothing was changed.
            CaptureError: Inside a capture.
            LifecycleError: The runner is closed.
        """
        self._refuse_closed("use()")
        refuse_inside_capture("use()")
        self._end_flight()
        if cache is self.cache:
            self.last_binding = CacheBinding(BindingRoute.SAME, "it is the runner's cache")
            return self.last_binding
        cache = cache_for(self.model, cache, None, None, **self._kind)
        difference = layout_difference(self.cache, cache)
        step = self._step if difference is None else self._step_for(cache)
        self._disarm("the last change of caches failed: capture a prompt")
        self._generation += 1
        binding = bind_variants(self._variants, difference, cache)
        self._prompt_graphs.use(cache, difference)
        try:
            self._move_to(cache, step)
        except BaseException:
            self._move_to(cache, step)  # an interrupt must not leave two caches in use
            raise
        self.rebinds += binding.rebound
        self.last_binding = binding
        _log.info("the runner works on another cache: %s", binding)
        return binding

    def _move_to(self, cache: StaticKVCache, step: DecodeStep) -> None:
        """Exchanges cache and step for good; may be done twice."""
        self.cache.unwatch(self)
        step.use(cache)
        step.sampler.forget()
        self._step, self._token = step, step.token
        self.__dict__["cache"], self._state = cache, cache._state  # not by assigning: see Fixed
        cache.watch(self)
        self._variants.stale = None
        self._captured = self._variants.get(step.key)
        can_continue = self._captured is not None or self._eager_reason() is not None
        self._disarm("the runner was given another cache: expected a prompt")
        self._may_force = can_continue and step.has_logits
