"""strided_copy in captures: one kernel node, replayed on changed contents, updated in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy
import pytest
from graphcore_kernels import strided_copy
from graphcore_kernels._module import load
from helpers.strided_views import CASES, Pair, dense, device_buffers, like, random_bytes

import graphcore
from graphcore.driver import Driver, Stream, active, open_driver
from graphcore.driver.active import ActiveCapture
from graphcore.driver.records import GraphHandle, KernelParams, NodeKind, UpdateResult
from graphcore.errors import ConfigurationError, CudaError


class Captured:
    graph: GraphHandle


@contextmanager
def capturing(driver: Driver, stream: Stream, mode="thread_local") -> Iterator[Captured]:
    captured = Captured()
    driver.begin_capture(stream.handle, mode)
    try:
        yield captured
    except BaseException:
        with suppress(CudaError):
            driver.destroy_graph(driver.end_capture(stream.handle))
        raise
    captured.graph = driver.end_capture(stream.handle)


@contextmanager
def executable(driver: Driver, graph: GraphHandle) -> Iterator[int]:
    made = driver.instantiate(graph)
    try:
        yield made
    finally:
        driver.destroy_exec(made)
        driver.destroy_graph(graph)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize(
    "name", ["contiguous, odd", "odd rows", "transpose", "reshape without common axes"]
)
def test_a_captured_copy_replays_on_changed_contents(graphcore_driver, name, mode):
    driver, copy = graphcore_driver, CASES[name]
    poison = numpy.full(copy.dst.buffer_size, 0xFF, numpy.uint8)  # NaN in every float
    src = random_bytes(copy.src.buffer_size)
    with device_buffers(driver, poison, src) as (to, source), driver.stream() as stream:
        plan = strided_copy.plan(copy.dst.at(to, driver), copy.src.at(source, driver))
        with capturing(driver, stream, mode) as captured:
            plan.launch(stream)
        (node,) = driver.nodes(captured.graph)
        params = driver.node_params(node)
        assert isinstance(params, KernelParams)
        assert params.config == plan.config(driver)
        with executable(driver, captured.graph) as made:
            assert driver.read(to, poison.size) == poison.tobytes()
            for seed in (1, 2):
                content = random_bytes(src.size, seed)
                driver.write(source, content.tobytes())
                driver.write(to, poison.tobytes())
                driver.launch_graph(made, stream.handle)
                stream.synchronize()
                assert driver.read(to, poison.size) == copy.expected(poison, content).tobytes()


def row_copy(driver: Driver, to: int, source: int, rows: int):
    dst, src = like(lambda a: a[:, :64], rows, 72), dense(rows, 64)
    plan = strided_copy.plan(dst.at(to, driver), src.at(source, driver))
    return plan, Pair(dst, src)


@pytest.mark.parametrize("route", ["whole graph", "one node"])
def test_another_row_count_is_an_update_of_parameters(graphcore_driver, route):
    driver = graphcore_driver
    size = dense(40, 72).buffer_size
    poison, src = random_bytes(size, 1), random_bytes(size, 2)
    with device_buffers(driver, poison, src) as (to, source), driver.stream() as stream:
        plan, copy = row_copy(driver, to, source, 5)
        wider, wider_copy = row_copy(driver, to, source, 37)
        assert (wider.kernel, wider.config(driver)) == (plan.kernel, plan.config(driver))
        with capturing(driver, stream) as captured:
            plan.launch(stream)
        with executable(driver, captured.graph) as made:
            driver.launch_graph(made, stream.handle)
            stream.synchronize()
            after = copy.expected(poison, src)
            assert driver.read(to, size) == after.tobytes()
            update(driver, stream, made, captured.graph, wider, route)
            driver.write(to, poison.tobytes())
            driver.launch_graph(made, stream.handle)
            stream.synchronize()
            assert driver.read(to, size) == wider_copy.expected(poison, src).tobytes()
            assert driver.read(to, size) != after.tobytes()


@pytest.mark.parametrize("route", ["whole graph", "one node"])
def test_small_rows_are_updated_to_more_than_small_ones_and_back(graphcore_driver, route):
    driver = graphcore_driver
    size = dense(5000, 72).buffer_size
    poison, src = random_bytes(size, 1), random_bytes(size, 2)
    with device_buffers(driver, poison, src) as (to, source), driver.stream() as stream:
        small, large = (row_copy(driver, to, source, rows) for rows in (5, 5000))
        assert small[0].kernel is not large[0].kernel
        with capturing(driver, stream) as captured:
            small[0].launch(stream)
        with executable(driver, captured.graph) as made:
            for plan, copy in (large, small):
                update(driver, stream, made, captured.graph, plan, route)
                driver.write(to, poison.tobytes())
                driver.launch_graph(made, stream.handle)
                stream.synchronize()
                assert driver.read(to, size) == copy.expected(poison, src).tobytes()


def update(driver, stream, made, graph, plan, route):
    if route == "one node":
        (node,) = driver.nodes(graph)
        assert plan.kernel is not None
        function = load(driver, plan.kernel)
        params = KernelParams(function, plan.config(driver), plan.arguments)
        driver.set_exec_node_params(made, node, params)
        return
    with capturing(driver, stream) as captured:
        plan.launch(stream)
    try:
        assert driver.update_exec(made, captured.graph).result is UpdateResult.SUCCESS
    finally:
        driver.destroy_graph(captured.graph)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_kernel_may_be_used_first_inside_a_capture(graphcore_driver, mode):
    driver, copy = graphcore_driver, CASES["transpose"]
    dst, src = random_bytes(copy.dst.buffer_size), random_bytes(copy.src.buffer_size, 1)
    with device_buffers(driver, dst, src) as (to, source), driver.stream() as stream:
        with capturing(driver, stream, mode) as captured:
            strided_copy(copy.dst.at(to, driver), copy.src.at(source, driver), stream)
        with executable(driver, captured.graph) as made:
            driver.launch_graph(made, stream.handle)
            stream.synchronize()
            assert driver.read(to, dst.size) == copy.expected(dst, src).tobytes()


def test_no_elements_make_no_node(graphcore_driver):
    driver, empty = graphcore_driver, dense(0, 4)
    with driver.stream() as stream:
        with capturing(driver, stream) as captured:
            strided_copy(empty.at(0, driver), empty.at(0, driver), stream)
        assert driver.nodes(captured.graph) == []
        driver.destroy_graph(captured.graph)


def test_a_refused_copy_leaves_the_capture_going(graphcore_driver):
    driver, copy = graphcore_driver, CASES["pitched rows"]
    dst, src = random_bytes(copy.dst.buffer_size), random_bytes(copy.src.buffer_size, 1)
    with device_buffers(driver, dst, src) as (to, source), driver.stream() as stream:
        with capturing(driver, stream) as captured:
            with pytest.raises(ConfigurationError, match="src: expected 5856 elements"):
                strided_copy(copy.dst.at(to, driver), dense(7).at(source, driver), stream)
            strided_copy(copy.dst.at(to, driver), copy.src.at(source, driver), stream)
        assert [driver.node_kind(node) for node in driver.nodes(captured.graph)] == [
            NodeKind.KERNEL
        ]
        driver.destroy_graph(captured.graph)


def test_without_a_stream_a_copy_goes_to_the_capture_of_its_thread(graphcore_driver):
    driver, copy = graphcore_driver, CASES["pitched rows"]
    dst, src = random_bytes(copy.dst.buffer_size), random_bytes(copy.src.buffer_size, 1)
    with device_buffers(driver, dst, src) as (to, source):
        operands = copy.dst.at(to, driver), copy.src.at(source, driver)
        with graphcore.capture(driver=driver) as capture:
            strided_copy(*operands)
        with capture.graph as graph:
            assert graph.owners.labels()[-2:] == ("strided_copy dst", "strided_copy src")
            assert all(operand in graph.owners for operand in operands)
            assert len(graph.snapshot().nodes) == 1
            with graph.instantiate() as made, driver.stream() as stream:
                assert driver.read(to, dst.size) == dst.tobytes()
                made.launch(stream)
                stream.synchronize()
                assert driver.read(to, dst.size) == copy.expected(dst, src).tobytes()


def test_a_copy_on_a_stream_outside_the_capture_is_not_the_graphs():
    driver, copy = open_driver("emulated"), CASES["pitched rows"]
    dst, src = random_bytes(copy.dst.buffer_size), random_bytes(copy.src.buffer_size, 1)
    with device_buffers(driver, dst, src) as (to, source), driver.stream() as side:
        with graphcore.capture(driver=driver) as capture:
            strided_copy(copy.dst.at(to, driver), copy.src.at(source, driver), side)
        assert driver.read(to, dst.size) == copy.expected(dst, src).tobytes()
        with capture.graph as graph:
            assert "strided_copy dst" not in graph.owners.labels()
            assert not graph.snapshot().nodes


def test_a_capture_on_another_device_is_named():
    driver = open_driver("emulated")
    cpu = [dense(4).at(2**40 + 1024 * place, driver) for place in range(2)]
    cuda = [type(each)(each.address, (4,), (1,), "float32", 4, "cuda", 1) for each in cpu]
    with driver.stream() as stream:
        active.push(ActiveCapture(driver, stream.handle, "thread_local"))
        try:
            with pytest.raises(ConfigurationError, match=r"capture: expected .* cuda:1, got"):
                strided_copy(*cuda)
        finally:
            active.pop()


def test_torch_tensors_are_copied_in_a_capture_among_torchs_own_work():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    src = torch.arange(24.0).reshape(4, 6).requires_grad_()
    dst = torch.full((6, 4), torch.nan, requires_grad=True)
    with graphcore.capture(driver=open_driver("emulated")) as capture:
        strided_copy(dst, src.t())
        doubled = dst.detach() * 2
    with capture.graph as graph, graph.instantiate() as made:
        assert dst.isnan().all()
        for factor in (1.0, -3.0):
            with torch.no_grad():
                src.mul_(factor)
                dst.fill_(torch.nan)
            doubled.fill_(torch.nan)
            made.launch()
            assert torch.equal(dst, src.t())
            assert torch.equal(doubled, 2 * src.t())
