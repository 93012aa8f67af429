"""How the next token is chosen inside the captured step."""

from __future__ import annotations

from dataclasses import dataclass

from graphcore.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Given to a runner at construction, since the choice is baked into its graph.

    Only greedy decoding is offered in this version: the token with the largest logit. For anything
    else read ``runner.logits``, sample outside, and give the token to ``runner.replay(token)``.

    Args:
        temperature: 0.0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: 1.0 keeps all tokens.
        seed: Of the device's random numbers; without meaning for greedy.

    Raises:
        ConfigurationError: Anything but greedy was asked for.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field, expected in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("seed", None)):
            actual = getattr(self, field)
            if actual != expected:
                raise ConfigurationError(
                    f"sampling: only greedy decoding is offered: {field} must be {expected}, got "
                    f"{actual!r}. Sample from runner.logits and give the id to replay(token)"
                )

    @classmethod
    def greedy(cls) -> Sampling:
        """The token with the largest logit."""
        return cls()
