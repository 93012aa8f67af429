"""How a prompt's tokens go through a model: in one piece, or in chunks that may be replayed.

Legend: R rows of the cache, T tokens of the prompt, C of a chunk, S slots, V vocabulary. In one
piece the masks are ``[R, 1, T, S]`` and the activations grow with T; in chunks both grow with C.
"""

from __future__ import annotations

import os

import torch

from graphcore.decode.capture_lane import CaptureLane
from graphcore.decode.forward import Feed, Forward, in_one_piece
from graphcore.decode.prompt_graphs import PromptGraphs
from graphcore.decode.sizes import check_positive
from graphcore.errors import ConfigurationError


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


class CapturedChunks(PromptGraphs, Chunks):
    """As :class:`Chunks`; full chunks replay a graph of their own, the rest is eager."""

    def __init__(self, size: int, lane: CaptureLane) -> None:
        PromptGraphs.__init__(self, "chunk", lane)
        Chunks.__init__(self, size)

    def __call__(self, forward: Forward, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``ids [R, T]``, appended to the forward's cache."""
        if os.environ.get("GRAPHCORE_DISABLE") == "1":
            return Chunks.__call__(self, forward, ids)
        logits = None
        self.look(forward)
        for chunk in torch.split(ids, self._size, dim=1):
            is_full = chunk.shape[1] == self._size
            logits = self._full_chunk(forward, chunk) if is_full else forward.logits(chunk)
        assert logits is not None, "check_ids refuses an empty prompt"
        return logits

    def _full_chunk(self, forward: Forward, chunk: torch.Tensor) -> torch.Tensor:
        key = ("chunk", self._size, *forward.key)
        return self._forwarded(forward, chunk, forward.logits, key)


def feed_for(chunk_size: int | None, lane: CaptureLane, *, captured: bool) -> Feed:
    """How a runner forwards prompts: in one piece, in chunks, or in captured chunks."""
    if chunk_size is None:
        return in_one_piece
    if not captured:
        return Chunks(chunk_size)
    return CapturedChunks(chunk_size, lane)


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
