"""A whole sparse block over slots: the router's choice, the experts, what every row has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.moe_models import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    INNER,
    TOP_K,
    blocks_of,
    device_of,
    exact_experts,
    make_moe,
    make_rows,
)

import graphcore
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.moe import MoELayer, SlotPool
from graphcore.moe.slots.expert_memory import ExpertMemory


def pool_over(block: Any, driver: Driver, slots: int = 4) -> SlotPool:
    """A pool over a copy of the experts of ``block``, which keeps its own."""
    experts, memory = block.experts, ExpertMemory(driver)
    banks = {
        bank: memory.take(torch.nn.Parameter(weight.detach().clone()))
        for bank, weight in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj))
    }
    return SlotPool({"block": banks}, slots, driver=driver)


def within(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    return bool((one - other).abs().max() <= bound * other.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_of_transformers_over_slots_gives_what_it_gives(
    graphcore_driver: Driver, family: str
) -> None:
    """Softmax and sigmoid routers, biases, groups, scaling, shared and gated shared experts."""
    block = blocks_of(make_moe(family, device=device_of(graphcore_driver)))[1]
    layer = MoELayer.from_transformers(block, pool_over(block, graphcore_driver), "block")
    x = make_rows(6, device=device_of(graphcore_driver)).reshape(2, 3, HIDDEN)
    with torch.no_grad():
        found, wanted = layer(x), block(x)
    assert found.shape == x.shape
    assert within(found, wanted, 2e-6)


def test_the_router_is_the_blocks_own_to_the_last_bit() -> None:
    block = blocks_of(make_moe("dots1"))[0]
    pool = pool_over(block, graphcore.open_driver("emulated"))
    layer = MoELayer.from_transformers(block, pool, "block")
    x = make_rows(5)
    _, weights, ids = block.gate(x)
    found = layer.router(x)
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1], weights)
    block.gate.e_score_correction_bias += torch.arange(EXPERTS).float()
    assert not torch.equal(layer.router(x)[0], ids), "it is the block's, not a copy"


def test_a_layer_of_ones_own_routes_and_adds_by_the_functions_it_was_given(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    block = blocks_of(make_moe(device=device))[0]

    def router(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.topk(rows[:, :EXPERTS].abs(), TOP_K)
        return ids, weights.to(torch.bfloat16)

    layer = MoELayer(
        pool_over(block, graphcore_driver),
        "block",
        router=router,
        shared_experts=lambda hidden: hidden * 3,
    )
    x = make_rows(4, device=device)
    with torch.no_grad():
        found = layer(x)
    exact = exact_experts(block.experts.gate_up_proj, block.experts.down_proj, x, *router(x))
    assert within(found.double().cpu(), exact + 3 * x.double().cpu(), 2e-6)


def test_a_captured_layer_follows_its_input(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    block = blocks_of(make_moe("dots1", device=device))[0]
    layer = MoELayer.from_transformers(block, pool_over(block, graphcore_driver), "block")
    x = make_rows(2, device=device)
    with torch.no_grad():
        graph = graphcore.capture_function(layer, x, driver=graphcore_driver)
        with graph, graph.instantiate() as made:
            for seed in range(5):
                x.copy_(make_rows(2, device=device, seed=seed))
                graph.outputs.fill_(float("nan"))
                made.launch()
                graphcore_driver.synchronize()
                assert torch.equal(graph.outputs, layer(x))


def test_a_layer_adds_five_kernels_to_what_routes_and_shares(graphcore_driver: Driver) -> None:
    """Slots, copies of the missing, up, down, sum; nothing is copied or filled around them."""
    device = device_of(graphcore_driver)
    block = blocks_of(make_moe(device=device))[0]
    layer = MoELayer.from_transformers(block, pool_over(block, graphcore_driver), "block")
    x = make_rows(2, device=device)

    def nodes(step: Any) -> list[Any]:
        with torch.no_grad(), graphcore.capture_function(step, x, driver=graphcore_driver) as graph:
            return list(graph.snapshot().nodes)

    alone, whole = nodes(layer.router), nodes(layer)
    assert len(whole) == len(alone) + 5
    assert {node.kind.value for node in whole} == {"kernel"}


@pytest.mark.gpu
def test_a_layer_is_captured_where_torch_raises_at_any_wait(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("torch tells of waits on a device only")
    device = device_of(graphcore_driver)
    block = blocks_of(make_moe("dots1", device=device))[0]
    layer = MoELayer.from_transformers(block, pool_over(block, graphcore_driver, 2), "block")
    x = make_rows(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            graph = graphcore.capture_function(layer, x, driver=graphcore_driver)
            made = graph.instantiate()
            made.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graphcore_driver.synchronize()
    with torch.no_grad():
        assert torch.equal(graph.outputs, layer(x))
    made.close()
    graph.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: b.add_module("adapter", torch.nn.Linear(2, 2)),
            "gate, experts and maybe shared",
        ),
        (lambda b: delattr(b, "gate"), "gate, experts and maybe shared"),
        (lambda b: setattr(b, "experts", torch.nn.ModuleList()), "block.experts"),
        (lambda b: setattr(b.experts, "act_fn", torch.nn.GELU()), "act_fn: expected SiLU"),
    ],
    ids=["another part", "no router", "a list of experts", "another activation"],
)
def test_a_block_of_another_form_is_refused(change: Any, message: str) -> None:
    block = blocks_of(make_moe())[0]
    pool = pool_over(block, graphcore.open_driver("emulated"))
    change(block)
    with pytest.raises(ConfigurationError, match=message):
        MoELayer.from_transformers(block, pool, "block")


@pytest.mark.parametrize("given", [2, 4, None], ids=["two values", "four values", "a tensor"])
def test_a_router_that_gives_something_else_is_refused(given: int | None) -> None:
    block = blocks_of(make_moe())[0]
    pool = pool_over(block, graphcore.open_driver("emulated"))
    layer = MoELayer.from_transformers(block, pool, "block")
    x = make_rows(1)
    block.gate.forward = lambda hidden: hidden if given is None else (hidden,) * given
    with pytest.raises(ConfigurationError, match=r"router: expected \(logits, weights, ids\)"):
        layer(x)


def test_a_group_of_other_sizes_is_refused() -> None:
    driver = graphcore.open_driver("emulated")
    block = blocks_of(make_moe())[0]
    banks = {
        "gate_up": torch.zeros(EXPERTS, 4 * INNER, HIDDEN),
        "down": torch.zeros(EXPERTS, HIDDEN, 2 * INNER),
    }
    with pytest.raises(ConfigurationError, match="expected a bank gate_up of"):
        MoELayer.from_transformers(block, SlotPool({"g": banks}, 2, driver=driver), "g")
