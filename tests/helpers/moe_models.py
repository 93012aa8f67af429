"""Small random mixtures of experts, what float64 makes of a sparse block, and calls of a driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from graphcore.driver import Driver

VOCABULARY, EXPERTS, TOP_K, HIDDEN, INNER = 97, 8, 2, 64, 32

_sizes = {
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,  # wide enough that random models do not repeat one token
    "num_experts_per_tok": TOP_K,
}
_inner = {"moe_intermediate_size": INNER, "intermediate_size": 48}
_deepseek = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}
_makers: dict[str, Any] = {
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            num_local_experts=EXPERTS, intermediate_size=INNER, sliding_window=None, **_sizes
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_experts=EXPERTS, head_dim=16, norm_topk_prob=True, **_inner, **_sizes)
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            num_experts=EXPERTS, shared_expert_intermediate_size=48, **_inner, **_sizes
        )
    ),
    # the routing of DeepSeek-V3 (sigmoid, bias, groups, scaling, shared experts) with K and V
    "dots1": lambda: Dots1ForCausalLM(Dots1Config(**_deepseek, **_inner, **_sizes)),
    "glm4-moe": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(head_dim=16, **_deepseek, **_inner, **_sizes)
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            **_deepseek,
            **_inner,
            **_sizes | {"num_key_value_heads": 4},
        )
    ),
}  # fmt: skip
FAMILIES = tuple(_makers)
DECODED = tuple(name for name in FAMILIES if name != "deepseek-v3")
"""Those that a static cache of K and V serves."""


def causal_mask(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Which rows each one sees, [1, 1, rows, rows], to be added to scores.

    Given to transformers where bits are compared: of itself it makes none in an eager forward and
    one in a capture, where attention then takes another kernel, and the last bits differ.
    """
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=like.device).triu(1)
    none = torch.zeros(1, 1, rows, rows, dtype=like.dtype, device=like.device)
    return none.masked_fill(hidden, torch.finfo(like.dtype).min)


def device_of(driver: Driver) -> str:
    """Where models of a test on ``driver`` live."""
    return "cpu" if driver.is_emulated else f"cuda:{driver.device}"


def make_moe(
    family: str = "qwen3-moe", *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A random model in evaluation mode, the same for every call."""
    torch.manual_seed(4321)
    model = _makers[family]().to(device=device, dtype=dtype).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero would hide whether it is added
            buffer.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    # eager ones read the routing on the host, grouped ones may on some devices
    model.set_experts_implementation("batched_mm")
    return model


def blocks_of(model: Any) -> list[Any]:
    """The sparse blocks, in order."""
    return [module for module in model.modules() if hasattr(module, "experts")]


def make_rows(
    count: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Random rows [count, HIDDEN]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=draw).to(device=device, dtype=dtype)


def exact_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sums of SwiGLU experts in float64, of weights [E, 2I, H] and [E, H, I]."""
    gate_up, down, x, weights = (
        each.detach().double().cpu() for each in (gate_up, down, x, weights)
    )
    ids = ids.cpu()
    pair = torch.einsum("rkih,rh->rki", gate_up[ids], x)
    gate, up = pair.chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    return (torch.einsum("rkhi,rki->rkh", down[ids], inner) * weights[..., None]).sum(1)


@contextmanager
def counted_calls(driver: Driver) -> Iterator[Counter[str]]:
    """How often each call of ``driver`` is made in the block."""
    counts: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return counted

    names = sorted(Driver.__abstractmethods__)
    for name in names:
        setattr(driver, name, counting(name, getattr(driver, name)))
    try:
        yield counts
    finally:
        for name in names:
            delattr(driver, name)
