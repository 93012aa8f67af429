"""What turns tokens into logits: a model with its static cache and the masks it wants.

A decode step is the same for every kind of model; what differs is behind :class:`Forward`. Legend:
R rows of tokens, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from graphcore.decode import transformers_compat as compat
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.masks import Masks
from graphcore.decode.prompt import Prompt, vocabulary_size
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError


class Forward(Protocol):
    """A model with its cache. Everything static in it has one address for life."""

    @property
    def model(self) -> Any:
        """Kept by graphs; its weights are compared before a graph is reused."""

    @property
    def cache(self) -> StaticKVCache | EncoderDecoderKVCache:
        """Where K and V go, and whose position says where."""

    @property
    def rows(self) -> int:
        """R. The cache may have more."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What selects the captured variant now; () where there is but one."""

    @property
    def vocabulary(self) -> int:
        """Ids below it can be fed."""

    def use(self, cache: Any) -> None:
        """Works on another cache of the same layout from now on; its own tensors stay."""

    def prefill(self, prompt: Prompt) -> torch.Tensor:
        """Logits ``[R, V]`` of a prompt's last token; eager; appends to the cache."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of ``tokens [R, 1]``; appends to the cache. This is captured."""

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Its static tensors, the cache's left out, by the name reports use."""

    def changed(self) -> list[torch.Tensor]:
        """Those of its tensors that a step writes."""


Feed = Callable[[Forward, torch.Tensor], torch.Tensor]
"""How the tokens of a prompt ``[R, T]`` are handed to ``forward.logits``; gives the last's."""


def in_one_piece(forward: Forward, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[R, V]`` of the last of ``ids [R, T]``, from one forward."""
    return forward.logits(ids)


class DecoderForward:
    """A decoder-only transformers model with a :class:`StaticKVCache`."""

    def __init__(self, model: Any, cache: StaticKVCache, feed: Feed = in_one_piece) -> None:
        self.model = model
        self.cache = cache
        self.rows = cache.batch_size
        self._masks = Masks(model, cache)
        self._feed = feed

    @property
    def key(self) -> tuple[Hashable, ...]:
        """(): one graph serves every position. ("ragged",) while the cache holds pads."""
        return ("ragged",) if self.cache.padding else ()

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding."""
        return vocabulary_size(self.model)

    def use(self, cache: StaticKVCache) -> None:
        """Works on ``cache``, which is of the same layout, from now on."""
        self.cache = cache
        self._masks.use(cache)

    def prefill(self, prompt: Prompt) -> torch.Tensor:
        """Forwards the prompt behind what the cache holds.

        Raises:
            ConfigurationError: The model did not write the cache's last layer once for each token:
                the position would not be that of its tokens.
        """
        start = self.cache.seen_tokens
        self._masks.begin(prompt)
        logits = self._feed(self, prompt.ids)
        moved = self.cache.seen_tokens - start
        if moved != prompt.length:
            raise ConfigurationError(
                f"model: expected a forward that moves the cache's position by its "
                f"{prompt.length} tokens, it moved by {moved}: {type(self.model).__name__} does "
                f"not write K and V of layer {self.cache._state.last_owner}, the last one, once"
            )
        return logits

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``tokens [R, T]``, masked on the device."""
        positions, mask = self._masks.for_tokens(tokens.shape[1])
        return compat.forward_logits(
            self.model, tokens, position_ids=positions, mask=mask, cache=self.cache
        )

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The masks' tensors."""
        return self._masks.named_tensors()

    def changed(self) -> list[torch.Tensor]:
        """None: a step writes nothing outside the cache here."""
        return []
