"""TensorParallelBuckets: DecodeBuckets of a model that is spread over ranks."""

from __future__ import annotations

from typing import Any

from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.static_cache import StaticKVCache
from graphcore.parallel.rank_buckets import RankBuckets
from graphcore.parallel.sharded_model import check_sharded
from graphcore.parallel.tensor_parallel import TensorParallelAR


class TensorParallelBuckets(RankBuckets):
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

    def _check_rank_model(self, model: Any) -> None:
        check_sharded(model, self.ranks)

    def _prompt_facts(self, input_ids: Any) -> dict[str, Any]:
        return {"shape of input_ids": list(getattr(input_ids, "shape", ()))}

    def _make_runner(self, model: Any, cache: StaticKVCache, **options: Any) -> CUDAGraphAR:
        ranks, agree_every = self.ranks, self._agree_every
        return TensorParallelAR(model, cache, ranks=ranks, agree_every=agree_every, **options)
