"""Calls: Python callables of a plan that launch torch or CuPy work, mixed with kernels."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from graphcore_kernels import strided_copy
from helpers.contract import Bench, copy_1d
from helpers.kernels import ONE_BLOCK, add_one, count_down, scale, set_value
from helpers.plan_sites import GRAPH_WAYS, WAYS, do, make_graph
from helpers.tensors import device_of, filled

import graphcore
from graphcore import Buffer, GraphPlan
from graphcore.driver import Driver
from graphcore.driver.records import MemsetParams, NodeKind
from graphcore.errors import CaptureError, PlanError


def _mixed() -> GraphPlan:
    """Two kernels around a matrix product and a softmax that torch launches."""
    plan = GraphPlan("mixed")
    x, w = plan.buffer("x", (4, 4)), plan.buffer("w", (4, 4))
    out, last = plan.buffer("out", (4, 4)), plan.buffer("last", (4,))
    plan.launch(add_one, ONE_BLOCK, x, 16)
    plan.call(_attend, x, w, out, reads=[x, w], writes=[out])
    plan.launch(scale, ONE_BLOCK, out, 2.0, 16)
    plan.call(torch.sum, out, 0, name="sum", reads=[out], writes=[])
    plan.call(lambda row, to: to.copy_(row.cumsum(0)), out[3], last, reads=[out[3]], writes=[last])
    return plan


def _attend(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, w, out=out)
    out.copy_(torch.softmax(out, dim=1))


def _tensors(driver: Driver, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    device = device_of(driver)
    made = {name: torch.rand(4, 4, generator=generator).to(device) for name in ("x", "w")}
    return made | {"out": filled(driver, float("nan"), 4, 4), "last": filled(driver, float("nan"))}


def _eager(tensors: dict[str, torch.Tensor], times: int) -> dict[str, torch.Tensor]:
    x, w, out, last = (tensors[name].clone() for name in ("x", "w", "out", "last"))
    for _ in range(times):
        x += 1
        _attend(x, w, out)
        out *= 2
        last.copy_(out[3].cumsum(0))
    return {"x": x, "w": w, "out": out, "last": last}


@pytest.mark.parametrize("way", WAYS)
def test_a_mixed_plan_of_kernels_and_torch_calls_equals_eager(
    graphcore_driver: Driver, way: str
) -> None:
    tensors = _tensors(graphcore_driver)
    expected = _eager(tensors, times=3)
    once = _eager(tensors, times=1)
    do(_mixed(), tensors, way, graphcore_driver.stream(), times=3)
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name
    assert not torch.equal(once["out"], expected["out"])  # three launches were needed


def test_a_call_is_a_child_graph_where_built_and_stands_in_line_where_captured(
    graphcore_driver: Driver,
) -> None:
    tensors = _tensors(graphcore_driver)
    kinds = {
        way: [node.kind for node in make_graph(_mixed(), tensors, way).snapshot().nodes]
        for way in GRAPH_WAYS
    }
    assert kinds["build"] == [NodeKind.KERNEL, NodeKind.CHILD, NodeKind.KERNEL,
                              NodeKind.CHILD, NodeKind.CHILD]  # fmt: skip
    assert NodeKind.CHILD not in kinds["capture"]
    assert kinds["capture"].count(NodeKind.KERNEL) >= 5


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_building_and_warming_up_changes_no_contents(graphcore_driver: Driver, way: str) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    calls: list[int] = []

    def double(x: torch.Tensor) -> None:
        calls.append(1)
        x.mul_(2)

    plan.call(double, x, warmup=3)
    value = filled(graphcore_driver, 3.0)
    graph = make_graph(plan, {"x": value}, way)
    graphcore_driver.synchronize()
    assert value.tolist() == [3, 3, 3, 3]
    assert len(calls) == 4
    with graph.instantiate() as executable:
        executable.launch()
        graphcore_driver.synchronize()
    assert value.tolist() == [6, 6, 6, 6]
    assert len(calls) == 4


def test_the_warm_up_sees_the_contents_of_a_strided_view(graphcore_driver: Driver) -> None:
    seen: list[Any] = []

    def step(x: torch.Tensor) -> None:
        if not seen:
            seen.append(x.tolist())  # would break the capture
        x.add_(1)

    plan = GraphPlan()
    plan.call(step, plan.buffer("x", (2, 3), strides=(5, 1))[:, 1:])
    x = torch.arange(10.0, device=device_of(graphcore_driver)).view(2, 5)[:, 1:4]
    plan.build({"x": x})
    assert seen == [[[2, 3], [7, 8]]]


# ---- where a call may stand ---------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_calls_work_in_bodies_where_their_copies_become_kernels(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    x, y, n = plan.buffer("x", (4,)), plan.buffer("y", (4,)), plan.buffer("n", (1,), "int32")
    more = plan.condition("more", default=1)
    with plan.while_loop(more) as body:
        body.call(lambda x, y: y.copy_(x.mul_(2)), x, y)
        body.launch(count_down, ONE_BLOCK, more, n)
    device = device_of(bench.driver)
    tensors = {
        "x": torch.ones(4, device=device),
        "y": torch.zeros(4, device=device),
        "n": torch.full((1,), 3, dtype=torch.int32, device=device),
    }
    if way != "run":
        inner = make_graph(plan, tensors, way).snapshot().nodes[0].bodies[0]
        assert inner.nodes[0].child is not None
        assert NodeKind.MEMCPY not in {node.kind for node in inner.walk()}
    do(plan, tensors, way, bench.stream)
    assert (tensors["x"].tolist(), tensors["y"].tolist()) == ([8] * 4, [8] * 4)
    assert tensors["n"].item() == 0


def test_a_graph_with_fills_and_copies_that_were_captured_elsewhere_runs_in_a_body(
    bench: Bench,
) -> None:
    """A body takes nodes of one context only, and captured ones bring that of their capture."""
    device = device_of(bench.driver)
    tensors = {
        "x": torch.full((4,), 7.0, device=device),
        "y": torch.full((4,), 7.0, device=device),
        "n": torch.full((1,), 3, dtype=torch.int32, device=device),
    }
    x, y = tensors["x"], tensors["y"]
    with graphcore.capture(driver=bench.driver) as capture:
        stream = capture.stream.handle
        bench.driver.fill(MemsetParams(x.data_ptr(), 0, 4, 4), stream)
        x.add_(2)
        bench.driver.copy(copy_1d(y.data_ptr(), x.data_ptr(), 16), stream)
        y.mul_(3)
    kinds = [node.kind for node in capture.graph.snapshot().nodes]
    assert (kinds[0], kinds[2]) == (NodeKind.MEMSET, NodeKind.MEMCPY)
    plan = GraphPlan()
    n, more = plan.buffer("n", (1,), "int32"), plan.condition("more", default=1)
    with plan.while_loop(more) as body:
        body.embed(capture.graph)
        body.launch(count_down, ONE_BLOCK, more, n)
    graph = plan.build({"n": tensors["n"]}, driver=bench.driver, copy_kernel=strided_copy)
    embedded = graph.snapshot().nodes[0].bodies[0].nodes[0].child
    assert embedded is not None
    kernel, fill = NodeKind.KERNEL, NodeKind.MEMSET
    assert sorted(node.kind.value for node in embedded.nodes) == sorted(
        kind.value for kind in (kernel, kernel, kernel, fill)
    )
    assert len(embedded.edges) == 3
    with graph.instantiate() as executable:
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert (x.tolist(), y.tolist(), tensors["n"].item()) == ([2] * 4, [6] * 4, 0)


@pytest.mark.parametrize("way", WAYS)
def test_calls_work_in_embedded_plans(bench: Bench, way: str) -> None:
    layer = GraphPlan("layer")
    layer.call(lambda x: x.mul_(3), layer.buffer("x", (2,)))
    plan = GraphPlan()
    x = plan.buffer("x", (3, 2))
    for row in range(3):
        plan.launch(add_one, ONE_BLOCK, x[row], 2)
        plan.embed(layer, {"x": x[row]})
    tensor = torch.zeros(3, 2, device=device_of(bench.driver))
    do(plan, {"x": tensor}, way, bench.stream)
    assert tensor.tolist() == [[3, 3]] * 3


@pytest.mark.parametrize("way", WAYS)
def test_calls_work_on_memory_that_the_plan_allocates(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    scratch = plan.allocate("scratch", (2, 4))
    calls: list[int] = []

    def spread(scratch: torch.Tensor, x: torch.Tensor) -> None:
        calls.append(1)
        scratch.copy_(x.expand(2, 4))

    plan.call(spread, scratch, x, reads=[x], writes=[scratch])
    plan.call(lambda s, x: torch.sum(s, 0, out=x), scratch, x, reads=[scratch], writes=[x])
    plan.deallocate(scratch)
    tensor = torch.tensor([1.0, 2, 3, 4], device=device_of(bench.driver))
    do(plan, {"x": tensor}, way, bench.stream, times=2)
    assert tensor.tolist() == [4, 8, 12, 16]
    assert len(calls) == 2  # run twice, or warmed up elsewhere and captured


def test_a_plan_that_runs_inside_a_capture_becomes_part_of_it(bench: Bench) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.call(lambda x: x.mul_(2), x)
    tensor = filled(bench.driver, 1.0)
    with graphcore.capture(driver=bench.driver) as capture:
        tensor.add_(1)
        plan.run({"x": tensor}, driver=bench.driver)
        tensor.sub_(1)
    assert capture.graph.snapshot().edges == ((0, 1), (1, 2), (2, 3))
    assert tensor.tolist() == [1, 1, 1, 1]
    with capture.graph.instantiate() as executable:
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert tensor.tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_launches_nothing_only_orders(
    bench: Bench, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.call(lambda x: None, x, name="nothing")
    plan.launch(scale, ONE_BLOCK, x, 3.0, 4)
    tensor = filled(bench.driver, 0.0)
    with caplog.at_level(logging.WARNING, "graphcore"):
        do(plan, {"x": tensor}, way, bench.stream)
    assert tensor.tolist() == [3, 3, 3, 3]
    assert ("empty graph" in caplog.text) == (way == "build")


# ---- what arrives, and what is kept -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_views_arrive_as_tensors_over_the_same_memory_and_other_arguments_as_they_are(
    bench: Bench, way: str
) -> None:
    given: list[Any] = []
    plan = GraphPlan()
    x = plan.buffer("x", (2, 3))

    def step(row: Any, words: Any, text: str, *, scale: int = 0) -> None:
        del scale
        given[:] = [(row.data_ptr(), row.shape, row.dtype), (words.data_ptr(), words.dtype), text]
        row.add_(1)

    plan.call(step, x[1, ::2], x[0].view("int32"), "text", warmup=0, writes=[x], reads=[x])
    tensor = torch.zeros(2, 3, device=device_of(bench.driver), requires_grad=True)
    do(plan, {"x": tensor}, way, bench.stream)
    start = tensor.data_ptr()
    assert given == [(start + 12, (2,), torch.float32), (start, torch.int32), "text"]
    assert tensor.tolist() == [[0, 0, 0], [1, 0, 1]]


def test_buffers_of_ours_arrive_as_buffers(graphcore_driver: Driver) -> None:
    given: list[Any] = []
    plan = GraphPlan()
    plan.call(given.append, plan.buffer("x", (4,))[1:], warmup=0)
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    plan.run({"x": buffer})
    assert isinstance(given[0], Buffer)
    assert (given[0].address, given[0].shape) == (buffer.address + 4, (3,))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_cupy_calls_get_arrays(way: str) -> None:
    import cupy
    from helpers.tensors import cuda_driver

    driver = cuda_driver()
    plan = GraphPlan()
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (2,))

    def step(x: Any, y: Any) -> None:
        assert isinstance(x, cupy.ndarray)
        cupy.multiply(x, 2, out=x)
        cupy.add(x[::2], 1, out=y)

    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.call(step, x, y)
    arrays = {"x": cupy.arange(4, dtype="float32"), "y": cupy.zeros(2, "float32")}
    do(plan, arrays, way, driver.stream())
    assert (arrays["x"].tolist(), arrays["y"].tolist()) == ([2, 4, 6, 8], [3, 7])


def test_conditions_arrive_as_handles() -> None:
    from graphcore.interop import current_stream

    driver = graphcore.open_driver("emulated")

    def decide(handle: int) -> None:
        function = driver.function(set_value)
        driver.launch(function, ONE_BLOCK, set_value.pack(handle, 1), current_stream(driver))

    for way in WAYS:
        plan = GraphPlan()
        x, taken = plan.buffer("x", (1,)), plan.condition("taken")
        plan.call(decide, taken)
        with plan.if_then(taken) as body:
            body.launch(add_one, ONE_BLOCK, x, 1)
        tensor = torch.zeros(1)
        do(plan, {"x": tensor}, way, driver.stream())
        assert tensor.tolist() == [1], way


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_what_a_call_allocates_lives_as_long_as_the_graph(bench: Bench, way: str) -> None:
    import gc

    plan = GraphPlan()
    x, out = plan.buffer("x", (1024,)), plan.buffer("out", (1024,))
    plan.call(lambda x, out: out.copy_((x + 1) * (x + 2)), x, out, reads=[x], writes=[out])
    tensors = {"x": filled(bench.driver, 1.0, 1024), "out": filled(bench.driver, 0.0, 1024)}
    graph = make_graph(plan, tensors, way, driver=bench.driver)
    gc.collect()
    others = [filled(bench.driver, float("nan"), 1024) for _ in range(8)]
    with graph.instantiate() as executable:
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert tensors["out"].tolist() == [6.0] * 1024
    assert len(others) == 8


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_a_call_that_reads_on_the_host_is_explained(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    plan.call(lambda x: x.sum().item(), plan.buffer("x", (4,)))
    with pytest.raises(CaptureError, match="STREAM_CAPTURE"):
        make_graph(plan, {"x": filled(bench.driver, 1.0)}, way)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_of_a_call_passes_unchanged(bench: Bench, way: str) -> None:
    def fail(x: Any) -> None:
        raise KeyError("mine")

    plan = GraphPlan()
    plan.call(fail, plan.buffer("x", (4,)))
    with pytest.raises(KeyError, match="mine"):
        do(plan, {"x": filled(bench.driver, 1.0)}, way, bench.stream)
    bench.stream.synchronize()


@pytest.mark.parametrize("way", WAYS)
def test_a_view_that_its_library_cannot_have_is_refused_by_node_and_buffer(way: str) -> None:
    plan = GraphPlan()
    plan.call(lambda x: x.add_(1), plan.buffer("x", (4,))[::-1], name="backwards")
    driver = graphcore.open_driver("emulated")
    with pytest.raises(PlanError, match=r"node 'backwards': .*buffer 'x'.*cannot be passed"):
        do(plan, {"x": torch.zeros(4)}, way, driver.stream())


@pytest.mark.parametrize("kind", ["body", "embedded"])
def test_a_call_that_cannot_be_captured_inside_a_capture_says_what_to_do(kind: str) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (1,))
    if kind == "body":
        taken = plan.condition("taken")
        plan.launch(set_value, ONE_BLOCK, taken, 1)
        with plan.if_then(taken) as body:
            body.call(lambda x: x.add_(1), x, name="inner")
    else:
        layer = GraphPlan("layer")
        layer.call(lambda x: x.add_(1), layer.buffer("x", (1,)), name="inner")
        plan.embed(layer, {"x": x})
    driver = graphcore.open_driver("emulated")
    with (
        pytest.raises(PlanError, match=r"node 'inner'.*build the plan"),
        graphcore.capture(driver=driver),
    ):
        plan.run({"x": torch.zeros(1)}, driver=driver)


def test_a_call_in_a_body_whose_copies_have_no_kernel_is_refused() -> None:
    plan = GraphPlan()
    x, y, taken = plan.buffer("x", (4,)), plan.buffer("y", (4,)), plan.condition("taken")
    plan.launch(set_value, ONE_BLOCK, taken, 1)
    inner = GraphPlan("inner")
    inner.memcpy(inner.buffer("to", (4,)), inner.buffer("of", (4,)))
    with plan.if_then(taken) as body:
        body.embed(inner, {"to": x, "of": y})
    tensors = {"x": torch.zeros(4), "y": torch.ones(4)}
    with pytest.raises(PlanError, match=r"copy_kernel.*conditional body"):
        plan.build(tensors)
    plan.build(tensors, copy_kernel=strided_copy)
