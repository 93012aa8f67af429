"""Binding: what fits a plan's buffers, what does not and by which name, before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench
from helpers.kernels import ONE_BLOCK, add_one, axpy
from helpers.libraries import array_library
from helpers.plan_sites import WAYS, Site, do
from helpers.tensors import cuda_driver, device_of

from graphcore import Buffer, GraphPlan, open_driver
from graphcore.driver import Driver
from graphcore.errors import (
    CacheTypeError,
    ConfigurationError,
    GraphcoreError,
    LifecycleError,
    PlanError,
)
from graphcore.resources.tensors import describe


def _plan() -> GraphPlan:
    plan = GraphPlan("axpy")
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4, 2), strides=(4, 1))
    plan.launch(axpy, ONE_BLOCK, 2.0, x, y[0], 2, reads=[x], writes=[y[0]])
    return plan


def _tensors(driver: Driver) -> dict[str, Any]:
    device = device_of(driver)
    return {"x": torch.ones(4, device=device), "y": torch.zeros(4, 4, device=device)[:, :2]}


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_the_planned_layout_are_taken(graphcore_driver: Driver, way: str) -> None:
    tensors = _tensors(graphcore_driver)
    do(_plan(), tensors, way, graphcore_driver.stream())
    assert tensors["y"].tolist() == [[2, 2], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_other_libraries_are_taken(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (3,)), 3)
    array = array_library(bench.driver).make((3,), "float32")
    do(plan, {"x": array}, way, bench.stream)
    assert array.tolist() == [2, 2, 2]


def _past_the_end(driver: Driver) -> Any:
    buffer = Buffer.allocate(1024, driver=driver)
    found = driver.allocation_of(buffer.address)  # which may have been rounded up
    assert found is not None
    end = found.base + found.size
    return replace(describe(buffer), address=end - 8, shape=(4,), strides=(1,), owner=buffer)


def _read_only(driver: Driver) -> Any:
    ref = describe(torch.zeros(4, 4, device=device_of(driver))[:, :2])
    return replace(ref, read_only=True)


def _closed(driver: Driver) -> Any:
    buffer = Buffer.allocate(4, driver=driver)
    buffer.close()
    return buffer


def _zeros(*shape: int, dtype: Any = torch.float32) -> Callable[[Driver], Any]:
    return lambda driver: torch.zeros(*shape, dtype=dtype, device=device_of(driver))


# name of the buffer, what is given for it, the error, and words of the message
MISFITS: dict[str, tuple[str, Callable[[Driver], Any], type[GraphcoreError], str]] = {
    "another_size": ("x", _zeros(3), PlanError, r"buffers\['x'\].shape: expected \(4,\), got"),
    "too_few_elements": ("x", _zeros(3), PlanError, "too small"),
    "another_rank": ("x", _zeros(4, 1), PlanError, r"x'\].shape"),
    "another_type": (
        "x", _zeros(4, dtype=torch.float64), PlanError, "dtype: expected float32, got float64"
    ),
    "another_layout": (
        "y", _zeros(4, 2), PlanError, r"y'\].strides: expected \(4, 1\), got \(2, 1\)"
    ),
    "past_its_allocation": ("x", _past_the_end, PlanError, "x'.*an allocation of.*too small"),
    "read_only": ("y", _read_only, PlanError, "y'.*writes.*read-only"),
    "closed": ("x", _closed, LifecycleError, r"buffers\['x'\]: .*closed"),
    "no_tensor": ("x", lambda _: "x", CacheTypeError, r"buffers\['x'\]"),
    "a_scalar": ("x", lambda _: 3.0, CacheTypeError, r"buffers\['x'\]"),
    "a_class": ("x", lambda _: torch.Tensor, CacheTypeError, r"buffers\['x'\]"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name_and_nothing_runs(
    graphcore_driver: Driver, case: str, way: str
) -> None:
    name, make, error, words = MISFITS[case]
    good = _tensors(graphcore_driver)
    plan = _plan()
    with pytest.raises(error, match=words):
        do(plan, {**good, name: make(graphcore_driver)}, way, graphcore_driver.stream())
    assert good["y"].tolist() == [[0, 0]] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("y"), r"\['y'\] missing"),
        (lambda tensors: tensors.update(z=tensors["x"]), r"\['z'\] unknown"),
    ],
    ids=["missing", "extra"],
)
def test_names_must_be_the_plans(change: Callable[[dict[str, Any]], Any], words: str) -> None:
    tensors = _tensors(open_driver("emulated"))
    change(tensors)
    with pytest.raises(PlanError, match=words):
        _plan().build(tensors)


def test_buffers_must_be_a_mapping() -> None:
    with pytest.raises(PlanError, match=r"expected a mapping.*got list"):
        _plan().build([torch.zeros(4)])  # type: ignore[arg-type]


def test_the_step_of_an_axis_with_one_element_does_not_matter(graphcore_driver: Driver) -> None:
    plan = GraphPlan()
    plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (1, 3), strides=(7, 1)), 3)
    x = torch.zeros(1, 3, device=device_of(graphcore_driver))
    do(plan, {"x": x}, "build", graphcore_driver.stream())
    assert x.tolist() == [[1, 1, 1]]


# ---- two names for one memory -------------------------------------------------------------------


def test_two_buffers_that_share_bytes_are_told_where_one_is_written(
    graphcore_driver: Driver,
) -> None:
    tensors = _tensors(graphcore_driver)
    memory = torch.zeros(16, device=device_of(graphcore_driver))
    shared = {"x": memory[3:7], "y": memory.view(4, 4)[:, :2]}
    with pytest.raises(PlanError, match=r"buffers\['(x|y)'\] and buffers\['(x|y)'\].*share bytes"):
        _plan().build(shared)
    _plan().build(tensors)


def test_columns_between_each_other_share_no_byte(graphcore_driver: Driver) -> None:
    memory = torch.ones(4, 4, device=device_of(graphcore_driver))
    plan = GraphPlan()
    left = plan.buffer("left", (4, 2), strides=(4, 1))
    right = plan.buffer("right", (4, 2), strides=(4, 1))
    plan.memcpy(left, right)
    plan.memset(right, 0)
    do(plan, {"left": memory[:, :2], "right": memory[:, 2:]}, "build", graphcore_driver.stream())
    assert memory.tolist() == [[1, 1, 0, 0]] * 4


def test_buffers_that_are_only_read_may_be_one(bench: Bench) -> None:
    plan = GraphPlan()
    out = plan.buffer("out", (2,))
    for name in ("a", "b"):
        plan.launch(axpy, ONE_BLOCK, 1.0, plan.buffer(name, (2,)), out, 2)
    device = device_of(bench.driver)
    ones, zeros = torch.ones(2, device=device), torch.zeros(2, device=device)
    do(plan, {"a": ones, "b": ones, "out": zeros}, "build", bench.stream)
    assert zeros.tolist() == [2, 2]


# ---- whose memory -------------------------------------------------------------------------------


def test_a_buffer_of_another_driver_is_refused() -> None:
    one, other = open_driver("emulated"), open_driver("emulated")
    plan = GraphPlan()
    plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (4,)), 4)
    with pytest.raises(PlanError, match=r"buffers\['x'\].*another|two open_driver\(\) calls"):
        plan.build({"x": Buffer.allocate(4, driver=other)}, driver=one)


def test_a_buffer_says_which_driver_is_meant() -> None:
    driver = open_driver("emulated")
    plan = GraphPlan()
    plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (4,)), 4)
    graph = plan.build({"x": Buffer.allocate(4, driver=driver)})
    assert graph.driver is driver


def test_a_driver_must_be_open_not_named() -> None:
    with pytest.raises(ConfigurationError, match=r"open_driver\('emulated'\)"):
        _plan().build(_tensors(open_driver("emulated")), driver="emulated")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_host_memory_where_device_memory_is_needed_is_refused_by_name(way: str) -> None:
    driver = cuda_driver()
    tensors = {**_tensors(driver), "x": torch.ones(4)}
    with pytest.raises(PlanError, match=r"buffers\['x'\].*device memory.*host memory \(Tensor\)"):
        do(_plan(), tensors, way, driver.stream())
    assert tensors["y"].tolist() == [[0, 0]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "pinned"), [*((way, True) for way in WAYS), ("build", False), ("run", False)]
)
def test_copies_take_host_memory(way: str, pinned: bool) -> None:
    driver = cuda_driver()
    plan = GraphPlan()
    given, x, back = plan.buffer("given", (4,)), plan.buffer("x", (4,)), plan.buffer("back", (4,))
    plan.memcpy(x, given)
    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.memcpy(back, x)
    host = {"given": torch.ones(4), "back": torch.zeros(4)}
    if pinned:
        host = {name: tensor.pin_memory() for name, tensor in host.items()}
    do(plan, {**host, "x": torch.zeros(4, device="cuda")}, way, driver.stream())
    assert host["back"].tolist() == [2, 2, 2, 2]


@pytest.mark.gpu
def test_device_memory_is_none_of_the_emulated_driver() -> None:
    tensors = _tensors(cuda_driver())
    with pytest.raises(PlanError, match=r"buffers\['x'\].*emulated:0, got memory of cuda:0"):
        _plan().build(tensors, driver=open_driver("emulated"))


# ---- views --------------------------------------------------------------------------------------


def test_a_view_whose_elements_would_lie_across_is_refused(bench: Bench) -> None:
    site = Site(bench)
    site.put("raw", numpy.zeros(16), "uint8")
    raw = site.plan.buffers["raw"]
    site.plan.launch(add_one, ONE_BLOCK, raw[:12].view("float32"), 3)
    site.graph()
    odd = Buffer.allocate(20, "uint8", driver=bench.driver)
    site.buffers["raw"] = replace(describe(odd), address=odd.address + 1, shape=(16,), owner=odd)
    with pytest.raises(PlanError, match=r"node 'add_one': buffer 'raw'.*multiple of 4"):
        site.graph()


def test_tensors_live_as_long_as_the_graph_under_the_names_of_their_buffers() -> None:
    import weakref

    driver = open_driver("emulated")
    tensors = _tensors(driver)
    watched = weakref.ref(tensors["x"])
    graph = _plan().build(tensors, driver=driver)
    executable = graph.instantiate()
    assert {"x", "y"} <= set(graph.owners.labels())
    del tensors
    graph.close()
    assert watched() is not None
    executable.close()
    del graph, executable
    assert watched() is None
