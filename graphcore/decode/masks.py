"""Masks and positions of a forward, made on the device from the cache's position.

Legend: B rows of the cache, S slots, T tokens of one forward. Nothing here depends on a host
number but T, so a captured step masks right at whatever position it is replayed.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcore.decode import transformers_compat as compat
from graphcore.decode.cache_state import static_zeros
from graphcore.decode.static_cache import StaticKVCache


class Masks:
    """Which slots each token sees, in the form ``model``'s attention takes."""

    def __init__(self, model: Any, cache: StaticKVCache) -> None:
        self._model = model
        self._cache = cache
        self._slots = static_zeros((cache.max_seq_len,), torch.int64, cache.device)
        self._slots.copy_(torch.arange(cache.max_seq_len))

    def use(self, cache: StaticKVCache) -> None:
        """Works on another cache of the same shape from now on."""
        self._cache = cache

    def for_tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(position ids ``[B, T]``, mask ``[B, 1, T, S]``) of the next ``count`` tokens."""
        rows = self._cache.batch_size
        positions = self._cache.position + self._slots[:count]
        visible = self._slots <= positions[:, None]
        if not self._cache.padding:
            return positions.expand(rows, count), self._form(visible.expand(rows, 1, count, -1))
        visible = visible & ~self._cache.padding.hidden[:, None, None, :]
        if count > 1:
            # a pad sees itself: some attentions give NaN for a row that sees nothing
            visible = visible | (self._slots == positions[:, None])
        counted = (positions - self._cache.padding.pads[:, None]).clamp(min=0)
        return counted, self._form(visible)

    def _form(self, visible: torch.Tensor) -> torch.Tensor:
        """As the model's attention takes it; without a model: bool, True where a slot is seen."""
        return visible if self._model is None else compat.attention_mask(self._model, visible)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Its static tensors by the name reports use."""
        return {"slot numbers": self._slots}
