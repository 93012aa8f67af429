"""A model that changed after its step was captured: the next prompt sees it, no token is stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.decode_models import VOCABULARY, device_of, eager_tokens, make_model, make_prompt

from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

NEW = 7


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


class _Adapter(torch.nn.Module):
    """A layer with a part that is switched on and off, as adapters are."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.layer, self.extra = layer, torch.nn.Linear(layer.in_features, layer.out_features)
        self.extra.to(layer.weight)
        self.active: dict[str, list[float]] = {"first": [0.0]}

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        (share,) = self.active["first"]
        base: torch.Tensor = self.layer(states)
        return base + share * self.extra(states)


def _switch_adapter(model: Any) -> None:
    model.lm_head.active["first"][0] = 3.0


def _scale_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 7


def _exchange_activations(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()


def _hook_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, arguments, output: output * -0.5)


def _hook_the_head(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, arguments: arguments[0].flip(-1))


def _patch_forward(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda states: forward(states.flip(-1))


CHANGES: dict[str, Callable[[Any], object]] = {
    "weights exchanged behind their tensors": _exchange_data,
    "another module": _exchange_head,
    "cast to another dtype": lambda model: model.to(torch.float64),
    "another vocabulary": _extend_vocabulary,
    "layers exchanged for each other": _exchange_layers,
    "an adapter switched on": _switch_adapter,
    "another scale": _scale_attention,
    "other activations": _exchange_activations,
    "a hook behind a layer": _hook_a_layer,
    "a hook before the head": _hook_the_head,
    "another forward": _patch_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_prompt_captures_a_changed_model_again(
    runner: CUDAGraphAR, prompt: torch.Tensor, change: str
) -> None:
    if change == "an adapter switched on":
        runner.model.lm_head = _Adapter(runner.model.lm_head)
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


def _lets_modules_take_notes(model: Any) -> None:
    """Modules write down what went through them, in steps and in prompts only."""

    def note(module: Any, arguments: Any, output: torch.Tensor) -> None:
        module.newest, module.calls = output, getattr(module, "calls", 0) + 1
        if output.shape[1] > 1:
            module.prompts = getattr(module, "prompts", 0) + 1
            module.longest = [output.shape[1], *getattr(module, "longest", [])]

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(note)


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 2, "capture_prefill": True}])
def test_what_forwards_write_down_themselves_needs_no_other_capture(
    graphcore_driver: Driver, how: dict[str, Any]
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    _lets_modules_take_notes(model)
    with CUDAGraphAR(model, max_seq_len=24, driver=graphcore_driver, **how) as runner:
        for length in (5, 4, 7):
            prompt = make_prompt(length, device=str(runner.cache.device))
            got = runner.generate(prompt, NEW)
            made, counted = runner.captures, model.model.layers[0].mlp.calls
            assert torch.equal(got, eager_tokens(model, prompt, NEW))
            assert model.model.layers[0].mlp.calls > counted  # control: it counts
            assert made == 1 + len(how) // 2
        _scale_attention(model)  # what is no such note is compared still
        assert torch.equal(runner.generate(prompt, NEW), eager_tokens(model, prompt, NEW))
        assert runner.captures == 2 * made


def test_a_captured_piece_of_a_prompt_is_captured_again_with_another_setting(
    graphcore_driver: Driver,
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    how: dict[str, Any] = {"prefill_chunk_size": 4, "capture_prefill": True}
    with CUDAGraphAR(model, max_seq_len=24, driver=graphcore_driver, **how) as runner:
        prompt = make_prompt(8, device=str(runner.cache.device))
        before = runner.generate(prompt, 2)
        _hook_a_layer(model)
        expected = eager_tokens(model, prompt, 2)
        assert torch.equal(runner.generate(prompt, 2), expected)
        assert not torch.equal(expected, before)  # control: the change shows
        assert runner.captures == 4


def test_what_is_captured_again_is_logged_with_the_setting_that_changed(
    runner: CUDAGraphAR, prompt: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    runner.generate(prompt, 2)
    runner.model.model.layers[2].self_attn.scaling = 0.75
    with caplog.at_level("INFO", logger="graphcore"):
        runner.generate(prompt, 2)
    assert "again: model.model.layers.2.self_attn.scaling: expected 0.25, got 0.75" in caplog.text


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
