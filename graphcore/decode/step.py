"""The decode step and its static tensors: what a captured graph runs for each token.

Legend: B rows, V vocabulary, S slots of the cache. A step chooses (the forced token, else from the
logits of the step before), writes the token, forwards it, and the cache advances the position. All
it reads and writes has a fixed address; nothing in it depends on a host number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphcore.decode import transformers_compat as compat
from graphcore.decode.cache_state import static_zeros
from graphcore.decode.ending import MOST_EOS_IDS
from graphcore.decode.prompt import vocabulary_size
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import LifecycleError

_no_token = -1

Annotate = Callable[[str], AbstractContextManager[None]]


def _unnamed(label: str) -> AbstractContextManager[None]:
    del label
    return nullcontext()


class DecodeStep:
    """Static buffers of one runner, and the functions over them. Call them without gradients.

    Attributes:
        token: int64 ``[B]``, the token of the last step.
        finished: bool ``[B]``, rows that have chosen an end-of-sequence id.
        history: int64 ``[B, S]``, the token whose K/V each slot holds.
    """

    def __init__(self, model: Any, cache: StaticKVCache) -> None:
        rows, slots, device = cache.batch_size, cache.max_seq_len, cache.device
        self._model = model
        self._cache = cache
        self._logits: torch.Tensor | None = None
        self._slots = static_zeros((slots,), torch.int64, device)
        self._slots.copy_(torch.arange(slots))
        self._forced = static_zeros((rows,), torch.int64, device).fill_(_no_token)
        self._eos = static_zeros((MOST_EOS_IDS,), torch.int64, device).fill_(_no_token)
        self._pad = static_zeros((), torch.int64, device)
        self.token = static_zeros((rows,), torch.int64, device)
        self.finished = static_zeros((rows,), torch.bool, device)
        self.history = static_zeros((rows, slots), torch.int64, device)

    @property
    def logits(self) -> torch.Tensor:
        """``[B, V]`` of the last forward; one address as long as the model is not changed."""
        if self._logits is None:
            raise LifecycleError("logits: expected a prompt first: call capture(input_ids)")
        return self._logits

    @property
    def has_logits(self) -> bool:
        """Whether a prompt was forwarded, which is when the logits get their address."""
        return self._logits is not None

    def prefill(self, input_ids: torch.Tensor) -> None:
        """Forwards a prompt ``[B, tokens]`` eagerly behind what the cache holds."""
        start = self._cache.seen_tokens
        logits = self._forward(input_ids)
        if self._logits is None or not _fits(self._logits, logits):
            self._logits = static_zeros(tuple(logits.shape), logits.dtype, logits.device)
        self._logits.copy_(logits)
        self.history[:, start : start + input_ids.shape[1]] = input_ids

    def run(self, annotate: Annotate = _unnamed) -> None:
        """One step. This is what is captured; ``annotate`` names its own part of the nodes."""
        with annotate("next token"):
            chosen = self._choose()
        logits = self._forward(chosen[:, None])
        with annotate("logits"):
            self.logits.copy_(logits)

    def _choose(self) -> torch.Tensor:
        """The next token ``[B]``, written to token, history, flags; the forced one is used up."""
        chosen = torch.where(self.finished, self._pad, self.logits.argmax(dim=-1))
        chosen = torch.where(self._forced >= 0, self._forced, chosen)
        self.token.copy_(chosen)
        self._forced.fill_(_no_token)
        self.finished.logical_or_((chosen[:, None] == self._eos).any(dim=1))
        # before the forward: its last layer advances the position
        self.history.index_copy_(1, self._cache.position.view(1), chosen[:, None])
        return chosen

    def force(self, token: int | torch.Tensor) -> None:
        """Makes the next step take ``token`` (checked) instead of choosing."""
        if isinstance(token, int):
            self._forced.fill_(token)
        else:
            # an id on a device was not checked: outside the vocabulary it would end the context
            self._forced.copy_(token.clamp(0, vocabulary_size(self._model) - 1))

    def forget_forced(self) -> None:
        """Takes back :meth:`force`."""
        self._forced.fill_(_no_token)

    def set_eos(self, eos_ids: Sequence[int], pad_id: int) -> None:
        """Begins a generation: no row is finished; these ids finish one, which then takes pads."""
        filled = [*eos_ids, *[_no_token] * (MOST_EOS_IDS - len(eos_ids))]
        self._eos.copy_(torch.tensor(filled))
        self._pad.fill_(pad_id)
        self.finished.zero_()
        self.forget_forced()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every static tensor of the step by the name reports use."""
        return {
            "logits": self.logits,
            "token": self.token,
            "forced token": self._forced,
            "finished rows": self.finished,
            "eos ids": self._eos,
            "pad id": self._pad,
            "history": self.history,
            "slot numbers": self._slots,
        }

    def saved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, copy) of all that a step changes outside the cache, for :meth:`restore`."""
        changed = (self.logits, self.token, self._forced, self.finished, self.history)
        return [(tensor, tensor.clone()) for tensor in changed]

    @staticmethod
    def restore(saved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts back what :meth:`saved` copied."""
        for tensor, copy in saved:
            tensor.copy_(copy)

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` of the last of ``input_ids [B, tokens]``, masked on the device."""
        rows, tokens = input_ids.shape
        positions = self._cache.position + self._slots[:tokens]
        visible = self._slots <= positions[:, None]
        return compat.forward_logits(
            self._model,
            input_ids,
            position_ids=positions.expand(rows, tokens),
            mask=compat.attention_mask(self._model, visible.expand(rows, 1, tokens, -1)),
            cache=self._cache,
        )


def _fits(buffer: torch.Tensor, logits: torch.Tensor) -> bool:
    return (buffer.shape, buffer.dtype) == (logits.shape, logits.dtype)
