"""Which experts can lie in slots: found by looking, refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.moe_models import DECODED, EXPERTS, FAMILIES, HIDDEN, INNER, TOP_K, make_moe
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError
from graphcore.moe import accelerate
from graphcore.moe.layers.transformers_experts import find_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_layer_are_found(family: str) -> None:
    model = make_moe(family)
    found = find_experts(model)
    assert [each.name for each in found] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert [each.module for each in found] == [layer.mlp.experts for layer in model.model.layers]
    assert {(each.gate_up, each.layout, each.top_k) for each in found} == {("concat", "nk", TOP_K)}
    assert found[0].weights["gate_up"].shape == (EXPERTS, 2 * INNER, HIDDEN)


def test_layers_without_experts_are_passed_over() -> None:
    model = make_moe("qwen3-moe")
    model.model.layers[0].mlp = torch.nn.Identity()
    assert [each.name for each in find_experts(model)] == ["model.layers.1.mlp.experts"]


def test_transposed_and_interleaved_experts_say_how_they_lie() -> None:
    model = make_moe()
    experts = model.model.layers[0].mlp.experts
    experts.is_transposed, experts.is_concatenated = True, False
    assert [(each.layout, each.gate_up) for each in find_experts(model)] == [
        ("kn", "interleaved"),
        ("nk", "concat"),
    ]


def _experts(model: Any) -> Any:
    return model.model.layers[1].mlp.experts


def _parameter(experts: Any, change: Any) -> None:
    experts.down_proj = torch.nn.Parameter(change(experts.down_proj.detach()), requires_grad=False)


class _Other(torch.Tensor):
    pass


BAD: dict[str, tuple[Any, str]] = {
    "biases": (lambda e: setattr(e, "has_bias", True), "without biases"),
    "no gate": (lambda e: setattr(e, "has_gate", False), "with gate and up"),
    "a norm": (lambda e: setattr(e, "has_post_expert_norm", True), "without a norm"),
    "experts elsewhere": (lambda e: setattr(e, "_is_expert_parallel", True), "on one device"),
    "activation": (lambda e: setattr(e, "act_fn", torch.nn.GELU()), "act_fn: expected SiLU"),
    "a forward of its own": (lambda e: delattr(e, "is_transposed"), "say how they are laid out"),
    "a forward put in": (lambda e: setattr(e, "forward", lambda *a: a), "forward of its class"),
    "float64": (lambda e: _parameter(e, lambda w: w.double()), "down_proj: expected torch.bf"),
    "float8": (lambda e: _parameter(e, lambda w: w.to(torch.float8_e4m3fn)), "quantised"),
    "int8": (lambda e: _parameter(e, lambda w: w.to(torch.int8)), "quantised"),
    "two types": (lambda e: _parameter(e, lambda w: w.half()), "one element type"),
    "strides": (lambda e: _parameter(e, lambda w: w.transpose(0, 1).contiguous().transpose(0, 1)),
                "plain contiguous"),
    "a subclass": (lambda e: _parameter(e, lambda w: w.as_subclass(_Other)), "plain contiguous"),
    "meta": (lambda e: _parameter(e, lambda w: w.to("meta")), "expected cpu or cuda, got meta"),
    "scales": (lambda e: setattr(e, "down_proj_scale_inv", torch.nn.Parameter(torch.ones(8))),
               "got down_proj_scale_inv too"),
    "parametrised": (lambda e: torch.nn.utils.parametrize.register_parametrization(
        e, "down_proj", torch.nn.Identity()), "expected a parameter|plain contiguous|too"),
    "forward hook": (lambda e: e.register_forward_hook(lambda *a: None), "without hooks"),
    "pre hook": (lambda e: e.register_forward_pre_hook(lambda *a: None), "without hooks"),
    "backward hook": (lambda e: e.register_full_backward_hook(lambda *a: None), "without hooks"),
    "offloaded": (lambda e: setattr(e, "_hf_hook", object()), "hook of accelerate"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_experts_that_slots_cannot_hold_are_refused_by_name(what: str) -> None:
    model = make_moe()
    change, message = BAD[what]
    change(_experts(model))
    with pytest.raises(ConfigurationError, match=message) as raised:
        accelerate(model, 4)
    assert "model.layers.1.mlp.experts" in str(raised.value)
    assert type(model.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts", "nothing changed"


def test_a_gate_of_its_own_is_refused() -> None:
    model = GptOssForCausalLM(
        GptOssConfig(
            num_hidden_layers=1, hidden_size=64, intermediate_size=32, num_local_experts=4,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=97, layer_types=["full_attention"],
        )
    ).eval()  # fmt: skip
    with pytest.raises(ConfigurationError, match="experts"):
        find_experts(model)
    _experts_of_oss = model.model.layers[0].mlp.experts
    _experts_of_oss.has_bias = False
    with pytest.raises(ConfigurationError, match="with a gate of its own"):
        find_experts(model)


def test_a_list_of_experts_is_refused_by_its_name() -> None:
    model = make_moe()
    model.model.layers[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ConfigurationError, match=r"layers.1.mlp.experts: .* in another form"):
        find_experts(model)


def test_a_model_without_experts_is_refused() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=50,
                    intermediate_size=16)
    ).eval()  # fmt: skip
    with pytest.raises(ConfigurationError, match="expected a mixture of experts, got LlamaFor"):
        accelerate(model, 2)
    with pytest.raises(CacheTypeError, match="expected a torch module, got str"):
        accelerate("model", 2)


def test_tied_experts_are_refused_with_both_names() -> None:
    model = make_moe()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    with pytest.raises(ConfigurationError, match=r"layers.1.*weights of its own.*layers.0"):
        accelerate(model, 4)
    shared = make_moe()
    shared.model.layers[1].mlp.experts = shared.model.layers[0].mlp.experts
    with pytest.raises(ConfigurationError, match="tied"):
        accelerate(shared, 4)


def test_experts_in_slots_already_are_refused() -> None:
    model = make_moe(DECODED[0])
    with accelerate(model, 4), pytest.raises(LifecycleError, match=r"restore\(\) the other"):
        accelerate(model, 4)
    accelerate(model, 4).restore()
