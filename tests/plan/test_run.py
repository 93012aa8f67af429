"""Running a plan directly: order, streams, small graphs for conditions, memory, and refusals."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.contract import Bench, in_thread
from helpers.kernels import ONE_BLOCK, add_one, count_down, scale, set_value
from helpers.plan_sites import WAYS, Site, do
from helpers.tensors import filled, replay

import graphcore
from graphcore import Buffer, GraphPlan, open_driver
from graphcore.driver import LEGACY_STREAM
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CacheTypeError, CaptureError, CudaError, PlanError


class Watched:
    """Which calls an emulated driver gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.calls: list[str] = []
        for name in names:
            monkeypatch.setattr(EmulatedDriver, name, self._counted(name))

    def _counted(self, name: str) -> Any:
        method = getattr(EmulatedDriver, name)

        def counted(driver: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return method(driver, *arguments, **options)

        return counted


def test_the_nodes_run_on_the_given_stream(bench: Bench) -> None:
    site = Site(bench)
    site.plan.launch(add_one, ONE_BLOCK, site.put("x", [0]), 1)
    site.plan.run(site.buffers, bench.stream, driver=bench.driver)
    bench.stream.synchronize()
    assert site.read("x") == [1]


def test_without_a_stream_it_runs_on_the_current_one(bench: Bench) -> None:
    site = Site(bench)
    site.plan.launch(add_one, ONE_BLOCK, site.put("x", [0]), 1)
    site.plan.run(site.buffers)
    assert site.read("x") == [1]


def test_a_callback_runs_in_stream_order(bench: Bench) -> None:
    site, seen = Site(bench), []
    x = site.put("x", [0])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.callback(lambda: seen.append(1), reads=[x])
    site.plan.launch(scale, ONE_BLOCK, x, 3.0, 1)
    for _ in range(3):
        site.plan.run(site.buffers, bench.stream, driver=bench.driver)
    bench.stream.synchronize()
    assert seen == [1, 1, 1]
    assert site.read("x") == [39]


def test_an_event_is_recorded_for_real(bench: Bench) -> None:
    site = Site(bench)
    site.plan.launch(add_one, ONE_BLOCK, site.put("x", [0]), 1)
    site.plan.record(site.plan.event("done"))
    event = bench.new_event()
    site.plan.run(site.buffers, bench.stream, driver=bench.driver, events={"done": event})
    event.synchronize()
    assert site.read("x") == [1]


def test_only_what_uses_a_condition_becomes_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(Bench(open_driver("emulated")))
    x, n = site.put("x", [0]), site.put("n", [3], "int32")
    plan, more, last = site.plan, site.plan.condition("more", 1), site.plan.condition("last")
    plan.launch(add_one, ONE_BLOCK, x, 1)
    with plan.while_loop(more) as body:
        body.launch(add_one, ONE_BLOCK, x, 1)
        body.launch(count_down, ONE_BLOCK, more, n)
    plan.launch(scale, ONE_BLOCK, x, 2.0, 1)
    plan.launch(set_value, ONE_BLOCK, last, 1)
    plan.launch(scale, ONE_BLOCK, x, 2.0, 1)
    with plan.if_then(last) as body:
        body.launch(add_one, ONE_BLOCK, x, 1)
    watched = Watched(monkeypatch, "launch", "create_graph", "add_node")
    plan.run(site.buffers, driver=site.driver)
    assert site.read("x") == [17]
    assert watched.calls.count("launch") == 2  # before and between the graphs
    assert watched.calls.count("create_graph") == 2
    assert watched.calls.count("add_node") == 3 + 4


def test_overlapping_uses_of_conditions_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(Bench(open_driver("emulated")))
    x = site.put("x", [0])
    plan, one, two = site.plan, site.plan.condition("one"), site.plan.condition("two")
    plan.launch(set_value, ONE_BLOCK, one, 1)
    plan.launch(set_value, ONE_BLOCK, two, 1)
    for condition in (one, two):
        with plan.if_then(condition) as body:
            body.launch(add_one, ONE_BLOCK, x, 1)
    watched = Watched(monkeypatch, "launch", "create_graph")
    plan.run(site.buffers, driver=site.driver)
    assert site.read("x") == [2]
    assert watched.calls == ["create_graph"]


def test_memory_of_the_plan_is_given_back_when_the_work_is_done(bench: Bench) -> None:
    site = Site(bench)
    out = site.put("out", [0] * 4)
    scratch = site.plan.allocate("scratch", (1 << 20,))
    site.plan.memset(scratch, 2.0)
    site.plan.memcpy(out, scratch[-4:])
    site.plan.deallocate(scratch)
    site.plan.run(site.buffers, bench.stream, driver=bench.driver)  # loads what it needs
    gc.collect()
    bench.driver.synchronize()
    if bench.driver.is_emulated:
        free, _ = bench.driver.memory_info()
        for _ in range(5):
            site.plan.run(site.buffers, bench.stream, driver=bench.driver)
        gc.collect()
        assert bench.driver.memory_info()[0] == free
    assert site.read("out") == [2] * 4


def test_temporaries_outlive_the_call_that_launched_them(bench: Bench) -> None:
    site = Site(bench)
    x, n = site.put("x", [0]), site.put("n", [50], "int32")
    more = site.plan.condition("more", 1)
    with site.plan.while_loop(more) as body:
        body.launch(add_one, ONE_BLOCK, x, 1)
        body.launch(count_down, ONE_BLOCK, more, n)
    for _ in range(4):  # the first runs 50 times, the others once: n has passed 0
        site.plan.run(site.buffers, bench.stream, driver=bench.driver)
    gc.collect()
    bench.stream.synchronize()
    assert site.read("x") == [53]


def test_an_embedded_graph_runs_too(bench: Bench) -> None:
    inner = Site(bench, "inner")
    inner.plan.launch(add_one, ONE_BLOCK, inner.put("x", [1]), 1)
    site = Site(bench)
    site.buffers["x"] = inner.buffers["x"]
    x = site.plan.buffer("x", (1,))
    site.plan.embed(inner.graph(), reads=[x], writes=[x])
    site.plan.launch(scale, ONE_BLOCK, x, 10.0, 1)
    site.do("run", times=2)
    assert site.read("x") == [210]


def test_nothing_runs_where_a_later_node_cannot_be_lowered(bench: Bench) -> None:
    site = Site(bench)
    x, y = site.put("x", [1, 2, 3]), site.put("y", [0, 0, 0])
    site.plan.launch(add_one, ONE_BLOCK, x, 3)
    site.plan.memcpy(y, x[::-1])
    with pytest.raises(PlanError, match="copy_kernel"):
        site.do("run", copy_kernel=None)
    assert site.read("x") == [1, 2, 3]


def test_a_driver_error_half_way_is_told_and_leaves_the_stream_usable() -> None:
    driver = open_driver("emulated")
    site = Site(Bench(driver))
    x = site.put("x", [0])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.memset(x, 0)
    driver.faults.inject("fill", code="CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(CudaError, match="LAUNCH_FAILED"):
        site.plan.run(site.buffers, site.bench.stream)
    assert site.read("x") == [1]
    site.plan.run(site.buffers, site.bench.stream)
    assert site.read("x") == [0]


def test_a_stream_of_another_driver_is_refused(bench: Bench) -> None:
    plan = GraphPlan()
    plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (1,)), 1)
    buffers = {"x": Buffer.allocate(1, driver=bench.driver)}
    with pytest.raises(CacheTypeError, match="stream: expected a graphcore"):
        plan.run(buffers, "stream")
    if not bench.driver.is_emulated:
        with pytest.raises(CacheTypeError, match="stream: expected one of driver cuda"):
            plan.run(buffers, open_driver("emulated").stream())


