"""The experts of a group as a function of rows: float64's numbers, whoever is resident."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from helpers.every_fault import each_fault
from helpers.isolated import run_script
from helpers.moe_models import counted_calls, exact_experts

import graphcore
from graphcore.driver import Driver
from graphcore.errors import (
    CapacityError,
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
    StaleGraphError,
)
from graphcore.moe import SlotPool, SlotProducts
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.slots.expert_memory import ExpertMemory
from graphcore.testing import inject

EXPERTS, HIDDEN, INNER, TOP_K = 12, 64, 32, 2
# relative to the largest element: F32 sums of 64 terms; bf16 rounds at inner and at out
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Case:
    """A group, its products, and steps whose result is known in float64."""

    def __init__(
        self,
        driver: Driver,
        slots: int = EXPERTS,
        dtype: torch.dtype = torch.float32,
        layout: str = "nk",
        gate_up: str = "concat",
    ) -> None:
        draw = torch.Generator().manual_seed(5)
        self.driver, self.dtype = driver, dtype
        self.device = "cpu" if driver.is_emulated else f"cuda:{driver.device}"
        both = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw).to(dtype) / 8
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=draw).to(dtype) / 6
        self.plain = (both, down)
        if gate_up == "interleaved":
            both = torch.stack(both.chunk(2, 1), 2).flatten(1, 2)
        if layout == "kn":
            both, down = both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.memory = ExpertMemory(driver)
        banks = {
            name: self.memory.take(torch.nn.Parameter(each.to(self.device)))
            for name, each in (("gate_up", both), ("down", down))
        }
        self.pool = SlotPool({"g": banks}, slots, driver=driver)
        self.products = SlotProducts(
            self.pool, "g", options=ProductOptions(layout=layout, gate_up=gate_up)
        )

    def step(self, rows: int, seed: int = 0, top_k: int = TOP_K, **types: Any) -> SimpleNamespace:
        """Tensors of a step; ``out`` and ``scratch`` are poisoned."""
        draw = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:top_k] for _ in range(rows)])
        made = SimpleNamespace(
            x=torch.randn(rows, HIDDEN, generator=draw).to(self.dtype).to(self.device),
            ids=ids.to(types.get("ids", torch.int64)).to(self.device),
            weights=torch.rand(rows, top_k, generator=draw)
            .to(types.get("weights", torch.float32))
            .to(self.device),
        )
        made.out = torch.full_like(made.x, float("nan"))
        self.products._follow_pool()
        sizes = self.products.sizes_of(rows, top_k)
        count = self.products.scratch_bytes(sizes)
        made.scratch = torch.full((count,), 0xFF, dtype=torch.uint8, device=self.device)
        return made

    def launch(self, step: SimpleNamespace, **options: Any) -> torch.Tensor:
        self.products.launch(step.x, step.ids, step.weights, step.out, step.scratch, **options)
        return step.out

    def exact(self, step: SimpleNamespace) -> torch.Tensor:
        return exact_experts(*self.plain, step.x, step.ids, step.weights)

    def error(self, step: SimpleNamespace) -> float:
        exact = self.exact(step)
        return float((step.out.double().cpu() - exact).abs().max() / exact.abs().max())


CHANGING = {"set_exec_node_params", "set_node_enabled", "update_exec", "instantiate", "launch",
            "alloc", "alloc_pinned", "copy", "write", "read", "synchronize"}  # fmt: skip
"""Calls that a replay does not make."""
LAYOUTS = list(itertools.product(("nk", "kn"), ("concat", "interleaved")))


@pytest.mark.parametrize(("layout", "gate_up"), LAYOUTS, ids=map("-".join, LAYOUTS))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_sums_are_float64s_within_a_bound(
    graphcore_driver: Driver, dtype: torch.dtype, layout: str, gate_up: str
) -> None:
    case = Case(graphcore_driver, slots=6, dtype=dtype, layout=layout, gate_up=gate_up)
    for rows in (1, 3, 8):
        step = case.step(rows, seed=rows)
        case.launch(step)
        assert case.error(step) < BOUNDS[dtype]
    assert case.products.fault() is None
    assert case.pool.fault("g").count == 0


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_ids_and_weights_of_every_type_are_read(
    graphcore_driver: Driver, ids: torch.dtype, weights: torch.dtype
) -> None:
    case = Case(graphcore_driver)
    step = case.step(3, ids=ids, weights=weights)
    case.launch(step)
    assert case.error(step) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40], ids="{} rows".format)
def test_bits_do_not_depend_on_how_many_experts_are_resident(
    graphcore_driver: Driver, rows: int, dtype: torch.dtype
) -> None:
    found = []
    for slots in (EXPERTS, EXPERTS // 2, EXPERTS // 4, TOP_K):
        case = Case(graphcore_driver, slots, dtype)
        for seed in (1, 2):  # the second one meets residents, and evicts
            step = case.step(rows, seed)
            found.append(case.launch(step).cpu())
        assert case.pool.fault("g").count == 0
    assert not torch.isnan(found[0]).any()
    assert not torch.equal(found[0], found[1])
    for one, two in zip(found[2::2], found[3::2], strict=True):
        assert torch.equal(one, found[0])
        assert torch.equal(two, found[1])


def test_a_captured_step_follows_the_router_and_experts_that_move(
    graphcore_driver: Driver,
) -> None:
    """Replays over other ids, weights and residents are what fresh launches give, bit for bit."""
    case, fresh = Case(graphcore_driver, slots=4), Case(graphcore_driver, slots=4)
    step = case.step(2)
    with graphcore.capture(driver=graphcore_driver) as captured:
        case.launch(step)
    with captured.graph as graph, graph.instantiate() as made:
        kinds = [node.kind.value for node in graph.snapshot().nodes]
        assert kinds == ["kernel"] * 5
        for seed in range(12):
            other = case.step(2, seed)
            for name in ("x", "ids", "weights"):
                getattr(step, name).copy_(getattr(other, name))
            step.out.fill_(float("nan"))
            if seed % 3 == 2:
                case.pool.reset()  # everyone is to come to another slot
            if seed % 3 == 1:  # somebody else's step in between moves experts
                case.launch(case.step(1, seed + 100))
            with counted_calls(graphcore_driver) as calls:
                made.launch()
            graphcore_driver.synchronize()
            assert not [name for name in calls if name not in ("launch_graph", "bind_launch")], (
                calls
            )
            assert torch.equal(step.out, fresh.launch(other))
    totals = case.pool.totals("g")
    assert totals.misses > totals.steps, "experts were evicted and came back"


def test_a_step_launches_its_kernels_and_asks_the_device_nothing(graphcore_driver: Driver) -> None:
    case = Case(graphcore_driver, slots=6)
    step = case.step(2)
    case.launch(step)
    with counted_calls(graphcore_driver) as calls:
        case.launch(step)
    assert calls == {"launch": 5}
    with counted_calls(graphcore_driver) as calls:
        case.launch(case.step(6))
    assert calls["launch"] == 10, "two parts"


def test_a_captured_step_in_parts_is_that_of_all_slots(graphcore_driver: Driver) -> None:
    case = Case(graphcore_driver, slots=4)
    step = case.step(7)
    with graphcore.capture(driver=graphcore_driver) as captured:
        case.launch(step)
    with captured.graph as graph, graph.instantiate() as made:
        assert len(graph.snapshot().nodes) == 4 * 5
        made.launch()
        graphcore_driver.synchronize()
    whole = Case(graphcore_driver)
    assert torch.equal(step.out, whole.launch(whole.step(7)))


def test_an_expert_that_does_not_exist_makes_the_step_zero_and_is_told(
    graphcore_driver: Driver,
) -> None:
    case = Case(graphcore_driver)
    step = case.step(2)
    step.ids[1, 1] = EXPERTS
    assert not case.launch(step).any()
    assert case.pool.fault("g").status.name == "INVALID_ROUTE"
    good = case.step(2)
    case.launch(good)
    assert case.error(good) < BOUNDS[torch.float32]


def test_after_growth_steps_work_on_the_new_slots_and_captured_ones_refuse(
    graphcore_driver: Driver,
) -> None:
    case = Case(graphcore_driver, slots=4)
    step = case.step(2)
    with graphcore.capture(driver=graphcore_driver) as captured:
        case.launch(step)
    with captured.graph as graph, graph.instantiate(guard="owners") as made:
        made.launch()
        graphcore_driver.synchronize()
        before = step.out.clone()
        case.pool.grow(8)
        with pytest.raises(StaleGraphError):
            made.launch()
    step.out.fill_(float("nan"))
    assert torch.equal(case.launch(step), before)
    assert case.products.sizes.slots == 8
    wider = case.step(4)
    with counted_calls(graphcore_driver) as calls:
        case.launch(wider)
    assert calls["launch"] == 5, "eight routes have a slot each now"


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "x": (lambda s: vars(s).update(x=s.x[:, :32].contiguous()), ConfigurationError, "x.shape"),
    "x type": (lambda s: vars(s).update(x=s.x.double()), ConfigurationError, "x.dtype"),
    "strides": (lambda s: vars(s).update(x=s.x.t().contiguous().t()), ConfigurationError,
                "x.strides"),
    "rows": (lambda s: vars(s).update(ids=s.ids[:1]), ConfigurationError, "shape"),
    "ids": (lambda s: vars(s).update(ids=s.ids.reshape(-1)), ConfigurationError, "ids.shape"),
    "ids type": (lambda s: vars(s).update(ids=s.ids.to(torch.int16)), ConfigurationError, "ids"),
    "weights type": (lambda s: vars(s).update(weights=s.weights.double()), ConfigurationError,
                     "weights.dtype"),
    "out": (lambda s: vars(s).update(out=s.x), ConfigurationError, "memory apart"),
    "scratch": (lambda s: vars(s).update(scratch=s.scratch[:-1]), CapacityError, "scratch"),
    "alignment": (lambda s: vars(s).update(scratch=s.scratch[8:]), ConfigurationError,
                  "multiple of 16"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_operands_that_do_not_fit_are_refused_before_a_launch(
    graphcore_driver: Driver, what: str
) -> None:
    case = Case(graphcore_driver)
    change, error, message = BAD[what]
    step = case.step(3)
    change(step)
    with counted_calls(graphcore_driver) as calls, pytest.raises(error, match=message):
        case.launch(step)
    assert not calls["launch"]


def test_a_row_of_more_experts_than_slots_is_refused(graphcore_driver: Driver) -> None:
    case = Case(graphcore_driver, slots=2)
    with pytest.raises(CapacityError, match="at most 2 experts for each row"):
        case.products.sizes_of(1, 3)


def test_a_closed_pool_and_a_capture_are_refused(graphcore_driver: Driver) -> None:
    case = Case(graphcore_driver)
    step = case.step(1)
    with graphcore.capture(driver=graphcore_driver) as captured:
        case.launch(step)
        with pytest.raises(CaptureError, match="make it before"):
            SlotProducts(case.pool, "g")
    captured.graph.close()
    case.pool.close()
    with pytest.raises(LifecycleError, match="closed"):
        case.launch(step)


@pytest.mark.parametrize(
    ("banks", "message"),
    [
        ({"up": (4, 8, 8), "down": (4, 8, 4)}, "expected banks gate_up and down"),
        ({"gate_up": (4, 8, 8), "down": (4, 8, 8)}, r"gate_up.shape: expected \[experts, 16, 8\]"),
        ({"gate_up": (4, 8), "down": (4, 8, 4)}, "3 axes"),
    ],
    ids=["names", "sizes", "axes"],
)
def test_banks_that_are_no_layer_are_refused(banks: dict, message: str) -> None:
    driver = graphcore.open_driver("emulated")
    made = {name: numpy.zeros(shape, "float32") for name, shape in banks.items()}
    with pytest.raises(ConfigurationError, match=message):
        SlotProducts(SlotPool({"g": made}, 2, driver=driver), "g")


def test_a_fault_at_any_call_of_a_step_leaves_slots_whose_next_step_is_right() -> None:
    seen = set()
    for driver, fault in each_fault(
        lambda driver: (case := Case(driver, slots=4), case.step(3)),
        lambda made: made[0].launch(made[1]),
    ):
        case, step = fault.state
        seen.add(fault.where.split()[0])
        step.out.fill_(float("nan"))
        case.launch(step)
        assert case.error(step) < BOUNDS[torch.float32], fault.where
        assert driver is case.driver
    assert "launch" in seen


def test_a_step_needs_no_torch() -> None:
    result = run_script(
        """
