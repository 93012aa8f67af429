"""TensorParallelAR: CUDAGraphAR of a model that is spread over ranks, the same step on all of them.

Each rank captures its part of the step, collectives included, and replays it when all do. Before
anything is launched the ranks agree: what one cannot do, none does, and all say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch

from graphcore.decode.prompt import Prompt
from graphcore.decode.prompting import StepChoice
from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError
from graphcore.parallel.ranks import Ranks
from graphcore.parallel.sharded_model import check_sharded, digest, facts_of

_CHOICES = tuple(choice.value for choice in StepChoice)
_RANKED = (
    "max_seq_len", "batch_size", "sampling", "capture", "on_legacy_work", "prefill_chunk_size",
    "capture_prefill", "vocabulary",
)  # fmt: skip


class TensorParallelAR(CUDAGraphAR):
    """Decodes a sharded transformers model on all ranks at once; calls as of :class:`CUDAGraphAR`.

    Every rank makes the same calls in the same order, with the same prompts. Its cache has the
    heads that its part of the model has.

    Args:
        model: A causal language model sharded by its ``tp_plan``
            (:func:`graphcore.parallel.load_sharded`, or transformers' ``from_pretrained``).
        ranks: Over which it is spread.
        agree_every: Replays between two agreements of a generation. 1: nothing is launched that
            not all launch. More saves host time where steps are short; a rank that fails in
            between leaves the others in a collective until its pulse is missed.
        options: As of :class:`CUDAGraphAR`, but ``compile`` and ``guidance``.

    Raises:
        ConfigurationError: As :class:`CUDAGraphAR`; a model that is not spread over just these
            ranks; models or options that differ by rank, on all ranks.
        RankError: Another rank failed or is missing.
    """

    def __init__(self, model: Any, *, ranks: Ranks, agree_every: int = 1, **options: Any) -> None:
        _check(ranks, agree_every, options)
        self.ranks = ranks
        self._agree_every = agree_every
        self._since_agreed = 0
        with ranks.together("TensorParallelAR"):
            check_sharded(model, ranks)
            super().__init__(model, **options)
        said = {name: str(options.get(name)) for name in _RANKED}
        facts = facts_of(model) | said | {"driver": self.driver.name}
        facts["max_seq_len"] = str(self.cache.max_seq_len)
        facts["agree_every"] = str(agree_every)
        ranks.agree("TensorParallelAR", facts=facts)

    # ---- what all do together -------------------------------------------------------------------

    def capture(self, input_ids: torch.Tensor | None = None, **options: Any) -> None:
        """As :meth:`CUDAGraphAR.capture`, on all ranks."""
        with self.ranks.together("capture"):
            super().capture(input_ids, **options)

    def generate(
        self, input_ids: torch.Tensor | None, max_new_tokens: int, *rest: Any, **options: Any
    ) -> torch.Tensor:
        """As :meth:`CUDAGraphAR.generate`, on all ranks."""
        with self.ranks.together("generate"):
            return super().generate(input_ids, max_new_tokens, *rest, **options)

    def stream(
        self, input_ids: torch.Tensor | None, max_new_tokens: int, *rest: Any, **options: Any
    ) -> Iterator[torch.Tensor]:
        """As :meth:`CUDAGraphAR.stream`, on all ranks; all must take as many tokens."""
        with self.ranks.together("stream"):
            return super().stream(input_ids, max_new_tokens, *rest, **options)

    def replay(self, token: int | torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`CUDAGraphAR.replay`, once all ranks are ready for it."""
        with self.ranks.together("replay"):
            if token is None:  # else it comes here again, once the token is checked
                self._agree_on_replay()
            return super().replay(token)

    def generate_in_one_launch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the ranks could not agree between two steps of one launch."""
        raise _one_launch("generate")

    def stream_in_one_launch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the ranks could not agree between two steps of one launch."""
        raise _one_launch("stream")

    # ---- inside ---------------------------------------------------------------------------------

    def _agree_on_replay(self) -> None:
        """Finds out here what would be refused, then asks whether all are ready."""
        executable = self._captured.executable if self._captured else None
        if executable is not None and executable.marked is not None:
            return  # the launch says why, and the others hear of it
        if self._limit < 0 or self.cache.seen_tokens >= self._limit:
            self._checked_seen()
        self._since_agreed += 1
        if self._since_agreed >= self._agree_every:
            self._since_agreed = 0
            self.ranks.agree("replay")

    def _begin(self, checked: Prompt) -> None:
        held = self.cache.seen_tokens
        mask = None if checked.mask is None else checked.mask.tolist()
        facts = {
            "prompt": digest(f"{checked.ids.tolist()} {mask}"),
            "held tokens": str(held),
            "seed": str(checked.seed),
        }
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
        agreed = self.ranks.agree("prompt", facts=facts, value=seed)
        if checked.seed is None and not held:
            shared = self._step.sampler.sampling.seed
            checked = replace(checked, seed=agreed.values[0] if shared is None else shared)
        self._since_agreed = 0
        super()._begin(checked)

    def _choose_step(self, choice: StepChoice, why: str) -> StepChoice:
        agreed = self.ranks.agree("decode step", choice.value, among=_CHOICES, detail=why)
        return StepChoice(agreed.choice)

    def _step_is_captured(self) -> None:
        self.ranks.agree("decode step is captured")


def _check(ranks: object, agree_every: object, options: dict[str, Any]) -> None:
    if not isinstance(ranks, Ranks):
        raise ConfigurationError(f"ranks: expected Ranks, got {type(ranks).__name__}")
    if isinstance(agree_every, bool) or not isinstance(agree_every, int) or agree_every < 1:
        raise ConfigurationError(f"agree_every: expected an int of at least 1, got {agree_every!r}")
    for name in ("compile", "guidance"):
        if options.get(name):
            raise ConfigurationError(
                f"{name}: expected none for a model spread over ranks, got {options[name]!r}"
            )
    cache = options.get("cache")
    if cache is not None and not isinstance(cache, StaticKVCache):
        raise ConfigurationError(f"cache: expected a StaticKVCache, got {type(cache).__name__}")


def _one_launch(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}_in_one_launch: expected one rank, got a model spread over several, which agree "
        f"before each step; use {what}"
    )
