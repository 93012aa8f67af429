"""The module in the experts' place: what it takes, what it refuses, what a model saves with it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.moe_models import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    blocks_of,
    device_of,
    exact_experts,
    make_moe,
    make_rows,
)
from torch._dynamo.testing import CompileCounterWithBackend

import graphcore
from graphcore.driver import Driver
from graphcore.errors import CacheTypeError, CapacityError, ConfigurationError, LifecycleError
from graphcore.moe import SlotExperts, accelerate

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the largest element."""


class Layer:
    """The experts of one layer of a model: in slots, and the model's own."""

    def __init__(
        self,
        driver: Driver,
        slots: int = 4,
        dtype: torch.dtype = torch.float32,
        *,
        staging: bool = True,
    ) -> None:
        self.device = device_of(driver)
        self.model = make_moe(device=self.device, dtype=dtype)
        self.own = make_moe(device=self.device, dtype=dtype).model.layers[0].mlp.experts
        self.handle = accelerate(self.model, slots, driver=driver, staging=staging)
        self.experts = self.model.model.layers[0].mlp.experts

    def routes(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        ids = [torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(rows)]
        weights = torch.rand(rows, TOP_K, generator=draw)
        return torch.stack(ids).to(self.device), weights.to(self.device)

    def step(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        dtype = self.own.down_proj.dtype
        x = make_rows(rows, device=self.device, dtype=dtype, seed=seed)
        return (x, *self.routes(rows, seed))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_sums_are_transformers_own_and_float64s_within_a_bound(
    graphcore_driver: Driver, dtype: torch.dtype
) -> None:
    layer = Layer(graphcore_driver, dtype=dtype)
    for rows in (1, 3, 9):
        step = layer.step(rows, seed=rows)
        with torch.no_grad():
            found = layer.experts(*step)
            own = layer.own(*step)
        exact = exact_experts(layer.own.gate_up_proj, layer.own.down_proj, *step)
        scale = exact.abs().max()
        assert found.dtype == dtype
        assert (found.double().cpu() - exact).abs().max() < BOUNDS[dtype] * scale
        assert (found.double() - own.double()).abs().max() < 2 * BOUNDS[dtype] * scale


def test_each_call_gives_a_tensor_of_its_own(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    with torch.no_grad():
        first = layer.experts(*layer.step(2, seed=1))
        kept = first.clone()
        second = layer.experts(*layer.step(2, seed=2))
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_rows_that_lie_strided_or_askew_are_read_as_they_are(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    x, ids, weights = layer.step(3)
    wanted = layer.experts(x, ids, weights)
    strided = torch.stack([x, x * 0], 1)[:, 0]
    askew = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert askew.data_ptr() % 16
    assert torch.equal(layer.experts(strided, ids.t().contiguous().t(), weights), wanted)
    assert torch.equal(layer.experts(askew, ids, weights), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_a_shape_that_is_bound_later_are_read_as_they_lie_then(
    graphcore_driver: Driver, dtype: torch.dtype
) -> None:
    layer = Layer(graphcore_driver, slots=6)
    x, ids, weights = layer.step(3)
    wanted = layer.experts(x, ids, weights)
    assert torch.equal(layer.experts(x, ids.to(dtype), weights), wanted)
    layer.experts.bind(3, TOP_K)
    assert torch.equal(layer.experts(x, ids.to(dtype), weights), wanted)
    layer.handle.pool.grow(8)  # not bound any more
    assert torch.equal(layer.experts(x, ids.to(dtype), weights), wanted)


def test_no_rows_are_no_work(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    x, ids, weights = layer.step(1)
    assert layer.experts(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    assert layer.handle.totals()["model.layers.0.mlp.experts"].steps == 0


BAD: dict[str, tuple[Any, str]] = {
    "another type": (lambda x, i, w: (x.double(), i, w), "hidden_states.dtype: expected float32"),
    "ids of another type": (lambda x, i, w: (x, i.to(torch.int16), w), "top_k_index.dtype"),
    "weights of another type": (lambda x, i, w: (x, i, w.double()), "top_k_weights.dtype"),
    "columns": (lambda x, i, w: (x[:, :32], i, w), r"hidden_states.shape: expected \[rows, 64\]"),
    "rows": (lambda x, i, w: (x, i[:1], w), "top_k_index.shape"),
    "no experts": (lambda x, i, w: (x, i[:, :0], w[:, :0]), "top_k_index.shape"),
    "three axes": (lambda x, i, w: (x[None], i, w), "hidden_states.shape"),
    "fewer weights": (lambda x, i, w: (x, i, w[:, :1]), "top_k_weights.shape"),
    "another device": (lambda x, i, w: (x.to("meta"), i, w), "hidden_states.device"),
}


@pytest.mark.parametrize("what", BAD)
def test_tensors_that_do_not_fit_are_refused_by_name(graphcore_driver: Driver, what: str) -> None:
    layer = Layer(graphcore_driver)
    change, message = BAD[what]
    with pytest.raises(ConfigurationError, match=message):
        layer.experts(*change(*layer.step(2)))


def test_a_row_of_more_experts_than_slots_is_refused(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver, slots=2, staging=False)
    x, _, _ = layer.step(1)
    ids, weights = torch.tensor([[0, 1, 2]], device=layer.device), x.new_ones(1, 3)
    with pytest.raises(CapacityError, match="at most 2 experts for each row"):
        layer.experts(x, ids, weights)
    staged = Layer(graphcore_driver, slots=2).experts(x, ids, weights)
    exact = exact_experts(layer.own.gate_up_proj, layer.own.down_proj, x, ids, weights)
    assert (staged.double().cpu() - exact).abs().max() < BOUNDS[torch.float32] * exact.abs().max()


def test_gradients_may_be_recorded_but_going_back_is_refused(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    x, ids, weights = layer.step(2)
    with torch.no_grad():
        wanted = layer.experts(x, ids, weights)
    out = layer.experts(x.requires_grad_(), ids, weights)
    assert torch.equal(out, wanted)
    with pytest.raises(LifecycleError, match="no gradients"):
        out.sum().backward()


def test_a_saved_model_is_whole_and_loading_into_slots_is_refused(
    graphcore_driver: Driver,
) -> None:
    layer = Layer(graphcore_driver)
    whole = make_moe(device=layer.device).state_dict()
    saved = layer.model.state_dict()
    assert list(saved) == list(whole)
    assert all(torch.equal(saved[name].to(layer.device), whole[name]) for name in whole)
    with pytest.raises(LifecycleError, match=r"restore\(\) first"):
        layer.model.load_state_dict(whole)
    without = {name: each for name, each in whole.items() if ".experts." not in name}
    layer.model.load_state_dict(without)


def test_a_model_that_was_saved_is_loaded_as_one_with_experts_of_its_own(
    graphcore_driver: Driver, tmp_path: Path
) -> None:
    layer = Layer(graphcore_driver)
    layer.model.save_pretrained(tmp_path)
    loaded = type(layer.model).from_pretrained(tmp_path, dtype=torch.float32)
    whole = make_moe().state_dict()
    assert all(torch.equal(each, whole[name]) for name, each in loaded.state_dict().items())


def test_it_is_not_copied_with_its_model(graphcore_driver: Driver) -> None:
    """A copy would be of a pool's slots, which are one model's."""
    layer = Layer(graphcore_driver)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CacheTypeError, match="SlotExperts: cannot be copied"):
            copying(layer.experts)
    with pytest.raises(CacheTypeError, match="SlotExperts"):
        copy.deepcopy(layer.model)


def test_it_has_no_parameters_and_says_what_it_is(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    assert isinstance(layer.experts, SlotExperts)
    assert not [name for name, _ in layer.model.named_parameters() if ".experts." in name]
    assert "model.layers.0.mlp.experts: 4 slots for 8 experts" in repr(layer.experts)
    assert layer.model.dtype == torch.float32
    assert str(layer.model.device) == layer.device


def test_after_growth_the_next_call_uses_the_new_slots(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver, slots=2)
    step = layer.step(3)
    wanted = layer.experts(*step)
    assert layer.handle.totals()["model.layers.0.mlp.experts"].steps == 3
    layer.handle.pool.grow(8)
    assert torch.equal(layer.experts(*step), wanted)
    assert layer.handle.totals()["model.layers.0.mlp.experts"].steps == 4


def test_a_row_count_may_be_seen_first_inside_a_capture(graphcore_driver: Driver) -> None:
    """Nothing is kept for a row count that would have to be allocated before."""
    layer = Layer(graphcore_driver)
    step = layer.step(3)
    out = torch.full_like(step[0], float("nan"))
    with torch.no_grad(), graphcore.capture(driver=graphcore_driver) as captured:
        out.copy_(layer.experts(*step))
    with captured.graph as graph, graph.instantiate() as made:
        made.launch()
        graphcore_driver.synchronize()
    assert torch.equal(out, layer.experts(*step))


def test_blocks_without_a_pool_any_more_say_so(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    layer.handle.restore()
    with pytest.raises(LifecycleError, match="an open pool"):
        layer.experts(*layer.step(1))
    assert blocks_of(layer.model)[0].experts is not layer.experts


def test_compiled_code_calls_it_as_one_operator_without_a_break(graphcore_driver: Driver) -> None:
    """Of a whole model, in one region; what experts are resident is looked up when it runs."""
    layer = Layer(graphcore_driver)
    block = blocks_of(layer.model)[0]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for seed in range(3):
            x = make_rows(2, device=layer.device, seed=seed)[None]
            assert torch.equal(compiled(x), block(x))
    assert counter.frame_count == 1
    targets = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert targets.count("graphcore.slot_experts.default") == 1


def test_compiled_code_without_its_pool_any_more_says_so(graphcore_driver: Driver) -> None:
    layer = Layer(graphcore_driver)
    compiled = torch.compile(layer.experts, backend="eager", fullgraph=True, dynamic=False)
    step = layer.step(2)
    with torch.no_grad():
        compiled(*step)
        layer.handle.restore()
        with pytest.raises(LifecycleError, match="an open pool"):
            compiled(*step)
