"""Decoding inside a forward compiled with mode "reduce-overhead", in a process of its own.

Run as a module: ``python -m helpers.reduce_overhead t5 ours``. Prints one line of JSON for each
step, as it goes, and a last one with the outcome and the message of the error if there was one. A
process of its own, because an error in CUDA graphs of torch leaves their memory pool behind; it
ends without tearing torch down, which may crash after such an error and hide the answer.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from helpers.decode_models import eager_tokens, make_prompt
from helpers.encoder_decoder_models import eager_ids, encoder_inputs, make_t5
from transformers import AfmoeConfig, AfmoeForCausalLM, LlamaConfig, LlamaForCausalLM

from graphcore.decode import EncoderDecoderKVCache, StaticKVCache
from graphcore.decode import transformers_compat as compat

FAMILIES = ("t5", "llama", "afmoe")
NEW = 8
OVERWRITTEN = "accessing tensor output of CUDAGraphs that has been overwritten"

# as few layers as have everything in them: inductor takes its time for each
_sizes: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _afmoe() -> Any:
    """A dense layer and one of experts, which run without asking the host which are chosen."""
    config = AfmoeConfig(
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_dense_layers=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        sliding_window=64,
        **_sizes,
    )
    model = AfmoeForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


_makers: dict[str, Callable[[], Any]] = {
    "t5": lambda: make_t5(layers=1),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **_sizes)),
    "afmoe": _afmoe,
}


def make_family(family: str, device: str) -> Any:
    """The model: random, the same for every call."""
    torch.manual_seed(1234)
    return _makers[family]().to(device).eval()


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


def what_happens(
    family: str, whose: str, device: str = "cuda", tell: Callable[[str], None] = lambda step: None
) -> dict[str, str]:
    """Two prompts, twice in a row, each with a fresh cache: "equal", "different" or "raised"."""
    torch._dynamo.config.recompile_limit = 64  # a fresh cache is another object to guard
    model = make_family(family, device)
    prompts = prompts_of(family, device)
    expected = [decode(model, prompt) for prompt in prompts]
    tell("decoded eagerly")
    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    for turn in (1, 2):
        for number, (prompt, ids) in enumerate(zip(prompts, expected, strict=True), 1):
            options: dict[str, Any] = {"cache_implementation": "static"}
            if whose == "ours":
                keyword = str(compat.cache_keyword(model))
                options = {keyword: fresh_cache(model), "disable_compile": True}
            try:
                decoded = decode(model, prompt, **options)
            except Exception as error:  # whatever it is, it is the answer
                return {"outcome": "raised", "message": f"{type(error).__name__}: {error}"}
            tell(f"prompt {number} decoded, turn {turn}")
            if not torch.equal(decoded, ids):
                return {"outcome": "different", "message": f"{decoded.tolist()} {ids.tolist()}"}
    return {"outcome": "equal", "message": ""}


def main(family: str, whose: str, device: str = "cuda") -> None:
    """Prints what happens and ends the process."""
    faulthandler.enable()
    start = time.perf_counter()

    def tell(step: str) -> None:
        print(json.dumps({"step": step, "seconds": round(time.perf_counter() - start, 1)}))
        sys.stdout.flush()

    answer = what_happens(family, whose, device, tell)
    print(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
