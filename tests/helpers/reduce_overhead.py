"""Decoding inside a forward compiled with mode "reduce-overhead", in a process of its own.

Run as a module: ``python -m helpers.reduce_overhead t5 ours``. Prints one line of JSON: what
happened, and the message of the error if there was one. A process of its own, because an error in
CUDA graphs of torch leaves their memory pool behind.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from helpers.decode_models import eager_tokens, make_model, make_prompt
from helpers.encoder_decoder_models import eager_ids, encoder_inputs, make_encoder_decoder
from transformers import AfmoeConfig, AfmoeForCausalLM

from graphcore.decode import EncoderDecoderKVCache, StaticKVCache
from graphcore.decode import transformers_compat as compat

FAMILIES = ("t5", "llama", "afmoe")
NEW = 12
OVERWRITTEN = "accessing tensor output of CUDAGraphs that has been overwritten"


def make_afmoe(device: str) -> Any:
    """A random AfMoE, whose experts run without asking the host which are chosen."""
    torch.manual_seed(1234)
    config = AfmoeConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_dense_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        sliding_window=64,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AfmoeForCausalLM(config).to(device).eval()
    model.set_experts_implementation("batched_mm")
    return model


def make_family(family: str, device: str) -> Any:
    """The model."""
    if family == "t5":
        return make_encoder_decoder("t5", device=device)
    return make_afmoe(device) if family == "afmoe" else make_model(family, device=device)


def prompts_of(family: str, device: str) -> list[Any]:
    """Two prompts of unequal length, for :func:`decode`."""
    if family == "t5":
        return [encoder_inputs("t5", tokens, seed=tokens, device=device) for tokens in (9, 5)]
    return [make_prompt(tokens, device=device, seed=tokens) for tokens in (9, 5)]


def fresh_cache(model: Any) -> Any:
    """A cache of ours."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderKVCache.for_model(model, 32, 12)
    return StaticKVCache.for_model(model, 32)


def decode(model: Any, prompt: Any, **options: Any) -> torch.Tensor:
    """Ids of transformers' own greedy ``generate``."""
    if model.config.is_encoder_decoder:
        return eager_ids(model, prompt, NEW, **options)
    return eager_tokens(model, prompt, NEW, **options)


def what_happens(family: str, whose: str, device: str = "cuda") -> dict[str, str]:
    """Two prompts, twice in a row, each with a fresh cache: "equal", "different" or "raised"."""
    torch._dynamo.config.recompile_limit = 64  # a fresh cache is another object to guard
    model = make_family(family, device)
    prompts = prompts_of(family, device)
    expected = [decode(model, prompt) for prompt in prompts]
    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    for _ in range(2):
        for prompt, ids in zip(prompts, expected, strict=True):
            options: dict[str, Any] = {"cache_implementation": "static"}
            if whose == "ours":
                keyword = str(compat.cache_keyword(model))
                options = {keyword: fresh_cache(model), "disable_compile": True}
            try:
                decoded = decode(model, prompt, **options)
            except Exception as error:  # whatever it is, it is the answer
                return {"outcome": "raised", "message": f"{type(error).__name__}: {error}"}
            if not torch.equal(decoded, ids):
                return {"outcome": "different", "message": f"{decoded.tolist()} {ids.tolist()}"}
    return {"outcome": "equal", "message": ""}


if __name__ == "__main__":
    print(json.dumps(what_happens(*sys.argv[1:])))
