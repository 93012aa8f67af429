"""FirstStep: the decoder's first token of a generation, captured, which writes the cross K/V.

The encoder is eager. Behind it the first token's forward projects the encoder's states into the
cross half and decodes; every later step only reads them. Which of the two a graph is, is in its
key: no graph looks at a flag. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.capture_lane import CaptureLane
from graphcore.decode.prompt_graphs import PromptGraphs
from graphcore.errors import ConfigurationError

if TYPE_CHECKING:
    from graphcore.decode.encoder_decoder_forward import EncoderDecoderForward


class FirstStep(PromptGraphs):
    """Graphs of first tokens: one for all encoder lengths, or one for each that is read exactly."""

    def __init__(self, lane: CaptureLane) -> None:
        super().__init__("first step", lane)

    def __call__(self, forward: EncoderDecoderForward, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of ``tokens [R, 1]``; the cross half of the forward's cache is empty.

        Afterwards it holds the encoder's tokens, and says so.
        """
        if os.environ.get("GRAPHCORE_DISABLE") == "1":
            logits = forward.first_logits(tokens)
        else:
            logits = self._first_step(forward, tokens)
        forward.cache.mark_encoder(forward.held_length)
        return logits

    def _first_step(self, forward: EncoderDecoderForward, tokens: torch.Tensor) -> torch.Tensor:
        self.look(forward)
        key = ("first step", *forward.first_key)
        begin = forward.cache.unmark_encoder
        return self._forwarded(forward, tokens, forward.first_logits, key, begin=begin)

    def _kept(self, forward: Any) -> dict[str, object]:
        """What lets the capture write the cross half."""
        return {**super()._kept(forward), "first step": forward.cache.encoder_state.permit}


def check_first_step(model: Any, capture_first_step: bool) -> None:
    """Refuses a captured first step where there is no encoder whose K/V it could write.

    Raises:
        ConfigurationError: The model is no encoder-decoder.
    """
    if capture_first_step and not families.is_encoder_decoder(model):
        raise ConfigurationError(
            f"capture_first_step: expected False, got {capture_first_step}: the model has no "
            "encoder, whose K and V a first step would write"
        )
