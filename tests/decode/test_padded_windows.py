"""Padded rows where layers keep a window: pads take slots of a ring, hidden there, and age out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_functions import TinyModel, make_tiny_model
from helpers.decode_models import VOCABULARY, device_of, eager_tokens, make_prompt
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from graphcore.decode import CUDAGraphAR, Guidance, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

NEW = 12
WINDOW = 6
LENGTHS = (2, 11, 5)

_sizes = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # otherwise random models repeat their last token
}
_makers: dict[str, Any] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_sizes)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(layer_types=["sliding_attention", "full_attention"], **_sizes)
    ),
}


def make_runner(driver: Driver, architecture: str, **options: Any) -> CUDAGraphAR:
    torch.manual_seed(5)
    model = _makers[architecture]().to(device_of(driver)).eval()
    given = {"max_seq_len": 40, "batch_size": len(LENGTHS)} | options
    return CUDAGraphAR(model, driver=driver, **given)


def batch_of(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(left-padded ids, mask)."""
    longest = max(row.shape[1] for row in rows)
    pads = [longest - row.shape[1] for row in rows]
    ids = [torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    counts = [torch.ones_like(row) for row in rows]
    mask = [torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(counts, pads, strict=True)]
    return torch.cat(ids), torch.cat(mask)


def rows_for(driver: Driver) -> list[torch.Tensor]:
    return [make_prompt(length, device=device_of(driver), seed=length) for length in LENGTHS]


def alone(model: Any, rows: list[torch.Tensor], new: int = NEW) -> torch.Tensor:
    return torch.cat([eager_tokens(model, row, new)[:, row.shape[1] :] for row in rows])


@pytest.mark.parametrize("chunks", ["one piece", "chunks", "captured chunks"])
@pytest.mark.parametrize("architecture", _makers)
def test_padded_rows_decode_what_each_decodes_alone_past_the_window(
    graphcore_driver: Driver, architecture: str, chunks: str
) -> None:
    options: dict[str, Any] = {} if chunks == "one piece" else {"prefill_chunk_size": 4}
    options["capture_prefill"] = chunks == "captured chunks"
    with make_runner(graphcore_driver, architecture, **options) as runner:
        assert WINDOW in {layer.keys.shape[2] for layer in runner.cache.layers}
        rows = rows_for(graphcore_driver)
        prompt, mask = batch_of(rows)
        plain = make_prompt(9, batch=3, device=device_of(graphcore_driver))
        padded_ids, plain_ids = alone(runner.model, rows), eager_tokens(runner.model, plain, NEW)
        for _ in range(2):
            ids = runner.generate(prompt, NEW, attention_mask=mask)
            assert torch.equal(ids[:, 11:], padded_ids)
            assert torch.equal(runner.generate(plain, NEW), plain_ids)
        assert runner.captures == 2 * (1 + options["capture_prefill"])
        assert len(ids[:, 11:].unique()) > 6
        # the control: the window matters, and so do the pads
        assert not torch.equal(runner.generate(prompt, NEW)[0, 11:], ids[0, 11:])


def test_a_guidance_pair_of_unequal_prompts_works_with_windows(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, "gemma3", batch_size=1, guidance=Guidance(1.8)) as runner:
        short, long, _ = rows_for(graphcore_driver)
        for prompt, negative in ((short, long), (long, short)):
            ids = runner.generate(prompt, NEW, negative_input_ids=negative)
            theirs = runner.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), negative_prompt_ids=negative,
                guidance_scale=1.8, max_new_tokens=NEW, do_sample=False,
            )  # fmt: skip
            assert torch.equal(ids, theirs)


def test_behind_padded_rows_a_plain_prompt_works_and_a_padded_one_is_refused(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, "mistral") as runner:
        rows = rows_for(graphcore_driver)
        prompt, mask = batch_of(rows)
        first = runner.generate(prompt, 4, attention_mask=mask)[:, 11:]
        more = make_prompt(3, batch=3, device=device_of(graphcore_driver), seed=8)
        second = runner.generate(more, 6, keep_cache=True)
        whole = [
            torch.cat([row, new[None], turn[None]], dim=1)
            for row, new, turn in zip(rows, first, more, strict=True)
        ]
        assert torch.equal(second[:, 3:], alone(runner.model, whole, 6))
        with pytest.raises(
            ConfigurationError, match=r"behind the 24 tokens held, got padding: .* window of 6"
        ):
            runner.generate(prompt, 4, attention_mask=mask, keep_cache=True)
        ids = runner.generate(prompt, NEW, attention_mask=mask)
        assert torch.equal(ids[:, 11:], alone(runner.model, rows))


class Mixed(TinyModel):
    """Takes a mask for each kind of layer."""

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, mask: Any, cache: Any = None
    ) -> torch.Tensor:
        self.taken = mask
        return super().forward(tokens, position_ids, mask, cache)

    def layer_mask(self, mask: Any, index: int) -> Any:
        return mask["sliding_attention" if index == 0 else "full_attention"]


def test_a_step_function_over_a_cache_with_windows_gets_a_mask_for_each_kind_of_layer(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_tiny_model(device, Mixed)
    rows = [make_prompt(length, device=device, seed=length) % 61 for length in (3, 9)]
    prompt, mask = batch_of(rows)

    def whole(ids: torch.Tensor) -> torch.Tensor:
        order = torch.arange(ids.shape[1], device=device)
        causal = order <= order[:, None]
        windowed = causal & (order > order[:, None] - WINDOW)
        masks = {"sliding_attention": windowed, "full_attention": causal}
        return model(ids, order.expand_as(ids), masks)

    cache = StaticKVCache(2, 2, 2, 32, 8, torch.float32, device, windows=[WINDOW, None])
    with CUDAGraphAR(model, cache, vocabulary=61, driver=graphcore_driver) as runner:
        ids = runner.generate(prompt, NEW, attention_mask=mask)
        assert {kind: tuple(taken.shape) for kind, taken in model.taken.items()} == {
            "sliding_attention": (2, 1, 1, WINDOW),
            "full_attention": (2, 1, 1, 32),
        }
        for row, alone_ids in zip(ids, rows, strict=True):
            expected = alone_ids
            with torch.no_grad():
                for _ in range(NEW):
                    token = whole(expected)[:, -1].argmax(-1, keepdim=True)
                    expected = torch.cat([expected, token], dim=1)
            assert torch.equal(row[9:], expected[0, alone_ids.shape[1] :])
