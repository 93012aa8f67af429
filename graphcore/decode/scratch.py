"""The converted scratch pair of a cache whose dtype differs from the model's.

Attention reads K and V in the model's dtype. One pair, as large as the largest layer, serves all
layers: a layer's attention has read it before the next layer overwrites it (one stream). Where
layers attend to another layer's K and V, each layer that has some needs a pair of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from graphcore.decode.cache_state import refuse_inside_capture, static_zeros
from graphcore.decode.sizes import LayerShapes


class Scratch:
    """Pairs of flat buffers by dtype; usually one pair.

    Args:
        shapes: (K, V) of the layers that it serves.
        owner: Begins its buffers' names, as "layer 4 ".
    """

    def __init__(self, shapes: Iterable[LayerShapes], owner: str = "") -> None:
        pairs = list(shapes)
        self._key_count = max(math.prod(keys) for keys, _ in pairs)
        self._value_count = max(math.prod(values) for _, values in pairs)
        self._owner = owner
        self._pairs: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def make(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the pair for ``dtype``; nothing where it is there.

        Raises:
            CaptureError: A graph is being captured: the pair would live in its memory.
        """
        if dtype in self._pairs:
            return
        refuse_inside_capture(f"a scratch pair for {dtype}")
        self._pairs[dtype] = (
            static_zeros((self._key_count,), dtype, device),
            static_zeros((self._value_count,), dtype, device),
        )

    def views(
        self, dtype: torch.dtype, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair for ``dtype`` in the shapes of ``keys`` and ``values``."""
        self.make(dtype, keys.device)
        flat_keys, flat_values = self._pairs[dtype]
        return (
            flat_keys[: keys.numel()].view(keys.shape),
            flat_values[: values.numel()].view(values.shape),
        )

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers by name."""
        names: dict[str, torch.Tensor] = {}
        for dtype, (keys, values) in self._pairs.items():
            short = str(dtype).removeprefix("torch.")
            names[f"{self._owner}scratch keys {short}"] = keys
            names[f"{self._owner}scratch values {short}"] = values
        return names


def scratches(shapes: Sequence[LayerShapes], owners: Sequence[int]) -> list[Scratch]:
    """The scratch of each layer: one for all, or their own where not all layers are owners."""
    if len(owners) == len(shapes):
        return [Scratch(shapes)] * len(shapes)
    return [Scratch([pair], f"layer {index} ") for index, pair in enumerate(shapes)]
