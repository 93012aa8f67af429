"""Injected faults: each method of the protocol fails on demand, before doing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, fill_1d
from helpers.kernels import ONE_BLOCK, add_one

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import EmptyParams
from graphcore.driver.tensor_map import TensorMap
from graphcore.errors import ConfigurationError, CudaError


@pytest.fixture
def bench() -> Any:
    bench = Bench(EmulatedDriver())
    yield bench
    bench.driver.faults.clear()  # type: ignore[attr-defined]
    bench.close()


def _graph(bench: Bench) -> Any:
    graph = bench.new_graph()
    bench.add(graph, EmptyParams())
    return graph


# one call of every method with arguments that would do
CALLS: dict[str, Callable[[Bench], object]] = {
    "device_info": lambda b: b.driver.device_info(),
    "context_id": lambda b: b.driver.context_id(),
    "synchronize": lambda b: b.driver.synchronize(),
    "memory_info": lambda b: b.driver.memory_info(),
    "close": lambda b: b.driver.for_device(0).close(),  # type: ignore[attr-defined]
    "create_stream": lambda b: b.driver.create_stream(blocking=False),
    "destroy_stream": lambda b: b.driver.destroy_stream(b.driver.create_stream(blocking=False)),
    "synchronize_stream": lambda b: b.driver.synchronize_stream(b.stream.handle),
    "query_stream": lambda b: b.driver.query_stream(b.stream.handle),
    "stream_is_blocking": lambda b: b.driver.stream_is_blocking(b.stream.handle),
    "stream_device": lambda b: b.driver.stream_device(b.stream.handle),
    "wait_event": lambda b: b.driver.wait_event(b.stream.handle, b.new_event().handle),
    "create_event": lambda b: b.driver.create_event(timing=False),
    "destroy_event": lambda b: b.driver.destroy_event(b.driver.create_event(timing=False)),
    "record_event": lambda b: b.driver.record_event(b.new_event().handle, b.stream.handle),
    "synchronize_event": lambda b: b.driver.synchronize_event(b.new_event().handle),
    "query_event": lambda b: b.driver.query_event(b.new_event().handle),
    "elapsed_ms": lambda b: b.driver.elapsed_ms(b.new_event().handle, b.new_event().handle),
    "alloc": lambda b: b.driver.alloc(64),
    "free": lambda b: b.driver.free(b.driver.alloc(64)),
    "alloc_pinned": lambda b: b.driver.alloc_pinned(64),
    "free_pinned": lambda b: b.driver.free_pinned(b.driver.alloc_pinned(4)),
    "copy": lambda b: b.driver.copy(copy_1d(b.alloc(4), b.alloc(4), 4), b.stream.handle),
    "fill": lambda b: b.driver.fill(fill_1d(b.alloc(4), 0, 1), b.stream.handle),
    "read": lambda b: b.driver.read(b.alloc(4), 4),
    "write": lambda b: b.driver.write(b.driver.alloc(4), b"1234"),
    "allocation_of": lambda b: b.driver.allocation_of(b.alloc(4)),
    "function": lambda b: b.driver.function(add_one),
    "encode_tensor_map": lambda b: b.driver.encode_tensor_map(
        TensorMap(b.alloc(1024), 2, (64, 8), (128,), (64, 8))
    ),
    "function_info": lambda b: b.driver.function_info(b.kernel_params(add_one, 256, 1).function),
    "launch": lambda b: b.driver.launch(
        b.kernel_params(add_one, 256, 1).function,
        ONE_BLOCK,
        add_one.pack(b.alloc(4), 1),
        b.stream.handle,
    ),
    "launch_host": lambda b: b.driver.launch_host(lambda: None, b.stream.handle),
    "begin_capture": lambda b: b.driver.begin_capture(b.stream.handle, "relaxed"),
    "end_capture": lambda b: b.driver.end_capture(b.stream.handle),
    "capture_status": lambda b: b.driver.capture_status(b.stream.handle),
    "set_capture_frontier": lambda b: b.driver.set_capture_frontier(b.stream.handle, []),
    "exchange_capture_mode": lambda b: b.driver.exchange_capture_mode("global"),
    "create_graph": lambda b: b.driver.create_graph(),
    "destroy_graph": lambda b: b.driver.destroy_graph(b.driver.create_graph()),
    "clone_graph": lambda b: b.driver.clone_graph(_graph(b)),
    "add_node": lambda b: b.driver.add_node(b.new_graph(), [], EmptyParams()),
    "destroy_node": lambda b: b.driver.destroy_node(b.driver.nodes(_graph(b))[0]),
    "add_edges": lambda b: b.driver.add_edges(_graph(b), []),
    "remove_edges": lambda b: b.driver.remove_edges(_graph(b), []),
    "nodes": lambda b: b.driver.nodes(b.new_graph()),
    "edges": lambda b: b.driver.edges(b.new_graph()),
    "node_kind": lambda b: b.driver.node_kind(b.add(b.new_graph(), EmptyParams())),
    "node_params": lambda b: b.driver.node_params(b.add(b.new_graph(), EmptyParams())),
    "set_node_params": lambda b: b.driver.set_node_params(
        b.add(b.new_graph(), EmptyParams()), EmptyParams()
    ),
    "create_conditional": lambda b: b.driver.create_conditional(b.new_graph()),
    "instantiate": lambda b: b.driver.instantiate(_graph(b)),
    "destroy_exec": lambda b: b.driver.destroy_exec(b.driver.instantiate(_graph(b))),
    "launch_graph": lambda b: b.driver.launch_graph(b.instantiate(_graph(b)), b.stream.handle),
    "bind_launch": lambda b: b.driver.bind_launch(b.instantiate(_graph(b)), b.stream.handle),
    "upload": lambda b: b.driver.upload(b.instantiate(_graph(b)), b.stream.handle),
    "update_exec": lambda b: b.driver.update_exec(b.instantiate(_graph(b)), _graph(b)),
    "set_exec_node_params": lambda b: b.driver.set_exec_node_params(
        b.instantiate(_graph(b)), b.add(b.new_graph(), EmptyParams()), EmptyParams()
    ),
    "set_node_enabled": lambda b: b.driver.set_node_enabled(
        b.instantiate(_graph(b)), b.add(b.new_graph(), EmptyParams()), False
    ),
    "node_enabled": lambda b: b.driver.node_enabled(
        b.instantiate(_graph(b)), b.add(b.new_graph(), EmptyParams())
    ),
}


def test_the_calls_are_all_of_the_protocol_that_talks_to_a_driver() -> None:
    assert set(CALLS) == set(Driver.__abstractmethods__) - {"raise_launch"}


@pytest.mark.parametrize("call", CALLS)
def test_a_fault_fires_once_with_its_code_and_is_gone(bench: Bench, call: str) -> None:
    faults = bench.driver.faults  # type: ignore[attr-defined]
    faults.inject(call, code="CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(CudaError) as caught:
        CALLS[call](bench)
    assert caught.value.code == "CUDA_ERROR_LAUNCH_FAILED"
    assert caught.value.is_sticky
    assert "injected" in str(caught.value)
    # the next call does not meet it again
    try:
        CALLS[call](bench)
    except CudaError as error:
        assert error.code != "CUDA_ERROR_LAUNCH_FAILED"  # noqa: PT017


def test_a_fault_waits_for_good_calls_and_fires_as_often_as_told(bench: Bench) -> None:
    bench.driver.faults.inject("memory_info", count=2, after=1)  # type: ignore[attr-defined]
    outcomes = []
    for _ in range(5):
        try:
            bench.driver.memory_info()
            outcomes.append("good")
        except CudaError as error:
            outcomes.append(error.code)
    unknown = "CUDA_ERROR_UNKNOWN"
    assert outcomes == ["good", unknown, unknown, "good", "good"]


def test_a_faulty_launch_runs_nothing(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    executable = bench.instantiate(graph)
    launch = bench.driver.bind_launch(executable, bench.stream.handle)
    bench.driver.faults.inject("launch_graph", after=1)  # type: ignore[attr-defined]
    launch()
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        launch()
    launch()
    assert bench.get(x, 1) == [3]


@pytest.mark.parametrize(
    ("call", "count", "after"),
    [("cuMemAlloc", 1, 0), ("raise_launch", 1, 0), ("alloc", 0, 0), ("alloc", 1, -1)],
)
def test_a_fault_that_could_never_fire_is_refused(
    bench: Bench, call: str, count: int, after: int
) -> None:
    with pytest.raises(ConfigurationError, match=r"faults\.inject"):
        bench.driver.faults.inject(call, count, after)  # type: ignore[attr-defined]
