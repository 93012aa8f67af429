"""Classifier-free guidance: two branches of a prompt, one token, inside one captured step.

Legend: R rows of tokens, 2 R rows of the cache (the conditional branch first), V vocabulary. Both
branches are fed the same token; what chooses it sees one combination of their logits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from graphcore.decode import padding
from graphcore.decode.cache_state import refuse_inside_capture, static_zeros
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.forward import Forward
from graphcore.decode.prompt import Prompt, check_prompt
from graphcore.decode.sizes import check_positive
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Guidance:
    """How strongly the prompt steers: ``unconditional + scale * (conditional - unconditional)``.

    Args:
        scale: 1.0 is the conditional branch, 0.0 the other; above 1.0 steers harder. A runner's
            ``guidance.scale`` changes it later.
        log_softmax: Combine log-probabilities, as transformers' ``guidance_scale`` does. False
            combines the logits themselves, as YuE does: two kernels less, and the same but for a
            constant of each row, which only a repetition penalty notices.

    Raises:
        ConfigurationError: A scale that is not a finite number.
    """

    scale: float = 1.5
    log_softmax: bool = True

    def __post_init__(self) -> None:
        _check_scale(self.scale)


class Guide:
    """The combination inside a runner's step; its scale is read from the device."""

    def __init__(self, guidance: Guidance, device: torch.device) -> None:
        self._log_softmax = guidance.log_softmax
        self._scale = float(guidance.scale)
        self.tensor = static_zeros((), torch.float32, device).fill_(self._scale)

    @property
    def scale(self) -> float:
        """Of every later forward; setting it needs no new capture."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        refuse_inside_capture("guidance.scale")
        _check_scale(value)
        self._scale = float(value)
        self.tensor.fill_(self._scale)

    def combine(self, conditional: torch.Tensor, unconditional: torch.Tensor) -> torch.Tensor:
        """float32 ``[R, V]``, from the logits of the two branches.

        What the conditional branch rules out with -inf stays so: the difference of two would be
        NaN.
        """
        wanted, other = conditional.float(), unconditional.float()
        if self._log_softmax:
            wanted, other = wanted.log_softmax(dim=-1), other.log_softmax(dim=-1)
        combined = self.tensor * (wanted - other) + other
        return torch.where(wanted == -math.inf, wanted, combined)

    def __repr__(self) -> str:
        return f"Guide(scale={self._scale}, log_softmax={self._log_softmax})"


class GuidedForward:
    """A forward of R rows over one of 2 R rows."""

    def __init__(self, forward: Forward, guide: Guide) -> None:
        self._forward = forward
        self.model = forward.model
        self.rows = forward.rows // 2
        self.guide = guide

    @property
    def inner(self) -> Forward:
        """The forward of both branches."""
        return self._forward

    @property
    def cache(self) -> StaticKVCache | EncoderDecoderKVCache:
        """The cache of both branches, 2 R rows."""
        return self._forward.cache

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The one of the forward inside."""
        return self._forward.key

    @property
    def vocabulary(self) -> int:
        """The one of the forward inside."""
        return self._forward.vocabulary

    def use(self, cache: StaticKVCache) -> None:
        """Works on ``cache``, which is of the same layout, from now on."""
        self._forward.use(cache)

    def prefill(self, prompt: Prompt) -> torch.Tensor:
        """Forwards the prompts of both branches; logits as :meth:`logits`."""
        other = prompt.negative
        assert other is not None, "check_prompt gives every guided prompt its negative one"
        mask = None
        if prompt.mask is not None or other.mask is not None:
            mask = torch.cat([_counting(prompt), _counting(other)])
        both = Prompt(torch.cat([prompt.ids, other.ids]), mask, prompt.inputs)
        return self._combined(self._forward.prefill(both))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 ``[R, V]``, from one forward of ``tokens [R, T]`` in both branches."""
        return self._combined(self._forward.logits(torch.cat([tokens, tokens])))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Those of the forward inside, and the scale."""
        return {**self._forward.named_tensors(), "guidance scale": self.guide.tensor}

    def changed(self) -> list[torch.Tensor]:
        """Those of the forward inside."""
        return self._forward.changed()

    def _combined(self, logits: torch.Tensor) -> torch.Tensor:
        return self.guide.combine(logits[: self.rows], logits[self.rows :])


def paired(prompt: Prompt, negative: Prompt | None) -> Prompt:
    """``prompt`` with its negative one, both padded to the longer of the two.

    None takes the last token of each row, as transformers does.
    """
    if negative is None:
        negative = Prompt(prompt.ids[:, -1:])
    length = max(prompt.length, negative.length)
    ids, mask = padding.of_length(prompt.ids, prompt.mask, length)
    other = Prompt(*padding.of_length(negative.ids, negative.mask, length))
    return Prompt(ids, mask, prompt.inputs, negative=other, given=prompt.as_given)


def negative_prompt(
    forward: Forward, negative_input_ids: Any = None, negative_attention_mask: Any = None
) -> Prompt | None:
    """The checked prompt of the unconditional branches; one row serves all.

    Raises:
        ConfigurationError: As :func:`check_prompt`; or a mask without ids.
    """
    ids, mask = negative_input_ids, negative_attention_mask
    if ids is None:
        if mask is not None:
            raise ConfigurationError(
                "negative_attention_mask: expected negative_input_ids with it, got None"
            )
        return None
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1:
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            mask = mask.expand(forward.rows, -1)
        ids = ids.expand(forward.rows, -1)
    return check_prompt(forward, ids, mask, name="negative_input_ids")


def check_guidance(guidance: object) -> None:
    """Raises ConfigurationError unless ``guidance`` is a Guidance or None."""
    if guidance is not None and not isinstance(guidance, Guidance):
        raise ConfigurationError(f"guidance: expected Guidance or None, got {guidance!r}")


def pair_rows(cache: Any, batch_size: int | None) -> int:
    """Rows of the cache for ``batch_size`` pairs: 2 x batch; ``cache`` may be None or foreign.

    Raises:
        ConfigurationError: The cache has another number; names both.
    """
    if batch_size is not None:
        check_positive("batch_size", batch_size)
    if not isinstance(cache, (StaticKVCache, EncoderDecoderKVCache)):
        return 2 * (batch_size or 1)
    rows = cache.batch_size
    if rows % 2 or (batch_size is not None and rows != 2 * batch_size):
        batch = "batch" if batch_size is None else f"batch ({batch_size})"
        raise ConfigurationError(
            f"cache batch_size: expected 2 x {batch} rows, since guidance keeps a conditional and "
            f"an unconditional branch of every row, got {rows}"
        )
    return rows


def _counting(prompt: Prompt) -> torch.Tensor:
    return torch.ones_like(prompt.ids, dtype=torch.bool) if prompt.mask is None else prompt.mask


def _check_scale(scale: object) -> None:
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(scale):  # type: ignore[arg-type]
        raise ConfigurationError(f"guidance scale: expected a finite number, got {scale!r}")
