"""ExpertParallelAR: CUDAGraphAR of a mixture whose experts are spread over ranks.

Each rank decodes rows of its own, with the whole model but the experts; the captured step sends
rows to the owners of their experts and back, by an all-to-all of fixed size. So the ranks step
together: as many rows, prompts of one length (shorter ones are padded), an end when all have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphcore.decode import padding
from graphcore.decode.prompt import Prompt
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.parallel.expert_parallel import SpreadExperts
from graphcore.parallel.rank_runner import RankRunner

_ENDED, _GOES_ON = "ended", "goes on"


class ExpertParallelAR(RankRunner):
    """Decodes a mixture of spread experts, rows of its own on each rank; calls as of CUDAGraphAR.

    Every rank makes the same calls in the same order. Prompts, seeds, sampling and forced tokens
    are each rank's own; rows, options and the number of new tokens are equal. The prompts of a
    round may differ in length: shorter ones are padded on the left to the longest of any rank,
    which takes slots of the cache. A rank whose rows have all finished goes on, with pads, until
    those of all ranks have; its ids are cut as if it had not.

    Args:
        handle: Of :func:`graphcore.parallel.spread_experts`. Where its slots are fewer than its
            experts, the step brings in what is missing, as one rank's does. It has to be restored
            after the runner is closed. With a ``capacity`` below 1.0, ask ``handle.faults()``.
        cache: As of :class:`CUDAGraphAR`; this rank's own.
        agree_every: As of :class:`TensorParallelAR`.
        options: As of :class:`CUDAGraphAR`, but ``compile`` and ``capture_prefill``.

    Raises:
        ConfigurationError: As :class:`CUDAGraphAR`; rows or options that differ by rank, on all.
        LifecycleError: The experts are the model's own again.
        RankError: Another rank failed or is missing.
    """

    def __init__(
        self,
        handle: SpreadExperts,
        cache: StaticKVCache | None = None,
        *,
        agree_every: int = 1,
        **options: Any,
    ) -> None:
        check_handle(handle)
        self._handle = handle
        super().__init__(
            handle.model, cache, ranks=handle.ranks, agree_every=agree_every, **options
        )

    def _check_rank_model(self, model: Any) -> None:
        super()._check_rank_model(model)
        refuse_restored(self._handle, type(self).__name__)
        refuse_shared_rows(self._handle)

    def _check_rank_options(self, options: Mapping[str, Any]) -> None:
        super()._check_rank_options(options)
        if options.get("capture_prefill"):
            raise ConfigurationError(
                "capture_prefill: expected False for experts spread over ranks, got True: ranks "
                "whose prompts are padded and others need different graphs, and not all have both"
            )

    def _facts(self, options: Mapping[str, Any]) -> dict[str, Any]:
        capacities = {layer.exchange.capacity for layer in self._handle.layers.values()}
        return super()._facts(options) | {"capacity": sorted(capacities)}

    def _prompt_facts(self, checked: Prompt) -> dict[str, Any]:
        return {}

    def _forced_facts(self, token: int | torch.Tensor) -> dict[str, Any]:
        return {}

    def _with_seed(self, checked: Prompt, drawn: int) -> Prompt:
        return checked

    def _checked_prompt(self, caller: str, *rest: Any) -> Prompt:
        """The checked prompt of this rank, as long as the longest of all ranks."""
        refuse_restored(self._handle, caller)
        checked = super()._checked_prompt(caller, *rest)
        agreed = self.ranks.agree("length of the prompt", value=checked.length)
        return _of_length(checked, max(agreed.values))

    def _has_ended(self, has_here: bool) -> bool:
        choice = _ENDED if has_here else _GOES_ON
        among = (_ENDED, _GOES_ON)
        return self.ranks.agree("end of the generation", choice, among=among).choice == _ENDED


def check_handle(handle: object) -> None:
    """Raises ConfigurationError for what spread_experts() does not give."""
    if not isinstance(handle, SpreadExperts):
        raise ConfigurationError(
            f"handle: expected what spread_experts() gives, got {type(handle).__name__}"
        )


def refuse_shared_rows(handle: SpreadExperts) -> None:
    """Raises ConfigurationError where ranks cannot decode rows of their own: heads are spread."""
    if handle.shares_rows:
        raise ConfigurationError(
            "handle: expected a model of which only the experts are spread, got one whose heads "
            "are, too: TensorParallelAR(handle.model, ...) decodes the same rows on all ranks"
        )


def refuse_restored(handle: SpreadExperts, caller: str) -> None:
    """Raises LifecycleError where the experts are the model's own again."""
    if handle.is_restored:
        raise LifecycleError(
            f"{caller}: expected experts that are spread over ranks, got a model that was "
            "restored: spread them again, and make another runner"
        )


def _of_length(prompt: Prompt, length: int) -> Prompt:
    """``prompt`` with its rows, the negative ones too, padded on the left."""
    ids, mask = padding.of_length(prompt.ids, prompt.mask, length)
    negative = None if prompt.negative is None else _of_length(prompt.negative, length)
    return replace(prompt, ids=ids, mask=mask, negative=negative, given=prompt.as_given)
