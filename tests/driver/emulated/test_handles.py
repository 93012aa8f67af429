"""Handles: dead, foreign and wrong ones answer CUDA's errors; several devices; a closed driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, fill_1d, refused
from helpers.kernels import ONE_BLOCK, add_one, axpy

from graphcore.driver import LEGACY_STREAM, open_driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    CaptureState,
    ChildParams,
    CopyOperand,
    EmptyParams,
    EventParams,
    HostParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    OpaqueParams,
    UpdateResult,
)
from graphcore.errors import ConfigurationError, CudaError

INVALID = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE")

# calls about something with the handle that no driver gave out
UNKNOWN: dict[str, Callable[[Bench, int], object]] = {
    "destroy_stream": lambda b, h: b.driver.destroy_stream(h),
    "destroy_legacy_stream": lambda b, _: b.driver.destroy_stream(LEGACY_STREAM),
    "synchronize_stream": lambda b, h: b.driver.synchronize_stream(h),
    "begin_capture": lambda b, h: b.driver.begin_capture(h, "relaxed"),
    "begin_capture_graph": lambda b, h: b.driver.begin_capture(b.stream.handle, "relaxed", graph=h),
    "destroy_event": lambda b, h: b.driver.destroy_event(h),
    "wait_event": lambda b, h: b.driver.wait_event(b.stream.handle, h),
    "function_info": lambda b, h: b.driver.function_info(h),
    "launch": lambda b, h: b.driver.launch(h, ONE_BLOCK, (), b.stream.handle),
    "destroy_graph": lambda b, h: b.driver.destroy_graph(h),
    "clone_graph": lambda b, h: b.driver.clone_graph(h),
    "nodes": lambda b, h: b.driver.nodes(h),
    "add_node": lambda b, h: b.driver.add_node(h, [], EmptyParams()),
    "add_node_dependency": lambda b, h: b.driver.add_node(b.new_graph(), [h], EmptyParams()),
    "add_child": lambda b, h: b.add(b.new_graph(), ChildParams(h)),
    "add_kernel": lambda b, h: b.add(b.new_graph(), KernelParams(h, ONE_BLOCK, ())),
    "add_event": lambda b, h: b.add(b.new_graph(), EventParams(h, NodeKind.EVENT_WAIT)),
    "destroy_node": lambda b, h: b.driver.destroy_node(h),
    "node_params": lambda b, h: b.driver.node_params(h),
    "instantiate": lambda b, h: b.driver.instantiate(h),
    "destroy_exec": lambda b, h: b.driver.destroy_exec(h),
    "launch_graph": lambda b, h: b.driver.launch_graph(h, b.stream.handle),
    "bind_launch": lambda b, h: b.driver.bind_launch(h, b.stream.handle),
    "update_exec": lambda b, h: b.driver.update_exec(h, b.new_graph()),
}


@pytest.fixture
def bench() -> Bench:
    return Bench(EmulatedDriver())


@pytest.mark.parametrize("call", UNKNOWN)
@pytest.mark.parametrize("handle", [0x123456, 2**63], ids=["small", "large"])
def test_an_unknown_handle_is_an_error_of_cuda(bench: Bench, call: str, handle: int) -> None:
    with pytest.raises(CudaError) as caught:
        UNKNOWN[call](bench, handle)
    assert caught.value.code in INVALID


@pytest.mark.parametrize("call", UNKNOWN)
def test_a_handle_of_another_kind_is_an_error_of_cuda(bench: Bench, call: str) -> None:
    wrong = bench.driver.create_conditional(bench.new_graph())
    with pytest.raises(CudaError) as caught:
        UNKNOWN[call](bench, wrong)
    assert caught.value.code in INVALID


def test_everything_is_destroyed_once() -> None:
    driver = EmulatedDriver()
    graph = driver.create_graph()
    things: list[tuple[Callable[[int], None], int]] = [
        (driver.destroy_exec, driver.instantiate(graph)),
        (driver.destroy_graph, graph),
        (driver.destroy_event, driver.create_event(timing=False)),
        (driver.destroy_stream, driver.create_stream(blocking=True)),
        (driver.free, driver.alloc(8)),
        (driver.free_pinned, driver.alloc_pinned(8)),
    ]
    for destroy, handle in things:
        destroy(handle)
        with pytest.raises(CudaError) as caught:
            destroy(handle)
        assert caught.value.code in INVALID


def test_handles_of_another_driver_are_unknown() -> None:
    stream = EmulatedDriver().create_stream(blocking=False)
    with refused("INVALID_HANDLE"):
        EmulatedDriver().synchronize_stream(stream)


def test_node_handles_die_with_their_graph(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.driver.create_graph()
    inner = bench.new_graph()
    inside = bench.add_kernel(inner, add_one, x, 1)
    child = bench.add(graph, ChildParams(inner))
    node = bench.add_kernel(graph, add_one, x, 1)
    params = bench.driver.node_params(child)
    assert isinstance(params, ChildParams)
    (embedded,) = bench.driver.nodes(params.graph)
    executable = bench.instantiate(graph)
    bench.driver.destroy_graph(graph)
    for handle in (node, child, embedded):
        with refused("INVALID_VALUE"):
            bench.driver.node_params(handle)
        with refused("INVALID_VALUE"):
            bench.driver.set_exec_node_params(
                executable, handle, bench.kernel_params(add_one, x, 1)
            )
    assert bench.driver.node_kind(inside) is NodeKind.KERNEL


def test_after_close_only_giving_back_works() -> None:
    driver = open_driver("emulated")
    stream = driver.create_stream(blocking=False)
    driver.begin_capture(stream, "thread_local")
    driver.close()
    for call in (
        driver.create_graph,
        lambda: driver.alloc(8),
        lambda: driver.create_stream(blocking=False),
        lambda: driver.function(add_one),
        driver.synchronize,
    ):
        with pytest.raises(CudaError, match="the driver is closed") as caught:
            call()
        assert caught.value.code == "CUDA_ERROR_INVALID_CONTEXT"
    driver.destroy_graph(driver.end_capture(stream))
    driver.destroy_stream(stream)
    driver.close()


# ---- several devices ----------------------------------------------------------------------------


def test_the_drivers_of_one_machine_share_handles_and_know_their_devices() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    assert (first.device, second.device) == (0, 1)
    assert first.context_id() != second.context_id()
    stream = second.create_stream(blocking=False)
    assert first.stream_device(stream) == 1
    assert second.stream_device(LEGACY_STREAM) == 1
    address = second.alloc(64)
    found = first.allocation_of(address)
    assert found is not None
    assert found.device == 1
    assert first.memory_info()[0] - second.memory_info()[0] == 64
    with pytest.raises(ConfigurationError, match="device: expected 0 to 1"):
        first.for_device(2)


def test_a_kernel_of_one_device_does_not_run_on_anothers_stream() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    stream = second.create_stream(blocking=False)
    x = second.alloc(4)
    assert first.function(add_one) != second.function(add_one)
    with refused("INVALID_HANDLE"):
        first.launch(first.function(add_one), ONE_BLOCK, add_one.pack(x, 1), stream)
    second.launch(second.function(add_one), ONE_BLOCK, add_one.pack(x, 1), stream)


def test_an_event_is_recorded_on_its_own_device_and_waited_for_on_any() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    event = first.create_event(timing=False)
    here, there = first.create_stream(blocking=False), second.create_stream(blocking=False)
    with refused("INVALID_HANDLE"):
        first.record_event(event, there)
    first.record_event(event, here)
    second.wait_event(there, event)


def test_waiting_for_one_device_leaves_a_capture_on_another_alone() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    stream = second.create_stream(blocking=True)
    second.begin_capture(stream, "relaxed")
    first.synchronize()
    first.synchronize_stream(LEGACY_STREAM)
    assert second.capture_status(stream).state is CaptureState.ACTIVE
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        second.synchronize()
    with refused("STREAM_CAPTURE_INVALIDATED"):
        second.end_capture(stream)


def test_an_update_may_not_move_a_kernel_to_another_device() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    x = first.alloc(4)
    graphs = []
    for driver in (first, second):
        graph = driver.create_graph()
        params = KernelParams(driver.function(add_one), ONE_BLOCK, add_one.pack(x, 1))
        node = driver.add_node(graph, [], params)
        graphs.append((graph, node, params))
    executable = first.instantiate(graphs[0][0])
    answer = first.update_exec(executable, graphs[1][0])
    assert answer.result is UpdateResult.UNSUPPORTED_FUNCTION_CHANGE
    assert answer.node == graphs[1][1]
    with refused("INVALID_VALUE"):
        first.set_exec_node_params(executable, graphs[0][1], graphs[1][2])


# ---- parameters that never reach a device -------------------------------------------------------


REFUSED_PARAMS: dict[str, Callable[[Bench, int], object]] = {
    "arguments_missing": lambda b, x: KernelParams(
        b.driver.function(axpy), ONE_BLOCK, add_one.pack(x, 1)
    ),
    "host_without_callback": lambda *_: HostParams(None, 1234, 0),
    "event_of_another_kind": lambda b, _: EventParams(b.new_event().handle, NodeKind.EMPTY),
    "copy_to_nowhere": lambda _, x: MemcpyParams(CopyOperand(0), CopyOperand(x), 4),
    "copy_no_rows": lambda _, x: MemcpyParams(CopyOperand(x), CopyOperand(x), 4, 0),
    "copy_too_few_rows": lambda _, x: MemcpyParams(
        CopyOperand(x, pitch=4, rows=1), CopyOperand(x, pitch=4, rows=2), 4, 2, 2
    ),
    "fill_nothing": lambda _, x: fill_1d(x, 0, 0),
    "fill_negative": lambda _, x: fill_1d(x, 0, -1),
    "fill_value_too_wide": lambda _, x: fill_1d(x, 256, 1, 1),
    "fill_nowhere": lambda *_: fill_1d(0, 0, 1),
    "fill_misaligned": lambda _, x: fill_1d(x + 1, 0, 1, 4),
    "fill_pitch": lambda _, x: MemsetParams(x, 0, 4, 4, 2, 8),
}


@pytest.mark.parametrize("case", REFUSED_PARAMS)
def test_parameters_that_make_no_sense_are_refused(bench: Bench, case: str) -> None:
    x = bench.put([1, 2])
    graph = bench.new_graph()
    with refused("INVALID_VALUE"):
        bench.add(graph, REFUSED_PARAMS[case](bench, x))  # type: ignore[arg-type]
    assert bench.driver.nodes(graph) == []


def test_nodes_that_are_not_decoded_cannot_be_made(bench: Bench) -> None:
    with refused("NOT_SUPPORTED"):
        bench.add(bench.new_graph(), OpaqueParams(NodeKind.SEMAPHORE_WAIT))


def test_a_graph_cannot_hold_itself(bench: Bench) -> None:
    graph = bench.new_graph()
    with refused("INVALID_VALUE"):
        bench.add(graph, ChildParams(graph))
