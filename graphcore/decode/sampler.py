"""The sampler of a step: chooses the next tokens from logits, inside the captured graph.

Legend: R rows, V vocabulary. All it reads and writes has a fixed address.
"""

from __future__ import annotations

import torch

from graphcore.decode.sampling import Sampling


class Sampler:
    """Chooses as a :class:`Sampling` says."""

    def __init__(
        self, sampling: Sampling, rows: int, vocabulary: int, device: torch.device
    ) -> None:
        self.sampling = sampling

    def begin(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, *, seed: int | None = None
    ) -> None:
        """Begins a generation behind the prompt ``ids [R, T]``; ``mask`` says which count."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next ids, int64 ``[R]``, from ``logits [R, V]``, which stay as they are."""
        return logits.argmax(dim=-1)

    def accept(self, chosen: torch.Tensor) -> None:
        """Learns which ids ``[R]`` were taken in the end: forced ones and pads too."""

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Its static tensors by the name reports use."""
        return {}

    def changed(self) -> list[torch.Tensor]:
        """Those of its tensors that a step writes."""
        return []
