"""The work of suite moe: requests, each a prompt and its tokens, over static tensors.

Every way of running them has the same two steps. Whoever computes something else is found by the
logits of every step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import StaticCache

from graphcore.bench.harness import Arm
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver

Look = Callable[[], object]
"""Called behind every step."""


def not_looking() -> None:
    """Nobody asked."""


class Conversation:
    """Static tensors of requests at batch 1, and the two steps over them.

    Args:
        model: Of transformers; its experts are whatever stands there when a step runs.
        prompts: int64 ``[requests, length]``.
        tokens: New ones of a request.
        capacity: Of the cache.
    """

    def __init__(self, model: Any, prompts: torch.Tensor, tokens: int, capacity: int) -> None:
        self.tokens, self.length = tokens, prompts.shape[1]
        self._model, self._prompts = model, prompts
        self._cache = StaticCache(config=model.config, max_cache_len=capacity)
        self._keyword = str(compat.cache_keyword(model))
        self._places = torch.arange(capacity, device=prompts.device)
        self._length = prompts.new_zeros(())
        self.prompt = prompts[:1].clone()
        self.token = prompts.new_zeros(1, 1)
        self.outputs = [prompts.new_zeros(1, 1) for _ in range(2)]
        self.out = self.outputs[0]
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self.logits = torch.zeros(1, vocabulary, dtype=model.dtype, device=prompts.device)
        self.read_prompt()  # the cache gets its tensors
        layers: Any = self._cache.layers
        self._lengths = [layer.cumulative_length for layer in layers]

    def begin(self, request: int) -> None:
        """An empty cache, and the prompt of a request in its place."""
        for length in (*self._lengths, self._length):
            length.zero_()
        at = request % len(self._prompts)
        self.prompt.copy_(self._prompts[at : at + 1])

    def read_prompt(self) -> None:
        """The step of the prompt: leaves the first new token."""
        self._forward(self.prompt)

    def decode(self) -> None:
        """One token, which is also written where the request wants it."""
        self._forward(self.token)
        self.out.copy_(self.token)

    def _forward(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            # told which keys each token sees, transformers does the same in a capture as without:
            # of a prompt without a mask it would otherwise leave the rest of the cache out
            ends = self._length + self._places[: ids.shape[1], None]
            options = {
                self._keyword: self._cache,
                "attention_mask": (self._places <= ends)[None, None],
            }
            found = self._model(ids, logits_to_keep=1, **options)
            self._length.add_(ids.shape[1])
            self.logits.copy_(found.logits[:, -1])
            self.token.copy_(self.logits.argmax(dim=-1, keepdim=True))


class Way(Protocol):
    """How requests are run."""

    name: str

    def request(self, number: int, look: Look = not_looking) -> None:
        """Runs a request whole; returns when its work is on the stream."""


def requests_arm(way: Way, tokens: int, driver: Driver, *, share: int = 1) -> Arm:
    """Seconds of a token, those of its request's prompt among them.

    Args:
        way: Runs the requests.
        tokens: Of a request.
        driver: Whose device is waited for.
        share: Only every so many of the requests asked for are run: for ways that are slow.
    """
    numbers = itertools.count()

    def burst(calls: int) -> float:
        requests = max(1, round(calls / (tokens * share)))
        driver.synchronize()
        start = time.perf_counter()
        for _ in range(requests):
            way.request(next(numbers))
        driver.synchronize()
        return (time.perf_counter() - start) * calls / (requests * tokens)

    return Arm(way.name, burst)


def logits_of(way: Way, talk: Conversation, requests: Sequence[int], driver: Driver) -> Any:
    """``[requests, 1 + tokens, vocabulary]``: of every step, and none of an earlier one's."""
    found: list[torch.Tensor] = []

    def look() -> None:
        driver.synchronize()
        found.append(talk.logits[0].clone())
        talk.logits.fill_(float("nan"))
        driver.synchronize()

    for number in requests:
        way.request(number, look)
    return torch.stack(found).view(len(requests), 1 + talk.tokens, -1)
