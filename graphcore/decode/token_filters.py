"""Which tokens may be drawn: top-k, top-p and min-p as transformers' logits processors mean them.

Legend: R rows, V vocabulary, n candidates. All of it is operations on the device with shapes that
the description fixes. A token that is filtered out gets -inf; the largest logit of a row never is.
Written so that NaN is never filtered out: it wins the choice, as it does in ``argmax``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch

from graphcore.decode.sampling import Sampling

TIED_PLACES = 32
"""Places beyond ``top_k`` for tokens whose logits equal the k-th, which all may be drawn."""

_ONE = 1 << 60  # probabilities are summed in units of 2^-60: exactly, so in any order alike


class TokenFilters:
    """The filters of one :class:`Sampling`, in transformers' order: top-k, top-p, min-p."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature = float(sampling.temperature)
        self._top_k = sampling.top_k
        self._uses_top_p = sampling.top_p < 1.0
        self._tail = _tail_units(sampling.top_p)
        self._min_p_distance = None
        if sampling.min_p > 0.0:
            self._min_p_distance = self._temperature * math.log(sampling.min_p)

    def candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What may be drawn of ``scores`` ``[R, V]``, which are left alone.

        Returns:
            Scores of the candidates, -inf where filtered out, and their ids ``[R, n]``; None for
            all ids in order.
        """
        if 0 < self._top_k < scores.shape[1]:
            return self._of_the_largest(scores)
        if self._uses_top_p:
            return self._of_all_sorted(scores)
        if self._min_p_distance is None:
            return scores, None
        scores = scores.float()
        return self._keep_min_p(scores, scores.amax(dim=-1, keepdim=True)), None

    def _of_the_largest(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = min(self._top_k + TIED_PLACES, scores.shape[1])
        largest, ids = scores.topk(count, dim=-1)
        kept = largest.float()
        kept.masked_fill_(kept < kept[:, self._top_k - 1 : self._top_k], -math.inf)
        if self._uses_top_p:
            before = self._summed(kept)[:, :-1]  # of the more likely ones, for all but the first
            kept[:, 1:].masked_fill_(before >= _ONE - self._tail, -math.inf)
        return self._keep_min_p(kept, kept[:, :1]), ids

    def _of_all_sorted(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # ascending and stable: of equal logits at the edge the same ones as in transformers
        ascending, ids = scores.sort(dim=-1, stable=True)
        kept = ascending.float()
        until = self._summed(kept)[:, :-1]
        kept[:, :-1].masked_fill_(until <= self._tail, -math.inf)
        return self._keep_min_p(kept, kept[:, -1:]), ids

    def _summed(self, scores: torch.Tensor) -> torch.Tensor:
        """Running sums of the probabilities, in units of 2^-60.

        torch's running sum of floating-point numbers may differ from call to call on a device.
        """
        if self._temperature != 1.0:
            scores = scores / self._temperature
        return scores.softmax(dim=-1).mul_(float(_ONE)).cumsum(dim=-1, dtype=torch.int64)

    def _keep_min_p(self, scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        if self._min_p_distance is None:
            return scores
        return scores.masked_fill(scores < best + self._min_p_distance, -math.inf)


def penalise(scores: torch.Tensor, marked: torch.Tensor, penalty: float) -> torch.Tensor:
    """``scores`` ``[R, V]`` with those of ``marked`` tokens made less likely (CTRL, 2019).

    Positive ones are divided by ``penalty``, negative ones multiplied, in float32.
    """
    scores = scores.float()
    farther: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    farther = torch.minimum if penalty > 1.0 else torch.maximum
    return torch.where(marked, farther(scores * penalty, scores / penalty), scores)


def _tail_units(top_p: float) -> int:
    """1 - top_p in units, rounded to float32 as where transformers compares it.

    For a top_p that float32 does not tell from 0 it is more than all probabilities together.
    """
    tail: float = struct.unpack("f", struct.pack("f", 1.0 - top_p))[0]
    return int(tail * _ONE) if tail < 1.0 else 2 * _ONE
