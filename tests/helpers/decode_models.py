"""Small random models of the architectures that decode tests run, and what eager decoding gives."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
LAYERS = 3
POSITIONS = 64

_sizes = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    # wide enough that random models do not repeat one token
    "initializer_range": 0.2,
}

_makers: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_sizes)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, head_dim=24, **_sizes)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(num_key_value_heads=2, sliding_window=None, **_sizes)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_layer=LAYERS,
            n_embd=64,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            bos_token_id=1,
            eos_token_id=None,
            initializer_range=0.2,
        )
    ),
}

ARCHITECTURES = tuple(_makers)


def device_of(driver: Any) -> str:
    """Where models of a test on ``driver`` live."""
    return "cpu" if driver.is_emulated else f"cuda:{driver.device}"


def make_model(
    architecture: str = "llama", *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A random model in evaluation mode, the same for every call."""
    torch.manual_seed(1234)
    return _makers[architecture]().to(device=device, dtype=dtype).eval()


def make_prompt(tokens: int, *, batch: int = 1, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Random ids ``[batch, tokens]``, the same for every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator).to(device)


def eager_tokens(model: Any, prompt: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """Prompt and new ids of transformers' own greedy ``generate`` with its DynamicCache."""
    ids: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        **options,
    )
    return ids
