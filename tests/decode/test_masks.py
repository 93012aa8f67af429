"""Masks made from device positions: what each token sees, whatever the form rings answer in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.count_operations import CountOperations
from helpers.decode_models import make_model

from graphcore.decode import StaticKVCache
from graphcore.decode.access import Form
from graphcore.decode.masks import Layout, Masks, layouts

WINDOW = 8
CAPACITY = 20


def make(architecture: str, windows: Any = "model", batch: int = 1) -> tuple[Masks, StaticKVCache]:
    model = make_model(architecture)
    cache = StaticKVCache.for_model(model, CAPACITY, batch_size=batch)
    if windows != "model":
        shape = cache.layers[0]
        cache = StaticKVCache(
            3, batch, shape.num_heads, CAPACITY, shape.k_head_dim, model.dtype, "cpu",
            windows=windows,
        )  # fmt: skip
    return Masks(model, cache), cache


def shown(mask: torch.Tensor) -> list[set[int]]:
    """The columns that each token of row 0 sees."""
    assert mask.shape[1] == 1
    return [{int(at) for at in (row == 0).nonzero()} for row in mask[0, 0]]


def tokens_in_ring(position: int) -> list[int]:
    """The token in each slot once ``position`` is written; negative: none."""
    return [position - (position - slot) % WINDOW for slot in range(WINDOW)]


@pytest.mark.parametrize("position", range(CAPACITY))
def test_one_token_sees_the_held_tokens_of_its_window_and_no_others(position: int) -> None:
    masks, cache = make("qwen3-window")
    cache.seek(position)
    ids, found = masks.for_tokens(1)
    assert ids.tolist() == [[position]]
    assert isinstance(found, dict)
    assert shown(found["full_attention"]) == [set(range(position + 1))]
    assert found["full_attention"].shape == (1, 1, 1, CAPACITY)
    held = {slot for slot, token in enumerate(tokens_in_ring(position)) if token >= 0}
    assert shown(found["sliding_attention"]) == [held]
    assert found["sliding_attention"].shape == (1, 1, 1, WINDOW)


@pytest.mark.parametrize("position", [0, 3, 7, 8, 9, 15])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
def test_several_tokens_see_their_windows_in_the_past_and_among_themselves(
    position: int, count: int, fixed: bool
) -> None:
    masks, cache = make("mistral-window", batch=2)
    cache.seek(position)
    ids, mask = masks.for_tokens(count, fixed=fixed)
    assert isinstance(mask, torch.Tensor)
    assert ids.tolist() == [list(range(position, position + count))] * 2
    if fixed:
        columns = [*tokens_in_ring(position - 1), *range(position, position + count)]
    else:
        past = min(position, WINDOW - 1)
        columns = list(range(position - past, position + count))
    assert mask.shape == (2, 1, count, len(columns))
    for query, seen in enumerate(shown(mask), start=position):
        wanted = set(range(max(query - WINDOW + 1, 0), query + 1))
        assert {columns[at] for at in seen} == wanted
        assert len(seen) == len(wanted)


def test_a_cache_that_keeps_every_token_is_masked_to_the_window() -> None:
    masks, cache = make("mistral-window", windows=None)
    for position in (0, 7, 8, 19):
        cache.seek(position)
        _, mask = masks.for_tokens(1)
        assert isinstance(mask, torch.Tensor)
        assert mask.shape[-1] == CAPACITY
        assert shown(mask) == [set(range(max(position - WINDOW + 1, 0), position + 1))]


def test_layers_that_see_alike_get_one_mask_whatever_their_types_are_called() -> None:
    model = make_model("qwen3-window")
    cache = StaticKVCache.for_model(model, WINDOW)  # nothing ever leaves a window
    assert cache.windows == (None,) * 3
    assert set(layouts(model, cache).values()) == {Layout(None, False)}
    _, mask = Masks(model, cache).for_tokens(1)
    assert isinstance(mask, torch.Tensor)


def test_the_masks_of_one_step_take_few_operations() -> None:
    """Each costs about a microsecond of every token."""
    masks, cache = make("qwen3-window")
    cache.seek(3)
    masks.for_tokens(1)
    with CountOperations() as counted:
        masks.for_tokens(1)
    assert counted.names == ["add.Tensor", "le.Tensor", "where.self"]


def test_rows_of_a_mask_are_aligned_so_that_attention_copies_none() -> None:
    model = make_model("qwen3-window")
    masks = Masks(model, StaticKVCache.for_model(model, 21))
    _, found = masks.for_tokens(1)
    assert isinstance(found, dict)
    assert found["full_attention"].shape[-1] == 21
    assert {mask.stride(2) for mask in found.values()} == {24}
    assert {mask.stride(3) for mask in found.values()} == {1}


@pytest.mark.parametrize(
    ("dtype", "attention", "hidden"),
    [
        (torch.float32, "sdpa", torch.finfo(torch.float32).min),
        (torch.bfloat16, "eager", torch.finfo(torch.bfloat16).min),
        (torch.float16, "eager", torch.finfo(torch.float16).min),
        (torch.float16, "sdpa", float("-inf")),
    ],
    ids=str,
)
def test_a_hidden_token_gets_a_score_that_no_other_can_make_up_for(
    dtype: torch.dtype, attention: str, hidden: float
) -> None:
    model = make_model(dtype=dtype)
    model.set_attn_implementation(attention)
    masks = Masks(model, StaticKVCache.for_model(model, 8))
    _, mask = masks.for_tokens(1)
    assert isinstance(mask, torch.Tensor)
    assert mask.dtype == dtype
    assert mask[0, 0, 0].tolist() == [0.0] + [hidden] * 7


def test_the_access_that_masks_begin_is_the_one_that_layers_follow() -> None:
    masks, cache = make("mistral-window")
    state = cache._state
    masks.for_tokens(3, fixed=True)
    assert state.access_for(3).form is Form.FIXED
    assert state.access_for(1).form is Form.SLOTS  # another forward than the one that was begun
    masks.for_tokens(3)
    assert state.access_for(3).form is Form.TOKENS
    masks.for_tokens(3, fixed=True)
    cache.reset()
    assert state.access_for(3).form is Form.TOKENS  # the reset ended it
