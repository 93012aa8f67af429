"""The decode step and its static tensors: what a captured graph runs for each token.

Legend: R rows, V vocabulary, S slots of the cache. A step chooses (the forced token, else from the
logits of the step before), writes the token, forwards it, and the cache advances the position. All
it reads and writes has a fixed address; nothing in it depends on a host number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from graphcore.decode.cache_state import static_zeros
from graphcore.decode.ending import MOST_EOS_IDS
from graphcore.decode.forward import Forward
from graphcore.decode.prompt import Prompt
from graphcore.decode.sampler import Sampler
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.surroundings import holds, surroundings
from graphcore.errors import LifecycleError

_no_token = -1

Annotate = Callable[[str], AbstractContextManager[None]]


def _unnamed(label: str) -> AbstractContextManager[None]:
    del label
    return nullcontext()


class DecodeStep:
    """Static buffers of one runner, and the functions over them. Call them without gradients.

    Attributes:
        forward: Model and cache.
        sampler: Chooses.
        token: int64 ``[R]``, the token of the last step.
        finished: bool ``[R]``, rows that have chosen an end-of-sequence id.
        history: int64 ``[R, S]``, the token whose K/V each slot holds.
    """

    def __init__(self, forward: Forward, sampler: Sampler) -> None:
        cache = forward.cache
        rows, slots, device = forward.rows, cache.max_seq_len, cache.device
        self.forward = forward
        self.sampler = sampler
        self._cache = cache
        self._logits: torch.Tensor | None = None
        self.spare_rows = 0
        """How many of the last rows stand for nothing: they are finished from the beginning."""
        self._forced = static_zeros((rows,), torch.int64, device).fill_(_no_token)
        self._eos = static_zeros((MOST_EOS_IDS,), torch.int64, device).fill_(_no_token)
        self._pad = static_zeros((), torch.int64, device)
        self.token = static_zeros((rows,), torch.int64, device)
        self.finished = static_zeros((rows,), torch.bool, device)
        self.history = static_zeros((rows, slots), torch.int64, device)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What selects the captured variant now."""
        return *self.forward.key, *surroundings(self._cache.device)

    @property
    def logits(self) -> torch.Tensor:
        """``[R, V]`` of the last forward; one address as long as the model is not changed."""
        if self._logits is None:
            raise LifecycleError("logits: expected a prompt first: call capture(input_ids)")
        return self._logits

    @property
    def has_logits(self) -> bool:
        """Whether a prompt was forwarded, which is when the logits get their address."""
        return self._logits is not None

    def use(self, cache: StaticKVCache) -> None:
        """Works on another cache of the same layout from now on; its own buffers stay."""
        self.forward.use(cache)
        self._cache = cache

    def share_logits(self, other: DecodeStep) -> None:
        """Takes the first rows of another step's logits for its own, before its first prompt."""
        self._logits = other.logits[: self.forward.rows]

    def take_over(self, other: DecodeStep) -> None:
        """Goes on where ``other`` stopped, a step of as many rows and fewer slots."""
        mine, in_cache = self.named_tensors(), self._cache.named_tensors(padded=True)
        for name, tensor in other.named_tensors().items():
            if name not in in_cache:
                mine[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        self.sampler.take_over(other.sampler)

    def prefill(self, prompt: Prompt) -> None:
        """Forwards a prompt eagerly behind what the cache holds."""
        start = self._cache.seen_tokens
        logits = self.forward.prefill(prompt)
        self.sampler.fit(self.forward.vocabulary)
        if self._logits is None or not holds(self._logits, logits):
            self._logits = static_zeros(tuple(logits.shape), logits.dtype, logits.device)
        self._logits.copy_(logits)
        self.history[:, start : start + prompt.length] = prompt.ids

    def run(self, annotate: Annotate = _unnamed) -> None:
        """One step. This is what is captured; ``annotate`` names its own part of the nodes."""
        with annotate("next token"):
            chosen = self._choose()
        logits = self.forward.logits(chosen[:, None])
        with annotate("logits"):
            self.logits.copy_(logits)

    def _choose(self) -> torch.Tensor:
        """The next token ``[R]``, written to token, history, flags; the forced one is used up."""
        chosen = torch.where(self.finished, self._pad, self.sampler.choose(self.logits))
        chosen = torch.where(self._forced >= 0, self._forced, chosen)
        self.sampler.accept(chosen)
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
            self._forced.copy_(token.clamp(0, self.forward.vocabulary - 1))

    def forget_forced(self) -> None:
        """Takes back :meth:`force`."""
        self._forced.fill_(_no_token)

    def set_eos(self, eos_ids: Sequence[int], pad_id: int) -> None:
        """Begins a generation: no row is finished; these ids finish one, which then takes pads."""
        filled = [*eos_ids, *[_no_token] * (MOST_EOS_IDS - len(eos_ids))]
        if len(eos_ids) > 1:
            self._eos.copy_(torch.tensor(filled, device="cpu"))
        else:  # nothing to copy, which the host would wait for
            self._eos.fill_(filled[0])
        self._pad.fill_(pad_id)
        self.finished.zero_()
        if self.spare_rows:
            self.finished[-self.spare_rows :] = True
        self.forget_forced()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every static tensor that a step reads or writes, the cache's too, by name in reports."""
        return {
            **self._cache.named_tensors(padded=True),
            "logits": self.logits,
            "token": self.token,
            "forced token": self._forced,
            "finished rows": self.finished,
            "eos ids": self._eos,
            "pad id": self._pad,
            "history": self.history,
            **self.forward.named_tensors(),
            **self.sampler.named_tensors(),
        }

    def saved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, copy) of all that a step changes outside the cache, for :meth:`restore`."""
        own = (self.logits, self.token, self._forced, self.finished, self.history)
        changed = (*own, *self.forward.changed(), *self.sampler.changed())
        return [(tensor, tensor.clone()) for tensor in changed]

    @staticmethod
    def restore(saved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts back what :meth:`saved` copied."""
        for tensor, copy in saved:
            tensor.copy_(copy)
