"""A model that changed after its step was captured: the next prompt sees it, no token is stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import VOCABULARY, device_of, eager_tokens, make_model, make_prompt

from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

NEW = 7


@pytest.fixture
def runner(graphcore_driver: Driver) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver) as made:
        yield made


@pytest.fixture
def prompt(runner: CUDAGraphAR) -> torch.Tensor:
    return make_prompt(5, device=str(runner.cache.device))


def _exchange_data(model: Any) -> None:
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.2).to(parameter)


def _exchange_head(model: Any) -> None:
    torch.manual_seed(8)
    old = model.lm_head.weight
    model.lm_head = torch.nn.Linear(old.shape[1], old.shape[0], bias=False).to(old)


def _extend_vocabulary(model: Any) -> None:
    torch.manual_seed(9)
    model.resize_token_embeddings(VOCABULARY + 30, mean_resizing=False)
    # drawn on the host, the same on every device, and wide enough to be chosen
    head = model.lm_head.weight.data
    head[VOCABULARY:] = (torch.randn(30, head.shape[1]) * 2).to(head)


def _exchange_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


CHANGES: dict[str, Callable[[Any], object]] = {
    "weights exchanged behind their tensors": _exchange_data,
    "another module": _exchange_head,
    "cast to another dtype": lambda model: model.to(torch.float64),
    "another vocabulary": _extend_vocabulary,
    "layers exchanged for each other": _exchange_layers,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_prompt_captures_a_changed_model_again(
    runner: CUDAGraphAR, prompt: torch.Tensor, change: str
) -> None:
    before = runner.generate(prompt, NEW)
    CHANGES[change](runner.model)
    expected = eager_tokens(runner.model, prompt, NEW)
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert runner.captures == 2
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert runner.captures == 2
    if change != "cast to another dtype":
        assert not torch.equal(expected, before)  # control: the change shows


def test_the_next_prompt_captures_a_model_again_from_which_a_weight_was_taken(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    head = runner.model.lm_head
    bias = torch.linspace(-4, 4, VOCABULARY, device=prompt.device)
    head.bias = torch.nn.Parameter(bias[torch.arange(VOCABULARY) * 31 % VOCABULARY])
    before = runner.generate(prompt, NEW)
    head.bias = None
    expected = eager_tokens(runner.model, prompt, NEW)
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert runner.captures == 2
    assert not torch.equal(expected, before)  # control: the change shows


def test_weights_written_in_place_need_no_other_capture(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    before = runner.generate(prompt, NEW)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    expected = eager_tokens(runner.model, prompt, NEW)
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert not torch.equal(expected, before)
    assert runner.captures == 1


def test_cache_memory_exchanged_behind_its_tensors_is_captured_again(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    runner.generate(make_prompt(5, device=str(prompt.device), seed=3), NEW)
    for layer in runner.cache.layers:
        layer.keys.data = torch.zeros_like(layer.keys)
    assert torch.equal(runner.generate(prompt, NEW), eager_tokens(runner.model, prompt, NEW))
    assert runner.captures == 2


def test_training_mode_entered_since_is_refused_before_a_prompt_is_forwarded(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    expected = runner.generate(prompt, NEW)
    for layer in runner.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    runner.model.train()
    for call in (runner.capture, lambda ids: runner.generate(ids, 2)):
        with pytest.raises(ConfigurationError, match="training mode with active dropout"):
            call(prompt)
    runner.model.eval()
    assert torch.equal(runner.generate(prompt, NEW), expected)
