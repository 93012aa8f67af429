"""Small random models of the architectures that decode tests run, and what eager decoding gives."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 97
LAYERS = 3
POSITIONS = 64
WINDOW = 8

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

_alternating = ["sliding_attention", "full_attention", "sliding_attention"]
_heads = {"num_key_value_heads": 2}
_windows = {"sliding_window": WINDOW, "layer_types": _alternating}
_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

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

# with a sliding window, with experts, with layers that differ
_others: dict[str, Any] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_heads, **_sizes)),
    "mistral-window": lambda: MistralForCausalLM(
        MistralConfig(sliding_window=WINDOW, **_heads, **_sizes)
    ),
    "phi3-window": lambda: Phi3ForCausalLM(Phi3Config(sliding_window=WINDOW, **_heads, **_sizes)),
    "qwen3-window": lambda: Qwen3ForCausalLM(
        Qwen3Config(use_sliding_window=True, head_dim=24, **_windows, **_heads, **_sizes)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            head_dim=24,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
            tie_word_embeddings=False,  # tied random ones repeat their own token
            **_windows,
            **_heads,
            **_sizes,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            head_dim=24,
            query_pre_attn_scalar=24,
            tie_word_embeddings=False,
            **_windows,
            **_heads,
            **_sizes,
        )
    ),
    "afmoe": lambda: AfmoeForCausalLM(
        AfmoeConfig(
            head_dim=16,
            num_dense_layers=1,
            num_shared_experts=1,
            **_experts,
            **_windows,
            **_heads,
            **_sizes,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, **_heads, **_sizes
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(head_dim=16, **_experts, **_heads, **_sizes)
    ),
    # layers that attend to another layer's K and V
    "gemma3n": lambda: Gemma3nForCausalLM(
        Gemma3nTextConfig(
            **_heads,
            **_sizes
            | {
                "num_hidden_layers": 6,
                "intermediate_size": [96] * 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
            },
            sliding_window=WINDOW,
            num_kv_shared_layers=2,
            head_dim=16,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 6,
            altup_num_inputs=2,
        )
    ),
    # twice the heads in the sliding layers, V narrower than K, attention sinks
    "mimo": lambda: MiMoV2FlashForCausalLM(
        MiMoV2FlashConfig(
            head_dim=24,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            **_windows,
            **_heads,
            **_sizes,
        )
    ),
}

_makers |= _others
ARCHITECTURES = ("llama", "qwen3", "mistral", "gpt2")
FAMILIES = tuple(_makers)


def device_of(driver: Any) -> str:
    """Where models of a test on ``driver`` live."""
    return "cpu" if driver.is_emulated else f"cuda:{driver.device}"


def make_model(
    architecture: str = "llama", *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A random model in evaluation mode, the same for every call."""
    torch.manual_seed(1234)
    model = _makers[architecture]().to(device=device, dtype=dtype).eval()
    if model.config.get_text_config()._experts_implementation == "grouped_mm":
        # the default one reads group sizes on the host where the device has no kernel for the dtype
        model.set_experts_implementation("batched_mm")
    return model


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
