"""Capturing a plan: exactly its order on one stream, options of captures, and what stops it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from graphcore_kernels import strided_copy
from helpers.contract import Bench
from helpers.kernels import ONE_BLOCK, add_one, axpy, count_down, scale, set_value
from helpers.plan_sites import Site
from helpers.tensors import filled

import graphcore
from graphcore import GraphPlan, LaunchConfig
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState, NodeKind
from graphcore.errors import CaptureError, ConfigurationError, CudaError, PlanError


def _diamond(site: Site) -> None:
    x, y, z = (site.put(name, [1.0, 2.0]) for name in "xyz")
    site.plan.launch(add_one, ONE_BLOCK, x, 2)
    site.plan.launch(axpy, ONE_BLOCK, 2.0, x, y, 2)
    site.plan.launch(axpy, ONE_BLOCK, 3.0, x, z, 2)
    site.plan.launch(axpy, ONE_BLOCK, 1.0, y, z, 2)


def test_one_stream_captures_branches_that_stay_apart(bench: Bench) -> None:
    site = Site(bench)
    _diamond(site)
    graph = site.graph("capture")
    assert set(graph.snapshot().edges) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    with graph.instantiate() as executable:
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert site.read("z") == [1 + 6 + 5, 2 + 9 + 8]


def test_ends_that_nothing_joins_are_all_in_the_graph(bench: Bench) -> None:
    site = Site(bench)
    for name in "xyz":
        site.plan.launch(add_one, ONE_BLOCK, site.put(name, [0]), 1)
    graph = site.graph("capture")
    assert graph.snapshot().edges == ()
    with graph.instantiate() as executable:
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert [site.read(name) for name in "xyz"] == [[1]] * 3


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_options_of_a_capture_are_taken(bench: Bench, mode: str) -> None:
    site = Site(bench)
    _diamond(site)
    graph = site.graph("capture", mode=mode, on_legacy_work="ignore", expect=4)
    assert len(graph.snapshot().nodes) == 4
    stream = bench.new_stream()
    graph = site.graph("capture", stream=stream, on_legacy_work="ignore")
    assert stream in graph.owners
    with pytest.raises(CaptureError, match="expected at least 5 nodes"):
        site.graph("capture", expect=5)
    with pytest.raises(ConfigurationError, match="mode"):
        site.graph("capture", mode="sideways")


def test_work_goes_through_the_stream_where_a_stream_call_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("launch", "copy", "fill", "launch_host", "record_event", "wait_event", "add_node"):
        method = getattr(EmulatedDriver, name)

        def counted(driver: Any, *args: Any, _name: str = name, _method: Any = method, **kw: Any):
            calls.append(_name)
            return _method(driver, *args, **kw)

        monkeypatch.setattr(EmulatedDriver, name, counted)
    site = Site(Bench(graphcore.open_driver("emulated")))
    x, y = site.put("x", [0, 0]), site.put("y", [0, 0])
    event = site.plan.event("e")
    site.plan.launch(add_one, ONE_BLOCK, x, 2)
    site.plan.memcpy(y, x)
    site.plan.memset(x, 0)
    site.plan.callback(lambda: None)
    site.plan.record(event)
    site.plan.wait(event)
    site.plan.join()
    site.graph("capture")
    assert calls == ["launch", "copy", "fill", "launch_host", "record_event", "wait_event",
                     "add_node"]  # fmt: skip


def test_a_plan_in_a_capture_comes_after_what_was_captured_and_before_what_follows(
    bench: Bench,
) -> None:
    site = Site(bench)
    _diamond(site)
    before = filled(bench.driver, 1.0)
    with graphcore.capture(driver=bench.driver) as capture:
        bench.launch(add_one, before.data_ptr(), 4, stream=capture.stream)
        site.plan.run(site.buffers, capture.stream)
        bench.launch(add_one, before.data_ptr(), 4, stream=capture.stream)
    edges = set(capture.graph.snapshot().edges)
    assert edges == {(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)}
    assert {"x", "y", "z"} <= set(capture.graph.owners.labels())


def test_an_empty_plan_in_a_capture_leaves_its_order(bench: Bench) -> None:
    x = filled(bench.driver, 1.0)
    with graphcore.capture(driver=bench.driver) as capture:
        bench.launch(add_one, x.data_ptr(), 4, stream=capture.stream)
        GraphPlan().run({}, capture.stream, driver=bench.driver)
        bench.launch(scale, x.data_ptr(), 2.0, 4, stream=capture.stream)
    assert capture.graph.snapshot().edges == ((0, 1),)


def test_a_capture_that_fails_leaves_the_stream_usable_and_no_graph(bench: Bench) -> None:
    site = Site(bench)
    x = site.put("x", [0])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    greedy = LaunchConfig((1, 1, 1), (32, 1, 1), shared_bytes=1 << 24)
    site.plan.launch(add_one, greedy, x, 1, name="too much shared memory")
    stream = bench.new_stream(blocking=True)
    with pytest.raises((CudaError, CaptureError)):
        site.graph("capture", stream=stream)
    assert bench.driver.capture_status(stream.handle).state is CaptureState.NONE
    bench.launch(add_one, site.address("x"), 1, stream=stream)
    stream.synchronize()
    assert site.read("x") == [1]


def test_conditional_and_memory_nodes_are_captured_in_their_place(bench: Bench) -> None:
    site = Site(bench)
    plan = site.plan
    x, n = site.put("x", [1.0]), site.put("n", [3], "int32")
    scratch = plan.allocate("scratch", (1,))
    plan.memcpy(scratch, x)
    more = plan.condition("more", 1)
    with plan.while_loop(more) as body:
        body.launch(axpy, ONE_BLOCK, 1.0, scratch, x, 1)
        body.launch(count_down, ONE_BLOCK, more, n)
    plan.launch(scale, ONE_BLOCK, x, 2.0, 1)
    plan.deallocate(scratch)
    graph = site.graph("capture")
    assert [node.kind for node in graph.snapshot().nodes] == [
        NodeKind.ALLOC,
        NodeKind.MEMCPY,
        NodeKind.CONDITIONAL,
        NodeKind.KERNEL,
        NodeKind.FREE,
    ]
    site.do("capture")
    assert site.read("x") == [8]


def test_a_second_capture_on_the_thread_is_refused_and_the_first_unharmed(bench: Bench) -> None:
    site = Site(bench)
    _diamond(site)
    x = filled(bench.driver, 1.0)
    with graphcore.capture(driver=bench.driver) as capture:
        with pytest.raises(CaptureError, match="under way"):
            site.graph("capture")
        bench.launch(add_one, x.data_ptr(), 4, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1


def test_building_goes_on_inside_a_capture(bench: Bench) -> None:
    site = Site(bench)
    _diamond(site)
    x = filled(bench.driver, 1.0)
    with graphcore.capture(driver=bench.driver) as capture:
        graph = site.graph()
        bench.launch(add_one, x.data_ptr(), 4, stream=capture.stream)
    assert len(graph.snapshot().nodes) == 4
    assert len(capture.graph.snapshot().nodes) == 1


def test_a_plan_that_is_wrong_breaks_no_capture(bench: Bench, caplog: Any) -> None:
    site = Site(bench)
    x, taken = site.put("x", [0]), site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_then(taken) as body:
        body.memcpy(x, x, name="onto itself")
    y = filled(bench.driver, 1.0)
    with (
        caplog.at_level(logging.INFO, "graphcore"),
        graphcore.capture(driver=bench.driver) as capture,
    ):
        with pytest.raises(PlanError, match="onto itself"):
            site.plan.run(site.buffers, capture.stream, copy_kernel=strided_copy)
        bench.launch(add_one, y.data_ptr(), 4, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1
