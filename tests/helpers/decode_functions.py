"""A small model of our own, without transformers, as a module and as a plain step function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphcore.decode import StaticKVCache

VOCABULARY = 61
LAYERS = 2
HEADS = 2
WIDTH = 16
POSITIONS = 64


class TinyModel(torch.nn.Module):
    """Attention layers over learned positions; its forward takes a cache as our steps want it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(POSITIONS, WIDTH)
        self.inputs = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.outputs = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions(position_ids)
        for index, (inputs, outputs) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            heads = (*tokens.shape, 3, HEADS, WIDTH // HEADS)
            query, keys, values = inputs(hidden).view(heads).permute(2, 0, 3, 1, 4)
            if cache is not None:
                keys, values = cache.update(keys, values, index)
            mixed = scaled_dot_product_attention(
                query, keys, values, attn_mask=self.layer_mask(mask, index)
            )
            hidden = hidden + outputs(mixed.transpose(1, 2).flatten(2))
        logits: torch.Tensor = self.head(hidden)
        return logits

    def layer_mask(self, mask: Any, index: int) -> Any:
        """The mask of one layer: here all take the same."""
        return mask

    def whole(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of all of ``tokens [R, T]``, without any cache: what decoding is compared with."""
        count = tokens.shape[1]
        order = torch.arange(count, device=tokens.device)
        causal = (order <= order[:, None])[None, None]
        return self(tokens, order.expand_as(tokens), causal)


def make_tiny_model(device: str = "cpu", kind: type[TinyModel] = TinyModel) -> TinyModel:
    """The same random weights for every call."""
    torch.manual_seed(77)
    model = kind()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.to(device).eval()


def make_tiny_cache(device: str = "cpu", *, rows: int = 1, capacity: int = 32) -> StaticKVCache:
    return StaticKVCache(LAYERS, rows, HEADS, capacity, WIDTH // HEADS, torch.float32, device)


def as_function(model: TinyModel) -> Callable[..., torch.Tensor]:
    """``model`` behind a plain function, which nothing can see into."""

    def step(
        tokens: torch.Tensor, *, position_ids: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        return model(tokens, position_ids, mask, cache)

    return step


def whole_tokens(model: TinyModel, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Prompt and greedy new ids, each from one forward of everything before."""
    ids = prompt
    with torch.no_grad():
        for _ in range(new_tokens):
            ids = torch.cat([ids, model.whole(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids
