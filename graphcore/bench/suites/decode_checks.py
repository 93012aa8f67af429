"""What stands beside the speed of suite decode: errors against eager, and the bytes of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphcore.bench.streaming_read import StreamingRead
from graphcore.bench.suites.decode_models import Subject
from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a runner agrees with the model's own eager forward.

    Attributes:
        equal: New tokens, from the first on, that equal transformers' eager ones.
        choices: Steps whose largest logit is eager's, where both are fed eager's tokens.
        steps: Out of so many.
        error: Largest difference of the logits of these steps, over the largest logit.
    """

    equal: int
    choices: int
    steps: int
    error: float


def agreement(runner: CUDAGraphAR, subject: Subject, eager: torch.Tensor, end: int) -> Agreement:
    """Decodes freely, then once more with ``eager`` (prompt and new ids) forced on the runner."""
    first = 1 if subject.is_encoder_decoder else subject.prompt.shape[1]
    new = eager[0, first:]
    free = runner.generate(subject.prompt, len(new), end, 0)[0, first:]
    same = (free == new[: len(free)]).long().cumprod(dim=0)
    reference = _logits_of(subject, eager)[first - 1 : -1]
    runner.cache.reset()
    runner.capture(subject.prompt)
    rows = [runner.logits[0].to(torch.float32, copy=True)]
    for token in new[:-1]:
        runner.replay(token)
        rows.append(runner.logits[0].to(torch.float32, copy=True))
    found = torch.stack(rows)
    return Agreement(
        equal=int(same.sum()),
        choices=int((found.argmax(dim=1) == reference.argmax(dim=1)).sum()),
        steps=len(new),
        error=float((found - reference).abs().max() / reference.abs().max()),
    )


def _logits_of(subject: Subject, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of one eager forward over the whole sequence."""
    inputs = {"input_ids": ids}
    if subject.is_encoder_decoder:
        inputs = {"input_ids": subject.prompt, "decoder_input_ids": ids}
    with torch.no_grad():
        logits: torch.Tensor = subject.model(**inputs, use_cache=False).logits[0]
    return logits.float()


def step_bytes(subject: Subject, cache: Any) -> int:
    """Bytes that a step reads: weights once, of the experts those that are hit, all K and V."""
    weights: float = sum(
        _share(subject, name, weight) * int(weight.numel()) * int(weight.element_size())
        for name, weight in subject.model.named_parameters()
    )
    held = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in cache.named_tensors().items()
        if name.endswith(("keys", "values"))
    )
    return int(weights + held)


def _share(subject: Subject, name: str, weight: torch.Tensor) -> float:
    """The part of a weight that one token's step reads."""
    config = subject.model.config
    if name.startswith("encoder.") or ".EncDecAttention.k" in name or ".EncDecAttention.v" in name:
        return 0.0
    if weight.dim() == 3 and subject.has_experts:
        return float(config.num_experts_per_tok / config.num_experts)
    if weight is subject.model.get_input_embeddings().weight:
        head = subject.model.get_output_embeddings()
        return 1.0 if head is not None and head.weight is weight else 1 / weight.shape[0]
    return 1.0


def read_bandwidth(driver: Driver) -> float:
    """Bytes a second of a streaming read by the device's clock: the ceiling of what a step reads.

    Raises:
        GraphcoreError: The read left words out.
    """
    with driver.stream(blocking=True) as stream:
        return StreamingRead(driver, stream).bytes_a_second
