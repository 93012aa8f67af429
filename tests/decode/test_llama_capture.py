"""A whole Llama decode step captured by plain calls of the library, on streams of both kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model, make_prompt

import graphcore
from graphcore.decode import StaticKVCache
from graphcore.decode.transformers_compat import cache_keyword
from graphcore.driver import Driver

STEPS = 12


class Step:
    """Forwards ``token`` over a static cache and leaves the next one in its place."""

    def __init__(self, driver: Driver) -> None:
        self.model = make_model("llama", device=device_of(driver))
        self.prompt = make_prompt(6, device=device_of(driver))
        config = self.model.config
        self.cache = StaticKVCache(
            num_layers=config.num_hidden_layers,
            batch_size=1,
            num_kv_heads=config.num_key_value_heads,
            max_seq_len=64,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=device_of(driver),
        )
        self.keyword = {cache_keyword(self.model): self.cache}
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device_of(driver))

    def __call__(self) -> None:
        with torch.no_grad():
            logits = self.model(self.token, **self.keyword).logits
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def begin(self) -> None:
        """Forwards the prompt into an empty cache."""
        self.cache.reset()
        with torch.no_grad():
            logits = self.model(self.prompt, **self.keyword).logits
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("on_legacy_work", ["error", "ignore"])
def test_a_llama_step_replays_the_eager_tokens(
    graphcore_driver: Driver, mode: Any, on_legacy_work: Any
) -> None:
    driver = graphcore_driver
    step = Step(driver)
    step.begin()
    eager = []
    for _ in range(STEPS):
        eager.append(int(step.token))
        step()
    assert len(set(eager)) > 3

    step.begin()
    capturing = graphcore.capture(driver=driver, mode=mode, on_legacy_work=on_legacy_work)
    capturing.warm_up(step, 2)
    step.begin()
    driver.synchronize()
    position = int(step.cache.position)
    with capturing:
        capturing.keep([step.model, step.token, *step.cache.named_tensors().values()], "step")
        step()
    # capturing has run nothing
    driver.synchronize()
    assert int(step.cache.position) == position
    assert capturing.stream.is_blocking is (on_legacy_work == "error")
    assert len(capturing.graph.snapshot().nodes) > 50
    replayed = []
    with capturing.graph.instantiate(guard="owners") as executable:
        for _ in range(STEPS):
            replayed.append(int(step.token))
            executable.launch(capturing.stream)
            driver.synchronize()
    assert replayed == eager


def test_a_frozen_position_gives_other_tokens(graphcore_driver: Driver) -> None:
    """The control: a step whose position does not move is not the eager one."""
    driver = graphcore_driver
    step = Step(driver)
    step.begin()
    eager = []
    for _ in range(STEPS):
        eager.append(int(step.token))
        step()
    step.begin()
    graph = graphcore.capture_function(step, driver=driver)
    step.begin()
    driver.synchronize()
    start = step.cache.position.clone()
    replayed = []
    with graph.instantiate() as executable:
        for _ in range(STEPS):
            replayed.append(int(step.token))
            executable.launch()
            driver.synchronize()
            step.cache.position.copy_(start)
    assert replayed != eager
