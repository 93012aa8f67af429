"""How a prompt's tokens go through a model: in one piece, or in chunks that may be replayed.

Legend: R rows of the cache, T tokens of the prompt, C of a chunk, S slots, V vocabulary. In one
piece the masks are ``[R, 1, T, S]`` and the activations grow with T; in chunks both grow with C.
"""

from __future__ import annotations

import logging
import os

import torch

from graphcore.decode.cache_binding import bind_variants
from graphcore.decode.cache_state import static_zeros
from graphcore.decode.captured_step import CapturedStep, named_modules, without_cached_casts
from graphcore.decode.forward import Forward
from graphcore.decode.sizes import check_positive
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.variants import Variants
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.executable import Capture, capture
from graphcore.executable.capture_options import LegacyWork
from graphcore.interop.torch import MemoryPool

_log = logging.getLogger("graphcore")


class Chunks:
    """Forwards ids in chunks of ``size`` tokens, the rest last."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, forward: Forward, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``ids [R, T]``, appended to the forward's cache."""
        logits = None
        for chunk in torch.split(ids, self._size, dim=1):
            logits = forward.logits(chunk)
        assert logits is not None, "check_ids refuses an empty prompt"
        return logits


class CapturedChunks(Chunks):
    """As :class:`Chunks`; full chunks replay a graph of their own, the rest is eager.

    The first full chunk of all is the warm-up: it runs eagerly, where the capture that follows it
    will be. Owns the graphs. Not locked.
    """

    def __init__(
        self,
        size: int,
        driver: Driver,
        on_legacy_work: LegacyWork,
        pool: MemoryPool | None = None,
    ) -> None:
        super().__init__(size)
        self._driver = driver
        self._on_legacy_work = on_legacy_work
        self._pool = pool
        self._variants = Variants()
        self._tokens: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._uncounted = 0

    def __call__(self, forward: Forward, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``ids [R, T]``, appended to the forward's cache."""
        if os.environ.get("GRAPHCORE_DISABLE") == "1":
            return super().__call__(forward, ids)
        logits = None
        self._look(forward)
        for chunk in torch.split(ids, self._size, dim=1):
            is_full = chunk.shape[1] == self._size
            logits = self._full_chunk(forward, chunk) if is_full else forward.logits(chunk)
        assert logits is not None, "check_ids refuses an empty prompt"
        return logits

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

    def _look(self, forward: Forward) -> None:
        """Gives back graphs of buffers or weights that the forward would not use now."""
        if not self._variants:
            return
        self._variants.look(lambda: self._named(forward).items(), forward.model)
        if self._variants.stale:
            _log.info("capturing the chunk of a prompt again: %s", self._variants.stale)
            self._variants.close()

    def _full_chunk(self, forward: Forward, chunk: torch.Tensor) -> torch.Tensor:
        if self._tokens is None:
            self._tokens = static_zeros(tuple(chunk.shape), torch.int64, chunk.device)
        self._tokens.copy_(chunk)
        key = ("chunk", self._size, *forward.key)
        found = self._variants.get(key)
        if found is None:
            self._variants.put(key, self._captured(forward, self._tokens))
            self._uncounted += 1
            _log.info("captured a chunk of %d tokens on driver %s", self._size, self._driver.name)
        else:
            found.executable.launch()
            forward.cache._state.seen = forward.cache.seen_tokens + self._size
        assert self._logits is not None, "the warm-up before the first capture made it"
        return self._logits

    def _captured(self, forward: Forward, tokens: torch.Tensor) -> CapturedStep:
        """Forwards the chunk for real, and captures the same."""
        capturing = capture(
            driver=self._driver, on_legacy_work=self._on_legacy_work, pool=self._pool
        )

        made: list[torch.Tensor] = []
        with without_cached_casts():
            capturing.warm_up(lambda: made.append(forward.logits(tokens)), 1)
        buffer = self._logits
        if buffer is None or (buffer.shape, buffer.dtype) != (made[0].shape, made[0].dtype):
            # not in the warm-up: it would lie in the memory of the graph
            buffer = static_zeros(tuple(made[0].shape), made[0].dtype, made[0].device)
        self._logits = buffer.copy_(made.pop())
        with without_cached_casts(), capturing, named_modules(capturing, forward.model):
            self._keep(capturing, forward)
            buffer.copy_(forward.logits(tokens))
        executable = capturing.graph.instantiate(guard="owners")
        return CapturedStep(capturing.graph, executable, forward.model)

    def _named(self, forward: Forward) -> dict[str, torch.Tensor]:
        assert self._tokens is not None, "graphs exist only after the first full chunk"
        assert self._logits is not None
        return {
            **forward.cache.named_tensors(padded=True),
            **forward.named_tensors(),
            "chunk tokens": self._tokens,
            "chunk logits": self._logits,
        }

    def _keep(self, capturing: Capture, forward: Forward) -> None:
        for name, tensor in self._named(forward).items():
            capturing.keep(tensor, name)
        capturing.keep(forward.model, "model")


def check_prefill(chunk_size: int | None, capture_prefill: bool) -> None:
    """Refuses a chunk size that is no size, and a captured prefill without one.

    Raises:
        ConfigurationError: Names the argument.
    """
    if chunk_size is not None:
        check_positive("prefill_chunk_size", chunk_size)
    elif capture_prefill:
        raise ConfigurationError(
            "capture_prefill: expected prefill_chunk_size with it, since a graph has one length, "
            "got None"
        )
