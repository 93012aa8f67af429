"""A real decode step for suite update: a Llama of transformers with a static cache, captured twice.

Two models with a cache each, of one shape: an update from one to the other changes every node that
reads a weight, a key, a value or an activation.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from graphcore.bench.suites.update_steps import compare, whole_steps
from graphcore.driver import Driver, Stream
from graphcore.executable import Graph, capture

Note = Mapping[str, Any]

CAPACITY = 256

_PROMPT = 8
_SHAPE = {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
_SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97}  # fmt: skip


def decode_steps(driver: Driver, stream: Stream) -> list[Note]:
    """The notes on a decode step; one that says why where torch or transformers cannot do it."""
    try:
        return _notes(driver, stream)
    except Exception as error:  # another library's: it must not cost the run
        return [{"left out": "decode step", "reason": f"{type(error).__name__}: {error}"}]


def _notes(driver: Driver, stream: Stream) -> list[Note]:
    steps = [DecodeStep(driver, stream) for _ in range(2)]

    def begin() -> None:
        for step in steps:
            step.begin()

    layers = _sizes(driver)["num_hidden_layers"]
    shape = f"a decode step (Llama, layers={layers}, two models)"
    return compare(driver, shape, whole_steps([step.graph for step in steps], stream), begin)


def _sizes(driver: Driver) -> Mapping[str, int]:
    return _SMALL if driver.is_emulated else _SHAPE


class DecodeStep:
    """One token through a random model and its cache, which chooses the next one."""

    def __init__(self, driver: Driver, stream: Stream) -> None:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        decode = importlib.import_module("graphcore.decode")
        compat = importlib.import_module("graphcore.decode.transformers_compat")
        self._torch = torch
        device = "cpu" if driver.is_emulated else f"cuda:{driver.device}"
        config = transformers.LlamaConfig(**_sizes(driver))
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
        self._model = model.to(torch.float32 if driver.is_emulated else torch.bfloat16).eval()
        self._cache = decode.StaticKVCache.for_model(self._model, CAPACITY)
        self._keyword = {compat.cache_keyword(self._model): self._cache}
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._prompt = torch.ones(1, _PROMPT, dtype=torch.int64, device=device)
        self.graph: Graph = self._capture(driver, stream)

    def begin(self) -> None:
        """Empties the cache and forwards the prompt, so that the steps of a run fit."""
        self._cache.reset()
        self._forward(self._prompt)

    def _forward(self, tokens: Any) -> None:
        with self._torch.no_grad():
            logits = self._model(tokens, **self._keyword).logits
            self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def _capture(self, driver: Driver, stream: Stream) -> Graph:
        capturing = capture(stream, driver=driver)
        self.begin()
        capturing.warm_up(lambda: self._forward(self._token), 2)
        with capturing:
            capturing.keep(self._model, "model")
            self._forward(self._token)
        return capturing.graph
