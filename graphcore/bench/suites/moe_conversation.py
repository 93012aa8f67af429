"""The work of suite moe: requests, each a prompt and its tokens, over static tensors; and its ways.

A way runs requests by the same two functions: the host calls them, a graph launches them, or
GraphReuse decides. Whoever computes something else is found by the logits of every step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import StaticCache

from graphcore.bench.harness import Arm
from graphcore.bench.suites.moe_experts import SlottedModel
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver, Stream
from graphcore.errors import CaptureError
from graphcore.executable import GraphExec, capture
from graphcore.interop.streams import use_stream
from graphcore.moe import CallableStep, GraphReuse, StepResult

Look = Callable[[], object]
"""Called behind every step."""


def _not_looking() -> None:
    """Nobody asked."""


class Conversation:
    """Static tensors of requests at batch 1, and the two steps over them.

    Args:
        model: Of transformers; its experts are whatever is in their place when a step runs.
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

    def request(self, number: int, look: Look = _not_looking) -> None:
        """Runs a request whole; returns when its work is on the stream."""


@dataclass
class DirectWay:
    """The host calls both steps. ``experts``: what is put in the place of the model's own."""

    name: str
    talk: Conversation
    driver: Driver
    stream: Stream
    experts: Callable[[], AbstractContextManager[None]] = nullcontext

    def request(self, number: int, look: Look = _not_looking) -> None:
        with self.experts(), use_stream(self.driver, self.stream):
            self.talk.begin(number)
            self.talk.read_prompt()
            look()
            for _ in range(self.talk.tokens):
                self.talk.decode()
                look()


class GraphWay:
    """Graphs of the steps, launched without a question asked: what nothing can beat.

    Attributes:
        obstacle: Why there is no graph of prompts though slots serve them; "" where there is one.
    """

    name = "graphs alone"

    def __init__(
        self, talk: Conversation, slotted: SlottedModel, driver: Driver, stream: Stream
    ) -> None:
        self._talk, self._slotted, self._driver, self._stream = talk, slotted, driver, stream
        self._decode = self._captured(talk.decode)
        self._prompt: GraphExec | None = None
        self.obstacle = ""
        if slotted.fits(talk.length):
            try:
                self._prompt = self._captured(talk.read_prompt)
            except CaptureError as error:
                self.obstacle = str(error).partition("\n")[0]

    def request(self, number: int, look: Look = _not_looking) -> None:
        with use_stream(self._driver, self._stream):
            self._talk.begin(number)
            if self._prompt is None:
                with self._slotted.in_place():
                    self._talk.read_prompt()
            else:
                self._prompt.launch(self._stream)
            look()
            for _ in range(self._talk.tokens):
                self._decode.launch(self._stream)
                look()

    def _captured(self, step: Callable[[], None]) -> GraphExec:
        with self._slotted.in_place():
            with use_stream(self._driver, self._stream):
                self._talk.begin(0)
                self._talk.read_prompt()
                step()
            self._driver.synchronize()
            with capture(self._stream, driver=self._driver) as capturing:
                step()
        return capturing.graph.instantiate()


class ReuseWay:
    """GraphReuse decides. Every second request writes its tokens elsewhere than the one before.

    Args:
        name: Of the arm.
        talk: What is run.
        slotted: The experts.
        stream: A blocking stream of ours.
        options: Of GraphReuse.
        obstacle: Why prompts must not be captured; "" where they may.

    Attributes:
        boundaries: What became of the first token behind each prompt.
    """

    def __init__(
        self,
        name: str,
        talk: Conversation,
        slotted: SlottedModel,
        stream: Stream,
        options: Mapping[str, Any],
        obstacle: str = "",
    ) -> None:
        self.name = name
        self._talk, self._slotted, self._stream = talk, slotted, stream
        self._driver = driver = slotted.pool.driver
        self.reuse = GraphReuse(
            driver=driver, pool=slotted.pool, manifests=slotted.manifests, **options
        )
        tensors = {"token": talk.token, "logits": talk.logits}
        self._decode = CallableStep(
            "decode",
            talk.decode,
            tensors={**tensors, "out": talk.out},
            groups=slotted.uses(1),
            staged=self._staged(talk.decode),
            driver=driver,
        )
        self._prompt = CallableStep(
            "prompt",
            talk.read_prompt,
            tensors={"prompt": talk.prompt, **tensors},
            groups=slotted.uses(talk.length),
            staged=self._staged(talk.read_prompt),
            driver=driver,
        )
        self._prompt.obstacle = obstacle
        self._outputs = itertools.cycle([each for each in talk.outputs for _ in range(2)])
        self._written = talk.out
        self.boundaries: list[StepResult] = []

    def request(self, number: int, look: Look = _not_looking) -> None:
        talk, run, stream = self._talk, self.reuse.run, self._stream
        with self._slotted.in_place():
            with use_stream(self._driver, stream):
                talk.begin(number)
            run(self._prompt, stream=stream, prompt_rows=talk.length)
            look()
            talk.out = next(self._outputs)
            if talk.out is not self._written:
                self._written = talk.out
                self._decode.set("out", talk.out)
            self.boundaries.append(run(self._decode, stream=stream))
            look()
            for _ in range(talk.tokens - 1):
                run(self._decode, stream=stream)
                look()

    def close(self) -> None:
        """Gives its graphs up."""
        self.reuse.close()

    def _staged(self, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with self._slotted.staged():
                step()

        return run


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
