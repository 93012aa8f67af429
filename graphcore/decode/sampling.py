"""How the next token is chosen inside the captured step: a value, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphcore.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Given to a runner at construction, since the choice is baked into its graph.

    The settings mean what transformers' logits processors of the same name mean, in their order:
    repetition penalty, temperature, top-k, top-p, min-p. At least one token is always kept.

    Args:
        temperature: 0.0 is greedy: the token with the largest logit. Above it logits are divided
            by it and a token is drawn from their softmax, in float32 or finer.
        top_k: Only the k largest logits; those that equal the k-th too, up to 32 of them. 0 keeps
            all tokens.
        top_p: Only the most likely tokens that together have this probability. 1.0 keeps all.
        min_p: Only tokens at least this many times as likely as the likeliest. 0.0 keeps all.
        repetition_penalty: Positive logits of the tokens of prompt and output are divided by it,
            negative ones multiplied; padding does not count. 1.0 changes nothing. Greedy uses it
            too.
        seed: Of the device's random numbers, any 64-bit integer. None: one is drawn from torch's
            default generator on the host for every generation (``torch.manual_seed`` makes that
            repeatable). The seed given to a generation comes before it.

    Raises:
        ConfigurationError: A value out of range; names field, expected and actual.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, None)
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise ConfigurationError(
                f"top_k: expected an int, 0 (all tokens) or more, got {self.top_k!r}"
            )
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0.0:
            raise ConfigurationError("repetition_penalty: expected a number above 0, got 0")
        check_seed(self.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken: no random number is drawn."""
        return self.temperature == 0.0

    @classmethod
    def greedy(cls) -> Sampling:
        """The token with the largest logit."""
        return cls()

    @classmethod
    def from_generation_config(cls, model: Any, *, seed: int | None = None) -> Sampling:
        """What ``model.generate()`` would do: do_sample, temperature, top_k, top_p, min_p, penalty.

        What is not set has transformers' default (top_k is 50 there). Without ``do_sample`` it is
        greedy. Runners say at INFO which other settings they do not follow.

        Args:
            model: With a ``generation_config``; greedy without one.
            seed: As in the constructor; a generation config has none.

        Raises:
            ConfigurationError: A setting out of range.
        """
        from graphcore.decode.generation_settings import configured_sampling

        return configured_sampling(model, seed)


def check_seed(seed: object) -> None:
    """Raises ConfigurationError unless ``seed`` is None or what ``torch.manual_seed`` takes."""
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ConfigurationError(f"seed: expected an int from -2**63 to 2**64 - 1, got {seed!r}")


def _check_number(field: str, value: Any, lowest: float, highest: float | None) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    until = math.inf if highest is None else highest
    if not is_number or not lowest <= value <= until or math.isinf(value):
        span = f"of at least {lowest:g}" if highest is None else f"from {lowest:g} to {highest:g}"
        raise ConfigurationError(f"{field}: expected a finite number {span}, got {value!r}")
