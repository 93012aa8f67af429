"""The sampler: chooses a row's next token inside the step, and remembers what was taken."""

from __future__ import annotations

import logging

import torch

from graphcore.decode.cache_state import static_zeros
from graphcore.decode.noise import RowNoise
from graphcore.decode.sampling import Sampling, check_seed
from graphcore.decode.token_filters import TokenFilters, penalise

_log = logging.getLogger("graphcore")


class Sampler:
    """Static tensors of one runner's choices, and the functions over them.

    Legend: R rows, V vocabulary. Greedy is one ``argmax`` and holds no tensor. A random choice is
    the largest of logits / temperature + Gumbel noise, which draws a token with its probability
    under softmax; noise belongs to (seed, row, draw, token id), so rows and draws are independent,
    and the same seed gives the same tokens eager, captured and on another device, as far as the
    logits are the same.

    A NaN among the logits of a row is chosen (the first one by position), an infinite one too; a
    row of nothing but -inf gives an id in range. No id outside the vocabulary is ever chosen.

    Args:
        sampling: How to choose.
        rows: R.
        vocabulary: Ids below it can be fed; wider logits are cut to it.
        device: Of the logits.
    """

    def __init__(
        self, sampling: Sampling, rows: int, vocabulary: int, device: torch.device
    ) -> None:
        self.sampling = sampling
        self._rows = rows
        self._device = device
        self._filters = TokenFilters(sampling)
        self._noise = None if sampling.is_greedy else RowNoise(rows, device)
        self._ids: torch.Tensor | None = None
        self._marked: torch.Tensor | None = None
        self._seed: int | None = None
        self._has_begun = False
        self._vocabulary = 0
        self.fit(vocabulary)
        _tell_unused(sampling)

    @property
    def seed(self) -> int | None:
        """Of the numbers being drawn; None for greedy, and before the first generation."""
        return self._seed

    def fit(self, vocabulary: int) -> None:
        """Makes tables for another vocabulary, where the model was given one; marks are kept."""
        if vocabulary == self._vocabulary:
            return
        self._vocabulary = vocabulary
        if self._noise is not None:
            self._ids = static_zeros((vocabulary,), torch.int64, self._device)
            self._ids.copy_(torch.arange(vocabulary, device="cpu"))
        if self.sampling.repetition_penalty != 1.0:
            before = self._marked
            self._marked = static_zeros((self._rows, vocabulary), torch.bool, self._device)
            if before is not None:
                common = min(vocabulary, before.shape[1])
                self._marked[:, :common] = before[:, :common]

    def begin(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        seed: int | None = None,
        continues: bool = False,
    ) -> None:
        """A generation begins: random numbers start anew, and only ``ids`` are penalised.

        Args:
            ids: int64 ``[R, tokens]``, the prompt.
            mask: bool ``[R, tokens]``, False for padding, which is not penalised.
            seed: None: the description's; where that is None too, drawn from torch's default
                generator on the host (``torch.manual_seed`` makes it repeatable).
            continues: The prompt follows what was generated: numbers go on (unless ``seed`` is
                given), and what was penalised still is.

        Raises:
            ConfigurationError: ``seed`` is no 64-bit integer.
        """
        check_seed(seed)
        continues = continues and self._has_begun
        if self._noise is not None and not (continues and seed is None):
            self._seed = _first_given(seed, self.sampling.seed)
            self._noise.begin(self._seed)
        if self._marked is not None:
            if not continues:
                self._marked.zero_()
            self._mark(self._marked, ids, mask)
        self._has_begun = True

    def forget(self) -> None:
        """The rows hold other text from now on: nothing is penalised, and the next prompt begins.

        The seed stays what it was.
        """
        self._has_begun = False
        if self._marked is not None:
            self._marked.zero_()

    def take_back(self, draws: int) -> None:
        """The last ``draws`` choices were not wanted: their random numbers come again."""
        if self._noise is not None:
            self._noise.take_back(draws)

    def take_over(self, other: Sampler) -> None:
        """Goes on where ``other`` stopped, whose static tensors were copied into this one's."""
        self._seed, self._has_begun = other._seed, other._has_begun

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next tokens, int64 ``[R]``, of ``logits`` ``[R, V]``, which are left alone.

        Can be captured: it reads no number on the host, and moves the random state in place.
        """
        scores = logits if logits.shape[1] <= self._vocabulary else logits[:, : self._vocabulary]
        if self._marked is not None:
            marked = self._marked[:, : scores.shape[1]]
            scores = penalise(scores, marked, self.sampling.repetition_penalty)
        if self._noise is None or self._ids is None:
            return scores.argmax(dim=-1)
        scores, ids = self._filters.candidates(scores)
        noise = self._noise.log_exponentials(self._ids[: scores.shape[1]] if ids is None else ids)
        best = torch.sub(scores, noise, alpha=self.sampling.temperature).argmax(dim=-1)
        return best if ids is None else ids.gather(1, best[:, None]).squeeze(1)

    def accept(self, chosen: torch.Tensor) -> None:
        """Remembers the tokens ``[R]`` that were taken: chosen, forced, or padding. Capturable."""
        if self._marked is not None:
            self._marked.scatter_(1, chosen[:, None], True)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every static tensor of the sampler by the name reports use; none for greedy."""
        names: dict[str, torch.Tensor] = {}
        if self._noise is not None and self._ids is not None:
            names.update(self._noise.named_tensors())
            names["token ids"] = self._ids
        if self._marked is not None:
            names["penalised tokens"] = self._marked
        return names

    def changed(self) -> list[torch.Tensor]:
        """Those that a step writes."""
        state = [] if self._noise is None else [self._noise.state]
        return state if self._marked is None else [*state, self._marked]

    @staticmethod
    def _mark(marked: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        if mask is None:
            marked.scatter_(1, ids, True)
            return
        rows, columns = mask.nonzero(as_tuple=True)
        marked[rows, ids[rows, columns]] = True


def _first_given(*seeds: int | None) -> int:
    given = [seed for seed in seeds if seed is not None]
    return given[0] if given else int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _tell_unused(sampling: Sampling) -> None:
    """Says at INFO which settings have no effect because temperature 0 is greedy."""
    if sampling.is_greedy:
        for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("seed", None)):
            value = getattr(sampling, name)
            if value != neutral:
                _log.info("sampling.%s=%s has no effect: temperature 0 is greedy", name, value)
