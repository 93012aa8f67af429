"""RankBuckets: DecodeBuckets on every rank, all of which take the same bucket.

What a bucket's runners agree on they agree on themselves; here is what they do not see: which
bucket it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphcore.decode.bucket import BucketGeneration, checked_sizes
from graphcore.decode.buckets import DecodeBuckets
from graphcore.decode.ending import EosIds
from graphcore.parallel.rank_runner import check_agree_every, check_compile_is_off, check_ranks
from graphcore.parallel.ranks import Ranks


class RankBuckets(DecodeBuckets):
    """The buckets of one rank; every rank makes the same calls in the same order.

    Args:
        model: As of the subclass.
        max_seq_lens: Capacities in tokens.
        batch_sizes: Rows; every batch is captured with every capacity.
        ranks: Who decode together.
        agree_every: Replays between two agreements of a generation.
        options: As of :class:`DecodeBuckets`, but ``compile``.

    Raises:
        CaptureError: A step cannot be captured on this rank; nothing is left.
        ConfigurationError: As of :class:`DecodeBuckets`; sizes that differ by rank, on all ranks.
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
            self._check_rank_model(model)
            facts = {
                "max_seq_lens": checked_sizes("max_seq_lens", max_seq_lens),
                "batch_sizes": checked_sizes("batch_sizes", batch_sizes),
            }
            ranks.agree(type(self).__name__, facts=facts)
            super().__init__(model, max_seq_lens, batch_sizes, **options)

    # ---- what the subclasses say ----------------------------------------------------------------

    @abstractmethod
    def _check_rank_model(self, model: Any) -> None:
        """Raises for a model that these ranks cannot decode together."""

    def _prompt_facts(self, input_ids: Any) -> dict[str, Any]:
        """What of a prompt must be the same on all ranks for them to take one bucket."""
        return {}

    # ---- decoding -------------------------------------------------------------------------------

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
            **self._prompt_facts(input_ids),
            "max_new_tokens": count,
            "grow": options.get("grow", False),
            "one_launch": options.get("one_launch", False),
        }
        self.ranks.agree(f"{call} in a bucket", facts=facts)
