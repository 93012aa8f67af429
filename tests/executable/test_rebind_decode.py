"""Two KV caches share one executable of a captured decode step: each gives its own eager tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import ARCHITECTURES, device_of, make_model, make_prompt

import graphcore
from graphcore import Graph, GraphExec
from graphcore.decode import StaticKVCache
from graphcore.decode.transformers_compat import cache_keyword
from graphcore.driver import Driver, Stream
from graphcore.executable import RebindRoute

STEPS = 8


class Request:
    """A prompt with a cache and a token buffer of its own."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        self.model = model
        self.prompt = prompt
        self.cache = StaticKVCache.for_model(model, 32)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=prompt.device)

    def named(self) -> dict[str, torch.Tensor]:
        return {**self.cache.named_tensors(), "token": self.token}

    def step(self) -> None:
        """Forwards the token and leaves the next one in its place."""
        with torch.no_grad():
            keyword = {cache_keyword(self.model): self.cache}
            logits = self.model(self.token, **keyword).logits
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def begin(self) -> None:
        """Forwards the prompt into the empty cache."""
        self.cache.reset()
        with torch.no_grad():
            logits = self.model(self.prompt, **{cache_keyword(self.model): self.cache}).logits
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def eager(self) -> list[int]:
        self.begin()
        tokens = []
        for _ in range(STEPS):
            tokens.append(int(self.token))
            self.step()
        return tokens


def capture_step(driver: Driver, request: Request) -> tuple[Graph, Stream]:
    capturing = graphcore.capture(driver=driver)
    request.begin()
    capturing.warm_up(request.step, 2)
    with capturing:
        for name, tensor in request.named().items():
            capturing.keep(tensor, name)
        capturing.keep(request.model, "model")
        request.step()
    return capturing.graph, capturing.stream


def replay(executable: GraphExec, stream: Stream, request: Request, steps: int) -> list[int]:
    tokens = []
    for _ in range(steps):
        executable.driver.synchronize()
        tokens.append(int(request.token))
        executable.launch(stream)
        executable.driver.synchronize()
    return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_caches_share_one_executable_of_a_decode_step(
    graphcore_driver: Driver, architecture: str
) -> None:
    driver = graphcore_driver
    device = device_of(driver)
    model = make_model(architecture, device=device)
    first, second = (Request(model, make_prompt(5 + n, device=device, seed=n)) for n in (1, 2))
    expected = [first.eager(), second.eager()]
    assert expected[0] != expected[1]

    graph, stream = capture_step(driver, first)
    with graph.instantiate(guard="owners") as executable:
        first.begin()
        second.begin()
        assert replay(executable, stream, first, STEPS) == expected[0]
        kept = [tensor.clone() for tensor in first.named().values()]
        outcome = executable.rebind(second.named())
        assert set(outcome.words) == set(second.named())
        assert replay(executable, stream, second, STEPS) == expected[1]
        # the first one's memory was not touched
        for before, now in zip(kept, first.named().values(), strict=True):
            assert torch.equal(before, now)
        assert executable.check() == []


def test_requests_take_turns_token_by_token(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    device = device_of(driver)
    model = make_model(device=device)
    first, second = (Request(model, make_prompt(6, device=device, seed=n)) for n in (3, 4))
    expected = [first.eager(), second.eager()]
    graph, stream = capture_step(driver, first)
    first.begin()
    second.begin()
    tokens: tuple[list[int], list[int]] = ([], [])
    with graph.instantiate() as executable:
        routes = set()
        for turn in range(STEPS):
            if turn:
                routes.add(executable.rebind(first.named()).route)
            tokens[0].extend(replay(executable, stream, first, 1))
            routes.add(executable.rebind(second.named()).route)
            tokens[1].extend(replay(executable, stream, second, 1))
    assert list(tokens) == expected
    assert RebindRoute.REINSTANTIATED not in routes


def test_without_the_exchange_the_second_request_gets_nothing(graphcore_driver: Driver) -> None:
    """The control: the executable works on what it was captured with until it is told otherwise."""
    driver = graphcore_driver
    device = device_of(driver)
    model = make_model(device=device)
    first, second = (Request(model, make_prompt(6, device=device, seed=n)) for n in (3, 4))
    expected = second.eager()
    graph, stream = capture_step(driver, first)
    first.begin()
    second.begin()
    with graph.instantiate() as executable:
        assert replay(executable, stream, second, STEPS) != expected


def test_a_cache_of_another_length_does_not_fit(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    device = device_of(driver)
    model = make_model(device=device)
    first = Request(model, make_prompt(6, device=device))
    graph, _ = capture_step(driver, first)
    longer = StaticKVCache.for_model(model, 64)
    with (
        graph.instantiate() as executable,
        pytest.raises(graphcore.ConfigurationError, match="layer 0 keys: new: strides"),
    ):
        executable.rebind(longer.named_tensors())
