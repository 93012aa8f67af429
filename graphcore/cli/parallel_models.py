"""Models of random weights for ``graphcore demo --parallel``: the same on all, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_VOCABULARY = 512
_LENGTH = 12


def random_llama(layers: int = 4, *, hidden: int = 256, heads: int = 8) -> Any:
    """A Llama in evaluation mode, float32 on the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        head_dim=hidden // heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=2 * hidden,
        max_position_embeddings=2048,
        initializer_range=0.1,
        eos_token_id=None,
    )
    return _seeded(LlamaForCausalLM, config)


def random_mixture(layers: int = 2, *, hidden: int = 64, experts: int = 16) -> Any:
    """A Qwen3-MoE in evaluation mode, float32 on the host."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        head_dim=16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=hidden // 2,
        intermediate_size=hidden,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=None,
    )
    model = _seeded(Qwen3MoeForCausalLM, config)
    model.set_experts_implementation("batched_mm")  # the others read the routing on the host
    return model


def saved(model: Any, folder: str | Path) -> Path:
    """``model`` as ``from_pretrained`` takes it, in ``folder``.

    Every rank saves its own; the model's ``save_pretrained`` writes on rank 0 alone.
    """
    from safetensors.torch import save_file

    path = Path(folder) / "model"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
    return path


def random_prompt(seed: int, device: Any) -> Any:
    """int64 ``[1, tokens]``, of the same length for every seed."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, _VOCABULARY, (1, _LENGTH), generator=draw).to(device)


def _seeded(kind: Any, config: Any) -> Any:
    import torch

    torch.manual_seed(4321)
    return kind(config).eval()
