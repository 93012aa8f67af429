"""Layers of Qwen3-MoE's own shape on a device, small ones without: graphs and none, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.moe_models import device_of
from helpers.moe_shaped import make_prompt, make_shaped

from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.errors import CaptureError, ConfigurationError
from graphcore.moe import SlotExperts, accelerate


def interleaved(model: Any, driver: Driver, *, capture: bool) -> list[torch.Tensor]:
    """Logits of two generations in turns, with prompts of one beside steps of the other."""
    found = []
    with (
        CUDAGraphAR(model, max_seq_len=128, driver=driver, capture=capture) as one,
        CUDAGraphAR(model, max_seq_len=128, driver=driver, capture=capture) as two,
    ):
        one.capture(make_prompt(driver, 17, seed=0))
        for turn in range(3):
            two.cache.reset()
            two.capture(make_prompt(driver, 5 + 30 * turn, seed=turn))
            for _ in range(4):
                for runner in (one, two):
                    runner.replay()
                    found.append(runner.logits.clone())
        if capture:
            assert one.captures == two.captures == 1
    return found


def test_decode_and_prompts_in_turns_are_bit_equal_with_graphs_and_without(
    graphcore_driver: Driver,
) -> None:
    """With a quarter of the experts resident and with all."""
    model = make_shaped(graphcore_driver)
    experts = model.config.num_experts
    found = {}
    for slots in (experts // 4, experts):
        with accelerate(model, slots, driver=graphcore_driver) as handle:
            for capture in (False, True):
                found[slots, capture] = interleaved(model, graphcore_driver, capture=capture)
            assert handle.faults() == {}
            misses = sum(each.misses for each in handle.totals().values())
            assert (misses > 2 * experts) == (slots < experts)
    wanted = found[experts, False]
    assert not any(torch.isnan(each).any() for each in wanted)
    for each in found.values():
        assert all(torch.equal(one, other) for one, other in zip(each, wanted, strict=True))


def test_layers_of_this_shape_give_what_transformers_give(graphcore_driver: Driver) -> None:
    """Each layer on the same rows; bfloat16 rounds at inner, at each product and at the sum."""
    model = make_shaped(graphcore_driver)
    hidden = model.config.hidden_size
    draw = torch.Generator().manual_seed(3)
    for rows in (1, 4, 65):
        x = torch.randn(1, rows, hidden, generator=draw).to(torch.bfloat16)
        x = x.to(device_of(graphcore_driver))
        blocks = [layer.mlp for layer in model.model.layers]
        with torch.no_grad():
            wanted = [block(x).float() for block in blocks]
            with accelerate(model, model.config.num_experts // 4, driver=graphcore_driver):
                found = [block(x).float() for block in blocks]
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() < 2e-2 * other.abs().max()


@pytest.mark.gpu
def test_a_model_on_the_host_runs_on_a_device_that_its_experts_never_fill(
    graphcore_driver: Driver,
) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("needs a device beside the host")
    device = device_of(graphcore_driver)
    model = make_shaped(graphcore_driver)
    prompt = make_prompt(graphcore_driver, 9, seed=2)
    with accelerate(model, 32, driver=graphcore_driver), torch.no_grad():
        wanted = model(prompt).logits
    model.to("cpu")
    kept = {name: each.clone() for name, each in model.state_dict().items()}
    with accelerate(model, 32, device=device) as handle, torch.no_grad():
        assert str(model.device) == device
        assert torch.equal(model(prompt).logits, wanted)
        assert handle.pool.nbytes < sum(each.nbytes for each in kept.values()) / 2
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert all(torch.equal(each, kept[name]) for name, each in model.state_dict().items())


@pytest.mark.gpu
def test_torchs_own_graph_captures_a_layer_on_its_own_stream(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("torch captures on a device only")
    model = make_shaped(graphcore_driver)
    experts: Any
    with accelerate(model, 32, driver=graphcore_driver), torch.no_grad():
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts, SlotExperts)
        device = device_of(graphcore_driver)
        x = torch.randn(2, 2048, device=device, dtype=torch.bfloat16)
        ids = torch.arange(16, device=device).view(2, 8)
        weights = torch.full((2, 8), 0.125, device=device)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            experts(x, ids, weights)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, ids, weights)
            with pytest.raises(CaptureError, match="accelerate: not while"):
                accelerate(model, 32)
        for shift in (0, 16, 100):
            ids.add_(shift).remainder_(128)
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, experts(x, ids, weights))


@pytest.mark.gpu
def test_work_on_a_side_stream_is_ordered_with_its_own_products(graphcore_driver: Driver) -> None:
    """Rows that a side stream still makes are read behind that, there."""
    if graphcore_driver.is_emulated:
        pytest.skip("needs streams that run beside each other")
    model = make_shaped(graphcore_driver)
    device = device_of(graphcore_driver)
    with accelerate(model, 32, driver=graphcore_driver), torch.no_grad():
        experts = model.model.layers[1].mlp.experts
        ids = torch.arange(8, device=device).view(1, 8)
        weights = torch.full((1, 8), 0.125, device=device)
        source = torch.randn(1, 2048, device=device, dtype=torch.bfloat16)
        wanted = experts(source, ids, weights)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.zeros_like(source)
            torch.cuda._sleep(20_000_000)
            x.copy_(source)
            out = experts(x, ids, weights)
        side.synchronize()
        assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_cast_model_is_refused_by_its_rows(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("the tiny shape is tested without a device in test_slot_experts")
    model = make_shaped(graphcore_driver)
    with accelerate(model, 32, driver=graphcore_driver), torch.no_grad():
        model.half()
        with pytest.raises(ConfigurationError, match=r"hidden_states\.dtype: expected bfloat16"):
            model(make_prompt(graphcore_driver, 3, seed=1))
        model.bfloat16()
