"""ExpertParallelBuckets: DecodeBuckets of a mixture whose experts are spread over ranks.

Each rank decodes rows of its own, and all of them take the same bucket at the same step: the
smallest one that holds what the rank with the most rows has, and the one with the longest prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.static_cache import StaticKVCache
from graphcore.parallel.expert_decode import (
    ExpertParallelAR,
    check_handle,
    refuse_restored,
    refuse_shared_rows,
)
from graphcore.parallel.expert_parallel import SpreadExperts
from graphcore.parallel.rank_buckets import RankBuckets

_ENDED, _GOES_ON = "ended", "goes on"


class ExpertParallelBuckets(RankBuckets):
    """Decodes prompts of many sizes, rows of its own on each rank; calls as of DecodeBuckets.

    Every rank makes the same calls in the same order. Prompts, seeds, sampling and the number of
    rows are each rank's own; the number of new tokens, ``grow`` and the ends are equal. The bucket
    is that of the rank that needs the largest: rows that the others do not have repeat their last
    one's prompt, and shorter prompts are padded on the left, so that a bucket is full on all ranks
    at the same step. With ``grow`` they agree then whether there is a row left anywhere that has
    not ended, and move to the next bucket together, before anything is launched. All buckets share
    the slots of the experts, the K and V storage and one memory pool. ``one_launch=True`` decodes
    step by step, and the result says why.

    Args:
        handle: As of :class:`ExpertParallelAR`. It has to be restored after the buckets are closed.
        max_seq_lens: Capacities in tokens; equal on all ranks.
        batch_sizes: Rows of one rank; every batch is captured with every capacity. Equal on all.
        agree_every: As of :class:`TensorParallelAR`.
        options: As of :class:`DecodeBuckets`, but ``compile``.

    Raises:
        CaptureError: A step cannot be captured on this rank; nothing is left.
        ConfigurationError: As :class:`DecodeBuckets` and :class:`ExpertParallelAR`; sizes that
            differ by rank, on all ranks.
        LifecycleError: The experts are the model's own again.
        RankError: Another rank failed or is missing.
    """

    def __init__(
        self,
        handle: SpreadExperts,
        max_seq_lens: Sequence[int],
        batch_sizes: Sequence[int] = (1,),
        *,
        agree_every: int = 1,
        **options: Any,
    ) -> None:
        check_handle(handle)
        self._handle = handle
        super().__init__(
            handle.model,
            max_seq_lens,
            batch_sizes,
            ranks=handle.ranks,
            agree_every=agree_every,
            **options,
        )

    # ---- inside ---------------------------------------------------------------------------------

    def _check_rank_model(self, model: Any) -> None:
        del model
        refuse_restored(self._handle, type(self).__name__)
        refuse_shared_rows(self._handle)

    def _needed(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> tuple[int, int]:
        mine = super()._needed(input_ids, options)
        told = self.ranks.agree("rows and tokens of a prompt", value=mine).values
        return max(rows for rows, _ in told), max(tokens for _, tokens in told)

    def _held_where_it_goes_on(self, held: int, *, has_ended: bool) -> int | None:
        """Of the ranks that have not ended: those that have may have dropped what lay behind."""
        choice = _ENDED if has_ended else _GOES_ON
        agreed = self.ranks.agree("next bucket", choice, among=(_ENDED, _GOES_ON), value=held)
        return None if agreed.choice == _ENDED else max(agreed.values)

    def _make_runner(self, model: Any, cache: StaticKVCache, **options: Any) -> CUDAGraphAR:
        del model
        return ExpertParallelAR(self._handle, cache, agree_every=self._agree_every, **options)