@pytest.mark.gpu
def test_it_runs_on_torchs_current_stream() -> None:
    from helpers.tensors import cuda_driver

    driver = cuda_driver()
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    # by handle: to torch, the same stream taken from outside is another object
    plan.call(lambda x: x.mul_(torch.cuda.current_stream().cuda_stream == stream.cuda_stream), x)
    stream = torch.cuda.Stream()
    tensor = filled(driver, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        plan.run({"x": tensor})
        tensor.add_(1)
    torch.cuda.synchronize()
    assert tensor.tolist() == [3, 3, 3, 3]


def test_a_plan_runs_on_a_default_stream(bench: Bench) -> None:
    site = Site(bench)
    x = site.put("x", [1])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.callback(lambda: None)
    site.plan.run(site.buffers, driver=bench.driver)
    bench.driver.synchronize()
    assert site.read("x") == [2]
    do(site.plan, site.buffers, "run", bench.stream)
    assert site.read("x") == [3]


@pytest.mark.parametrize("is_other_thread", [False, True], ids=["this thread", "another thread"])
def test_a_run_on_the_legacy_stream_that_would_break_a_capture_is_refused_and_breaks_nothing(
    bench: Bench, is_other_thread: bool
) -> None:
    site = Site(bench)
    site.plan.launch(add_one, ONE_BLOCK, site.put("x", [0.0]), 1)
    y = bench.put([0.0])

    def run() -> None:
        with pytest.raises(CaptureError, match="run: expected a stream of its own") as caught:
            site.plan.run(site.buffers, LEGACY_STREAM, driver=bench.driver)
        assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"

    with graphcore.capture(driver=bench.driver) as capture:  # a blocking stream
        function, arguments = bench.driver.function(add_one), add_one.pack(y, 1)
        bench.driver.launch(function, ONE_BLOCK, arguments, capture.stream.handle)
        in_thread(run) if is_other_thread else run()
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert bench.get(y, 1) == [1.0]
    assert site.read("x") == [0.0]


@pytest.mark.parametrize("way", WAYS)
def test_an_unchecked_copy_between_shapes_that_differ_is_refused_by_name(
    bench: Bench, way: str
) -> None:
    for shape, dtype in (([[1.0, 2.0]], "float32"), ([1.0], "float32"), ([1.0, 2.0], "float64")):
        site = Site(bench)
        site.plan.memcpy(site.put("x", [0.0, 0.0]), site.put("y", shape, dtype), name="odd")
        with pytest.raises(PlanError, match="expected a copy of one shape and dtype") as caught:
            site.do(way, check=False)
        assert "'odd'" in str(caught.value)
        assert site.read("x") == [0.0, 0.0]
