"""What transformers' own logits processors make of logits, for a Sampling of ours."""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphcore.decode import Sampling


def transformers_scores(
    sampling: Sampling, logits: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """What transformers' own sampling makes of ``logits``: -inf where a token is removed."""
    made = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature not in (0.0, 1.0):
        made.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        made.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        made.append(MinPLogitsWarper(sampling.min_p))
    return made(ids, logits.float())
