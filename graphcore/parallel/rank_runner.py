"""RankRunner: a CUDAGraphAR on every rank, which decode steps with collectives in them together.

Each rank captures its part of the step, collectives included, and replays it when all do. Before
anything is launched the ranks agree: what one cannot do, none does, and all say so. What has to be
equal on all ranks, and what each has for itself, the subclasses say.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from graphcore.decode.prompt import Prompt
from graphcore.decode.prompting import StepChoice
from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.transformers_encoder_decoder import is_encoder_decoder
from graphcore.errors import ConfigurationError, PlanError
from graphcore.parallel.ranks import Ranks
from graphcore.parallel.sharded_model import facts_of

_CHOICES = tuple(choice.value for choice in StepChoice)
_PIECES = ("the graphs of before", "no graph")
_POLL_EVERY = 16
_RANKED = (
    "capture", "on_legacy_work", "prefill_chunk_size", "capture_prefill", "guidance", "vocabulary",
)  # fmt: skip


class RankRunner(CUDAGraphAR):
    """The runner of one rank; every rank makes the same calls in the same order.

    Args:
        model: As of the subclass.
        cache: As of :class:`CUDAGraphAR`.
        ranks: Who decode together.
        agree_every: Replays between two agreements of a generation.
        options: As of :class:`CUDAGraphAR`, but ``compile``.

    Raises:
        ConfigurationError: As :class:`CUDAGraphAR`; what differs by rank, on all ranks.
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
        check_ranks(ranks)
        name = type(self).__name__
        self.ranks = ranks
        self._agree_every = agree_every
        self._since_agreed = 0
        self._asked: dict[str, Any] = {}
        self._poll_every: object = None
        with ranks.together(name):
            check_agree_every(agree_every)
            self._check_rank_options({**options, "cache": cache})
            self._check_rank_model(model)
            super().__init__(model, cache, **options)
        try:
            ranks.agree(name, facts=self._facts(options))
        except BaseException:
            self.close()
            raise

    # ---- what the subclasses say ----------------------------------------------------------------

    def _check_rank_model(self, model: Any) -> None:
        """Raises ConfigurationError for a model that these ranks cannot decode together."""
        if is_encoder_decoder(model):
            raise ConfigurationError(
                f"model: expected a decoder-only model for several ranks, got "
                f"{type(model).__name__}: encoder-decoders are not spread"
            )

    def _check_rank_options(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for what no ranks can do together."""
        check_compile_is_off(options.get("compile", False))
        cache = options["cache"]
        if cache is not None and not isinstance(cache, StaticKVCache):
            raise ConfigurationError(f"cache: expected a StaticKVCache, got {type(cache).__name__}")

    def _facts(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What must be the same on all ranks, of models and options that were checked."""
        found: dict[str, Any] = dict(facts_of(self.model))
        found |= {name: options.get(name) for name in _RANKED}
        return found | {
            "max_seq_len": self.cache.max_seq_len,
            "batch_size": self._step.forward.rows,
            "cache.dtype": self.cache.layers[0].keys.dtype,
            "driver": self.driver.name,
            "agree_every": self._agree_every,
        }

    @abstractmethod
    def _prompt_facts(self, checked: Prompt) -> dict[str, Any]:
        """What of a prompt must be the same on all ranks."""

    @abstractmethod
    def _forced_facts(self, token: int | torch.Tensor) -> dict[str, Any]:
        """What of a forced token must be the same on all ranks."""

    @abstractmethod
    def _with_seed(self, checked: Prompt, drawn: int) -> Prompt:
        """The prompt with the seed that it is decoded with; rank 0 has drawn ``drawn``."""

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
            self._poll_every = options.get("poll_every", _POLL_EVERY)
            return super().generate(input_ids, max_new_tokens, *rest, **options)

    def stream(
        self, input_ids: torch.Tensor | None, max_new_tokens: int, *rest: Any, **options: Any
    ) -> Iterator[torch.Tensor]:
        """As :meth:`CUDAGraphAR.stream`, on all ranks; all must take as many tokens."""
        with self.ranks.together("stream"):
            self._poll_every = "one by one"
            return super().stream(input_ids, max_new_tokens, *rest, **options)

    def replay(self, token: int | torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`CUDAGraphAR.replay`, once all ranks are ready for it.

        A forced token is read by the host, also where it lies on the device.
        """
        with self.ranks.together("replay"):
            if token is None:
                self._agree_on_replay()
            else:  # it comes here again, once the token is checked
                self.ranks.agree("forced token", facts=self._forced_facts(token))
            return super().replay(token)

    def generate_in_one_launch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: no conditional body holds collectives.

        Raises:
            PlanError: Always, on all ranks.
        """
        with self.ranks.together("generate_in_one_launch"):
            raise _one_launch("generate")

    def stream_in_one_launch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: no conditional body holds collectives.

        Raises:
            PlanError: Always, on all ranks.
        """
        with self.ranks.together("stream_in_one_launch"):
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

    def _start(
        self,
        checked: Prompt,
        max_new_tokens: int,
        eos: tuple[int, ...],
        pad: int,
        *,
        keep_cache: bool,
    ) -> int:
        self._asked = {
            "max_new_tokens": max_new_tokens,
            "poll_every": self._poll_every,
            "keep_cache": keep_cache,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }
        try:
            return super()._start(checked, max_new_tokens, eos, pad, keep_cache=keep_cache)
        finally:
            self._asked = {}

    def _begin(self, checked: Prompt) -> None:
        held_graphs = self._prompt_graphs.holds_graph
        self._prompt_graphs.look(self._step.forward)
        has_lost = held_graphs and not self._prompt_graphs.holds_graph
        facts = {**self._asked, **self._prompt_facts(checked)}
        facts["decodes"] = "eagerly" if self._eager_reason() else "by replays"
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
        agreed = self.ranks.agree(
            "prompt",
            _PIECES[has_lost],
            among=_PIECES,
            detail="graphs of pieces of prompts are made anew",
            facts=facts,
            value=drawn,
        )
        if agreed.choice == _PIECES[True]:  # a launch and an eager piece would not meet on NCCL
            self._prompt_graphs.close()
        self._since_agreed = 0
        super()._begin(self._with_seed(checked, agreed.values[0]))

    def _choose_step(self, choice: StepChoice, why: str) -> StepChoice:
        agreed = self.ranks.agree("decode step", choice.value, among=_CHOICES, detail=why)
        return StepChoice(agreed.choice)

    def _step_is_captured(self) -> None:
        self.ranks.agree("decode step is captured")


def check_ranks(ranks: object) -> None:
    """Raises ConfigurationError for what is no Ranks: there is nobody whom this could be told."""
    if not isinstance(ranks, Ranks):
        raise ConfigurationError(f"ranks: expected Ranks, got {type(ranks).__name__}")


def check_agree_every(agree_every: object) -> None:
    """Raises ConfigurationError unless it is a positive int."""
    if isinstance(agree_every, bool) or not isinstance(agree_every, int) or agree_every < 1:
        raise ConfigurationError(f"agree_every: expected an int of at least 1, got {agree_every!r}")


def check_compile_is_off(how: object) -> None:
    """Refuses steps that each rank would compile by itself.

    Raises:
        ConfigurationError: Something else than False or None.
    """
    if how is not False and how is not None:
        raise ConfigurationError(
            f"compile: expected False for a model spread over ranks, got {how!r}: each rank would "
            "compile for itself, and nothing holds inductor to one order of collectives on all"
        )


def _one_launch(what: str) -> PlanError:
    return PlanError(
        f"{what}_in_one_launch: expected one rank, got a model spread over several, whose "
        f"collectives no conditional body holds (NCCL orders them by event nodes), and who could "
        f"not agree between two steps; use {what}"
    )
