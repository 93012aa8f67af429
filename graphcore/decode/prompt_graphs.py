"""PromptGraphs: captured forwards of pieces of prompts, beside the step that follows a prompt.

The first piece of its kind is the warm-up: it is forwarded for real, where the capture that follows
it will be; later ones are copied to where the graph reads, and replayed. Legend: R rows, T tokens
of a piece, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from graphcore.decode.cache_binding import bind_variants
from graphcore.decode.cache_state import static_zeros
from graphcore.decode.capture_lane import CaptureLane
from graphcore.decode.captured_step import CapturedStep, named_modules
from graphcore.decode.forward import Forward
from graphcore.decode.guidance import GuidedForward
from graphcore.decode.model_settings import ModelSettings
from graphcore.decode.number_tensors import numbers_filled
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.surroundings import holds, surroundings
from graphcore.decode.variants import Variants

_log = logging.getLogger("graphcore")


class PromptGraphs:
    """Graphs of pieces of one length, by key. Owns them. Not locked.

    Args:
        kind: What a piece is called: in the log, and before the names of its tensors.
        lane: Where they are captured.
    """

    def __init__(self, kind: str, lane: CaptureLane) -> None:
        self._kind = kind
        self._lane = lane
        self._variants = Variants()
        self._tokens: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._uncounted = 0

    @property
    def holds_graph(self) -> bool:
        """Whether a graph with the cache's addresses exists."""
        return len(self._variants) > 0

    def new_captures(self) -> int:
        """Graphs captured since this was last asked."""
        count, self._uncounted = self._uncounted, 0
        return count

    def mark_stale(self, name: str, how: str) -> None:
        """A static buffer was replaced: the next prompt captures again."""
        self._variants.mark_stale(name, how)

    def use(self, cache: StaticKVCache, difference: str | None) -> None:
        """Works on ``cache`` from now on, which differs from the last one by ``difference``."""
        bind_variants(self._variants, difference, cache)
        self._variants.stale = None
        if difference is not None:
            self._tokens = self._logits = None

    def close(self) -> None:
        """Gives the graphs back."""
        self._variants.close()

    # ---- for those that forward pieces ----------------------------------------------------------

    def look(self, forward: Forward) -> None:
        """Gives back graphs of buffers, weights or settings that the forward has not now."""
        if not self._variants:
            return
        self._variants.look(lambda: self._named(forward).items(), forward.model)
        if self._variants.stale:
            _log.info("capturing the %s again: %s", self._kind, self._variants.stale)
            self._variants.close()

    def _forwarded(
        self,
        forward: Forward,
        piece: torch.Tensor,
        run: Callable[[torch.Tensor], torch.Tensor],
        key: tuple[Hashable, ...],
        begin: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``piece [R, T]``, by replay where there is a graph.

        Args:
            forward: Whose cache is written; its mirror is moved for a replay.
            piece: The tokens.
            run: What forwards tokens, and is captured.
            key: What selects the graph.
            begin: Called right before the capture: what ``run`` finds must be as before the piece.
        """
        if self._tokens is None:
            self._tokens = static_zeros(tuple(piece.shape), torch.int64, piece.device)
        self._tokens.copy_(piece)
        key = *key, *surroundings(piece.device)
        found = self._variants.get(key)
        if found is None:
            self._variants.put(key, self._captured(forward, self._tokens, run, begin))
            self._uncounted += 1
            _log.info("captured the %s on driver %s", self._kind, self._lane.driver.name)
        else:
            found.executable.launch()
            forward.cache._state.seen = forward.cache.seen_tokens + piece.shape[1]
        assert self._logits is not None, "the warm-up before the first capture made it"
        return self._logits

    def _captured(
        self,
        forward: Forward,
        tokens: torch.Tensor,
        run: Callable[[torch.Tensor], torch.Tensor],
        begin: Callable[[], object],
    ) -> CapturedStep:
        """Forwards the piece for real, and captures the same."""
        capturing, settings = self._lane.capture(), ModelSettings(forward.model)
        made: list[torch.Tensor] = []
        capturing.warm_up(lambda: made.append(run(tokens)), 1)
        buffer = self._logits
        if buffer is None or not holds(buffer, made[0]):
            # not in the warm-up: it would lie in the memory of the graph
            buffer = static_zeros(tuple(made[0].shape), made[0].dtype, made[0].device)
        self._logits = buffer.copy_(made.pop())
        begin()
        with (
            capturing,
            named_modules(capturing, forward.model),
            numbers_filled(forward.model),
        ):
            for name, tensor in self._named(forward).items():
                capturing.keep(tensor, name)
            for label, kept in self._kept(forward).items():
                capturing.keep(kept, label)
            buffer.copy_(run(tokens))
        executable = capturing.graph.instantiate(guard="owners")
        return CapturedStep(capturing.graph, executable, forward.model, settings)

    def _kept(self, forward: Forward) -> dict[str, object]:
        """What else the graph keeps alive, by label."""
        return {"model": forward.model}

    def _named(self, forward: Forward) -> dict[str, torch.Tensor]:
        assert self._tokens is not None, "graphs exist only after the first piece"
        assert self._logits is not None
        return {
            **forward.cache.named_tensors(padded=True),
            **forward.named_tensors(),
            f"{self._kind} tokens": self._tokens,
            f"{self._kind} logits": self._logits,
        }


class AllPromptGraphs:
    """What a runner holds of them: none, or one for each kind of piece."""

    def __init__(self, *kinds: Any) -> None:
        self._kinds: tuple[PromptGraphs, ...] = tuple(
            each for each in kinds if isinstance(each, PromptGraphs)
        )

    @property
    def holds_graph(self) -> bool:
        """Whether any graph with the cache's addresses exists."""
        return any(each.holds_graph for each in self._kinds)

    def new_captures(self) -> int:
        """Graphs captured since this was last asked."""
        return sum(each.new_captures() for each in self._kinds)

    def mark_stale(self, name: str, how: str) -> None:
        """A static buffer was replaced."""
        for each in self._kinds:
            each.mark_stale(name, how)

    def use(self, cache: StaticKVCache, difference: str | None) -> None:
        """Works on another cache from now on."""
        for each in self._kinds:
            each.use(cache, difference)

    def look(self, forward: Forward) -> None:
        """Gives back graphs of buffers, weights or settings that the forward has not now.

        Those that its prompt has captured again since stay.
        """
        inner = forward.inner if isinstance(forward, GuidedForward) else forward
        for each in self._kinds:
            each.look(inner)

    def close(self) -> None:
        """Gives all graphs back."""
        for each in self._kinds:
            each.close()