import sys
import numpy
import graphcore
from graphcore.moe import SlotPool, SlotProducts
driver = graphcore.open_driver("emulated")
both, down = numpy.ones((4, 8, 8), "float32"), numpy.ones((4, 8, 4), "float32")
products = SlotProducts(SlotPool({"g": {"gate_up": both, "down": down}}, 2, driver=driver), "g")
x, out = numpy.full((1, 8), 0.125, "float32"), numpy.zeros((1, 8), "float32")
ids, weights = numpy.array([[3, 1]]), numpy.ones((1, 2), "float32")
scratch = numpy.zeros(products.scratch_bytes(products.sizes_of(1, 2)) + 16, "uint8")
start = -scratch.ctypes.data % 16
products.launch(x, ids, weights, out, scratch[start:])
assert "torch" not in sys.modules
print(out[0, 0])
"""
    )
    silu = 1 / (1 + float(numpy.exp(-1.0)))
    assert float(result.stdout) == pytest.approx(2 * 4 * silu)


def test_a_step_that_failed_is_settled_at_once_so_that_a_graph_may_be_launched_next() -> None:
    """Nobody asks before a replay: it must not take slots for good whose copies never ran."""
    driver = graphcore.open_driver("emulated")
    case, fresh = Case(driver, slots=4), Case(driver, slots=4)
    step, other = case.step(2, seed=1), case.step(2, seed=2)
    with graphcore.capture(driver=driver) as captured:
        case.launch(step)
    with captured.graph as graph, graph.instantiate() as made:
        made.launch()
        with inject(driver, "launch", after=1), pytest.raises(CudaError):
            case.launch(other)  # its plan is there, its copies are not
        assert case.pool.is_settled
        for name in ("x", "ids", "weights"):
            getattr(step, name).copy_(getattr(other, name))
        made.launch()
        driver.synchronize()
    assert torch.equal(step.out, fresh.launch(other))
