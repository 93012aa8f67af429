"""Layers of Qwen3-MoE's and Mixtral's own shape on a device, small ones without; prompts."""

from __future__ import annotations

from typing import Any

import torch
from helpers.moe_models import device_of
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from graphcore.driver import Driver

VOCABULARY = 512


def make_shaped(driver: Driver) -> Any:
    """Two layers: 128 experts, top-8, hidden 2048, expert 768 on a device, in bfloat16."""
    tiny = driver.is_emulated
    config = Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=64 if tiny else 2048,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 4,
        head_dim=16 if tiny else 128,
        num_experts=32 if tiny else 128,
        num_experts_per_tok=4 if tiny else 8,
        moe_intermediate_size=32 if tiny else 768,
        intermediate_size=96,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        norm_topk_prob=True,
        initializer_range=0.2 if tiny else 0.04,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    return _made(Qwen3MoeForCausalLM, config, driver)


def make_mixtral_shaped(driver: Driver) -> Any:
    """One layer: 8 experts, top-2, hidden 4096, expert 14336 on a device, in bfloat16."""
    tiny = driver.is_emulated
    config = MixtralConfig(
        num_hidden_layers=1,
        hidden_size=64 if tiny else 4096,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=96 if tiny else 14336,
        sliding_window=None,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        initializer_range=0.2 if tiny else 0.02,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    return _made(MixtralForCausalLM, config, driver)


def _made(kind: type[PreTrainedModel], config: PretrainedConfig, driver: Driver) -> Any:
    torch.manual_seed(11)
    with torch.device(device_of(driver)):
        model: Any = kind._from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("batched_mm")
    return model


def make_prompt(driver: Driver, tokens: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=draw).to(device_of(driver))
