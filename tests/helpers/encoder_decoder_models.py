"""Small random encoder-decoder models, their inputs, and what transformers' own decoding gives."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationMixin,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 97
LAYERS = 2
START = 2
FRAMES = 12
"""Encoder tokens of the Whisper model."""

_ids = {
    "bos_token_id": 1,
    "decoder_start_token_id": START,
    "eos_token_id": None,
    "pad_token_id": 0,
    "vocab_size": VOCABULARY,
}
_bart_sizes = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    # wide enough that random models do not repeat one token
    "init_std": 0.3,
}


def make_t5(layers: int = LAYERS) -> Any:
    """A random T5 on the host, of ``layers`` layers in its encoder and in its decoder."""
    config = T5Config(
        d_model=32,
        d_kv=12,
        d_ff=48,
        num_layers=layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        tie_word_embeddings=False,
        **_ids,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        # so that positions and the encoder decide, not the last token alone
        model.shared.weight.mul_(0.3)
        model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(20.0)
        for block in model.decoder.block:
            block.layer[0].SelfAttention.o.weight.mul_(5.0)
            block.layer[1].EncDecAttention.o.weight.mul_(5.0)
    return model


def _narrow_cross() -> Any:
    """A T5 whose cross attention has other heads, of another width, than its self attention."""
    model = make_t5()
    for block in model.decoder.block:
        cross = block.layer[1].EncDecAttention
        cross.n_heads, cross.key_value_proj_dim, cross.inner_dim = 2, 10, 20
        for name in ("q", "k", "v"):
            setattr(cross, name, torch.nn.Linear(32, 20, bias=False))
        cross.o = torch.nn.Linear(20, 32, bias=False)
    return model


_makers: dict[str, Any] = {
    "t5": make_t5,
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(max_position_embeddings=64, forced_eos_token_id=None, **_bart_sizes, **_ids)
    ),
    "whisper": lambda: WhisperForConditionalGeneration(
        WhisperConfig(
            max_source_positions=FRAMES,
            max_target_positions=64,
            num_mel_bins=8,
            begin_suppress_tokens=None,
            **_bart_sizes,
            **_ids,
        )
    ),
    "narrow-cross": _narrow_cross,
}

FAMILIES = tuple(_makers)
TEXT_FAMILIES = ("t5", "bart", "narrow-cross")


def make_encoder_decoder(
    family: str = "t5", *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A random model in evaluation mode, the same for every call."""
    torch.manual_seed(1234)
    return _makers[family]().to(device=device, dtype=dtype).eval()


def encoder_inputs(
    family: str,
    tokens: int = 7,
    *,
    batch: int = 1,
    padded: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """What the encoder takes, by name; the last row ends in ``padded`` tokens that do not count."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        features = torch.randn(batch, 8, 2 * FRAMES, generator=generator)
        return {"input_features": features.to(device)}
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[-1, -padded:] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def eager_ids(model: Any, inputs: dict[str, Any], new_tokens: int, **options: Any) -> torch.Tensor:
    """The decoder's ids of transformers' own greedy ``generate``."""
    # Whisper's class has a generate of its own, which searches for languages and time stamps
    ids: torch.Tensor = GenerationMixin.generate(
        model, **inputs, max_new_tokens=new_tokens, do_sample=False, **options
    )
    return ids


def eager_logits(model: Any, inputs: dict[str, Any], decoder_ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[batch, tokens, vocabulary]`` of all decoder tokens in one forward, no cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(
            **inputs, decoder_input_ids=decoder_ids, use_cache=False
        ).logits
    return logits
