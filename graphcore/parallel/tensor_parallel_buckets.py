"""TensorParallelBuckets: DecodeBuckets of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphcore.decode.bucket import BucketGeneration, checked_sizes
from graphcore.decode.buckets import DecodeBuckets
from graphcore.decode.ending import EosIds
from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.static_cache import StaticKVCache
from graphcore.parallel.rank_runner import check_agree_every, check_compile_is_off, check_ranks
from graphcore.parallel.ranks import Ranks
from graphcore.parallel.sharded_model import check_sharded
from graphcore.parallel.tensor_parallel import TensorParallelAR


class TensorParallelBuckets(DecodeBuckets):
    """Decodes prompts of many sizes on all ranks at once; calls as of :class:`DecodeBuckets`.

    Every rank makes the same calls in the same order, with the same prompts; all of them take the
    same bucket. ``one_launch=True`` decodes step by step, and the result says why.

    Args:
        model: As of :class:`TensorParallelAR`.
        max_seq_lens: Capacities in tokens.
        batch_sizes: Rows; every batch is captured with every capacity.
        ranks: Over which the model is spread.
        agree_every: As of :class:`TensorParallelAR`.
        options: As of :class:`DecodeBuckets`, but ``compile``.

    Raises:
        CaptureError: A step cannot be captured on this rank; nothing is left.
        ConfigurationError: As :class:`DecodeBuckets` and :class:`TensorParallelAR`; sizes that
            differ by rank, on all ranks.
        RankError: Another rank failed or is missing.
    """

    def __init__(
        self,
        model: Any,
        max_seq_lens: Sequence[int],
        batch_sizes: Sequence[int] = (1,),
        *,
        ranks: Ranks,
        agree_every: int = 1,
        **options: Any,
    ) -> None:
        check_ranks(ranks)
        self.ranks = ranks
        self._agree_every = agree_every
        with ranks.together(type(self).__name__):
            check_agree_every(agree_every)
            check_compile_is_off(options.get("compile", False))
            check_sharded(model, ranks)
            facts = {
                "max_seq_lens": checked_sizes("max_seq_lens", max_seq_lens),
                "batch_sizes": checked_sizes("batch_sizes", batch_sizes),
            }
            ranks.agree(type(self).__name__, facts=facts)
            super().__init__(model, max_seq_lens, batch_sizes, **options)

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        eos_token_id: EosIds = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> BucketGeneration:
        """As :meth:`DecodeBuckets.generate`, on all ranks."""
        with self.ranks.together("generate"):
            self._agree_on("generate", input_ids, max_new_tokens, options)
            return super().generate(
                input_ids, max_new_tokens, eos_token_id, pad_token_id, **options
            )

    def stream(
        self, input_ids: torch.Tensor, max_new_tokens: int, **options: Any
    ) -> Iterator[torch.Tensor]:
        """As :meth:`DecodeBuckets.stream`, on all ranks; all must take as many tokens."""
        with self.ranks.together("stream"):
            self._agree_on("stream", input_ids, max_new_tokens, options)
            return super().stream(input_ids, max_new_tokens, **options)

    # ---- inside ---------------------------------------------------------------------------------

    def _agree_on(self, call: str, input_ids: Any, count: Any, options: dict[str, Any]) -> None:
        """What the runner of a bucket does not see: it gets rows that pad the batch, too."""
        facts = {
            "shape of input_ids": list(getattr(input_ids, "shape", ())),
            "max_new_tokens": count,
            "grow": options.get("grow", False),
            "one_launch": options.get("one_launch", False),
        }
        self.ranks.agree(f"{call} in a bucket", facts=facts)

    def _make_runner(self, model: Any, cache: StaticKVCache, **options: Any) -> CUDAGraphAR:
        ranks, agree_every = self.ranks, self._agree_every
        return TensorParallelAR(model, cache, ranks=ranks, agree_every=agree_every, **options)
