"""Ways of running the requests of suite moe: by the host, by graphs, by GraphReuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphcore.bench.suites.moe_conversation import Conversation, Look, not_looking
from graphcore.driver import Driver, Stream
from graphcore.errors import CaptureError
from graphcore.executable import GraphExec, capture
from graphcore.interop.streams import use_stream
from graphcore.moe import AcceleratedModel, CallableStep, GraphReuse, StepResult


@dataclass
class DirectWay:
    """The host calls both steps, of the model as it is."""

    name: str
    talk: Conversation
    driver: Driver
    stream: Stream

    def request(self, number: int, look: Look = not_looking) -> None:
        with use_stream(self.driver, self.stream):
            self.talk.begin(number)
            self.talk.read_prompt()
            look()
            for _ in range(self.talk.tokens):
                self.talk.decode()
                look()


class Steps:
    """Both steps of a conversation over a model's slots, as GraphReuse takes them.

    Args:
        talk: Whose steps.
        handle: Of its model.
    """

    def __init__(self, talk: Conversation, handle: AcceleratedModel) -> None:
        self._talk, self._handle = talk, handle
        self.prompt = self._step("prompt", talk.read_prompt, "prompt", talk.prompt, talk.length)
        self.token = self._step("token", talk.decode, "out", talk.out, 1)

    @property
    def fits_prompts(self) -> bool:
        """Whether slots serve the experts of every prompt."""
        return all(use.admission is not None for use in self.prompt.groups)

    def _step(
        self, name: str, function: Callable[[], None], own: str, tensor: torch.Tensor, rows: int
    ) -> CallableStep:
        tensors = {"token": self._talk.token, "logits": self._talk.logits, own: tensor}
        return self._handle.step(name, function, tensors=tensors, rows=rows)


class GraphWay:
    """Graphs of the steps, launched without a question asked: what nothing can beat.

    Args:
        talk: What is run.
        has_prompt_graph: Whether prompts are a graph too; else the host calls them.
        driver: Where.
        stream: A blocking stream of ours.

    Attributes:
        obstacle: Why there is no graph of prompts though there should be; "" otherwise.
    """

    name = "graphs alone"

    def __init__(
        self, talk: Conversation, has_prompt_graph: bool, driver: Driver, stream: Stream
    ) -> None:
        self._talk, self._driver, self._stream = talk, driver, stream
        self._decode = self._captured(talk.decode)
        self._prompt: GraphExec | None = None
        self.obstacle = ""
        if has_prompt_graph:
            try:
                self._prompt = self._captured(talk.read_prompt)
            except CaptureError as error:
                self.obstacle = str(error).partition("\n")[0]

    def request(self, number: int, look: Look = not_looking) -> None:
        with use_stream(self._driver, self._stream):
            self._talk.begin(number)
            if self._prompt is None:
                self._talk.read_prompt()
            else:
                self._prompt.launch(self._stream)
            look()
            for _ in range(self._talk.tokens):
                self._decode.launch(self._stream)
                look()

    def close(self) -> None:
        """Gives its graphs up."""
        for each in (self._decode, self._prompt):
            if each is not None:
                each.close()

    def _captured(self, step: Callable[[], None]) -> GraphExec:
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
        handle: Of its model.
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
        handle: AcceleratedModel,
        stream: Stream,
        options: Mapping[str, Any],
        obstacle: str = "",
    ) -> None:
        self.name = name
        self._talk, self._stream, self._driver = talk, stream, handle.driver
        self.reuse: GraphReuse = handle.reuse(**options)
        self._steps = Steps(talk, handle)
        self._steps.prompt.obstacle = obstacle
        self._outputs = itertools.cycle([each for each in talk.outputs for _ in range(2)])
        self._written = talk.out
        self.boundaries: list[StepResult] = []

    def request(self, number: int, look: Look = not_looking) -> None:
        talk, run, stream, steps = self._talk, self.reuse.run, self._stream, self._steps
        with use_stream(self._driver, stream):
            talk.begin(number)
        run(steps.prompt, stream=stream, prompt_rows=talk.length)
        look()
        talk.out = next(self._outputs)
        if talk.out is not self._written:
            self._written = talk.out
            steps.token.set("out", talk.out)
        self.boundaries.append(run(steps.token, stream=stream))
        look()
        for _ in range(talk.tokens - 1):
            run(steps.token, stream=stream)
            look()

    def close(self) -> None:
        """Gives its graphs up."""
        self.reuse.close()
