"""TensorParallelAR: CUDAGraphAR of a model that is spread over ranks, the same step on all of them.

All ranks decode one batch: prompts, forced tokens and random numbers are the same on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphcore.decode.prompt import Prompt
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import LifecycleError
from graphcore.parallel.expert_parts import loaded_by_rank
from graphcore.parallel.rank_runner import RankRunner
from graphcore.parallel.ranks import Ranks
from graphcore.parallel.sharded_model import check_sharded, digest


class TensorParallelAR(RankRunner):
    """Decodes a sharded transformers model on all ranks at once; calls as of :class:`CUDAGraphAR`.

    Every rank makes the same calls in the same order, with the same prompts. Its cache has the
    heads that its part of the model has.

    Args:
        model: A causal language model sharded by its ``tp_plan``
            (:func:`graphcore.parallel.load_sharded`, or transformers' ``from_pretrained``). A
            mixture that was loaded with ``whole_experts=True``: behind ``spread_experts``, whose
            handle is restored after the runner is closed.
        cache: As of :class:`CUDAGraphAR`, with the heads of this rank's part; None makes one.
        ranks: Over which it is spread.
        agree_every: Replays between two agreements of a generation. 1: nothing is launched that
            not all launch. More saves host time where steps are short; a rank that fails in
            between leaves the others in a collective until its pulse is missed.
        options: As of :class:`CUDAGraphAR`, but ``compile``.

    Raises:
        ConfigurationError: As :class:`CUDAGraphAR`; a model that is not spread over just these
            ranks; models or options that differ by rank, on all ranks.
        LifecycleError: Whole experts on each rank that are not spread, or not any more.
        RankError: Another rank failed or is missing.
    """

    def __init__(
        self,
        model: Any,
        cache: StaticKVCache | None = None,
        *,
        ranks: Ranks,
        agree_every: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(model, cache, ranks=ranks, agree_every=agree_every, **options)

    def _check_rank_model(self, model: Any) -> None:
        super()._check_rank_model(model)
        check_sharded(model, self.ranks)
        check_experts_are_spread(model, self.ranks)

    def _checked_prompt(self, caller: str, *rest: Any) -> Prompt:
        check_experts_are_spread(self.model, self.ranks)
        return super()._checked_prompt(caller, *rest)

    def _facts(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return super()._facts(options) | {"sampling": self._sampling}

    def _prompt_facts(self, checked: Prompt) -> dict[str, Any]:
        return {
            "prompt": _digest_of(checked),
            "negative prompt": _digest_of(checked.negative),
            "held tokens": self.cache.seen_tokens,
            "seed": checked.seed,
            "guidance.scale": None if self.guidance is None else self.guidance.scale,
        }

    def _forced_facts(self, token: int | torch.Tensor) -> dict[str, Any]:
        return {"token": token.tolist() if isinstance(token, torch.Tensor) else token}

    def _with_seed(self, checked: Prompt, drawn: int) -> Prompt:
        if checked.seed is not None or self.cache.seen_tokens:
            return checked
        own = self._sampling.seed
        return replace(checked, seed=drawn if own is None else own)


def check_experts_are_spread(model: Any, ranks: Ranks) -> None:
    """Refuses a mixture of which each rank could compute its own experts alone.

    Raises:
        LifecycleError: Experts that were loaded by rank, and are not in slots.
    """
    for name in loaded_by_rank(model, ranks):
        raise LifecycleError(
            f"{name}: expected experts that are spread over ranks, got those that this rank has "
            "loaded: spread_experts(model, ranks, ...) first, and restore it last"
        )


def _digest_of(prompt: Prompt | None) -> str:
    if prompt is None:
        return "none"
    mask = None if prompt.mask is None else prompt.mask.tolist()
    return digest(f"{prompt.ids.tolist()} {mask}")
