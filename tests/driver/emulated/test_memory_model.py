"""What the emulated memory does beyond the contract: budgets, reuse, host views, graph memory."""

from __future__ import annotations

import ctypes
import gc

import numpy
import pytest
from helpers.contract import Bench, refused
from helpers.kernels import add_one

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.emulated.execution import BYTES_PER_NODE
from graphcore.driver.records import AllocParams, FreeParams
from graphcore.errors import ConfigurationError, CudaError


def test_the_device_has_as_much_memory_as_it_was_given() -> None:
    driver = EmulatedDriver(total_memory=1000)
    assert driver.device_info().total_memory == 1000
    first = driver.alloc(600)
    assert driver.memory_info() == (400, 1000)
    with pytest.raises(CudaError, match="asked for 500 bytes, 400 of 1000 are free"):
        driver.alloc(500)
    driver.free(first)
    driver.free(driver.alloc(500))
    assert driver.memory_info() == (1000, 1000)


def test_pinned_memory_is_not_the_devices() -> None:
    driver = EmulatedDriver(total_memory=1000)
    pinned = driver.alloc_pinned(5000)
    assert driver.memory_info() == (1000, 1000)
    driver.free_pinned(pinned)


@pytest.mark.parametrize("size", [0, -1])
def test_memory_of_no_bytes_is_refused(size: int) -> None:
    driver = EmulatedDriver()
    for allocate in (driver.alloc, driver.alloc_pinned):
        with refused("INVALID_VALUE"):
            allocate(size)


def test_more_than_the_host_has_is_out_of_memory() -> None:
    driver = EmulatedDriver(total_memory=2**62)
    with refused("OUT_OF_MEMORY"):
        driver.alloc(2**60)
    assert driver.memory_info()[0] == 2**62


def test_a_freed_block_comes_back_at_its_address_with_another_id() -> None:
    driver = EmulatedDriver()
    first = driver.alloc(4096)
    before = driver.allocation_of(first)
    driver.free(first)
    second = driver.alloc(4096)
    after = driver.allocation_of(second)
    assert second == first
    assert before is not None
    assert after is not None
    assert before.buffer_id != after.buffer_id


def test_freed_memory_can_still_be_read_without_harm() -> None:
    driver = EmulatedDriver()
    address = driver.alloc(8)
    driver.write(address, b"leftover")
    driver.free(address)
    assert driver.read(address, 8) == b"leftover"


def test_large_blocks_are_given_back_to_the_host_at_once() -> None:
    driver = EmulatedDriver()
    driver.free(driver.alloc(65 * 2**20))
    assert driver.memory_info()[0] == driver.memory_info()[1]


def test_device_memory_is_host_memory() -> None:
    driver = EmulatedDriver()
    array = numpy.arange(4, dtype="float32")
    assert driver.read(array.ctypes.data, 16) == array.tobytes()
    address = driver.alloc(4)
    driver.write(address, b"abcd")
    assert ctypes.string_at(address, 4) == b"abcd"
    with refused("INVALID_VALUE"):
        driver.read(0, 4)
    with refused("INVALID_VALUE"):
        driver.read(address, -1)


def test_an_executable_takes_device_memory_for_its_nodes() -> None:
    bench = Bench(EmulatedDriver())
    x = bench.put([1])
    graph = bench.new_graph()
    for _ in range(10):
        bench.add_kernel(graph, add_one, x, 1)
    free = bench.driver.memory_info()[0]
    executable = bench.driver.instantiate(graph)
    assert free - bench.driver.memory_info()[0] == 10 * BYTES_PER_NODE
    bench.driver.destroy_exec(executable)
    assert bench.driver.memory_info()[0] == free
    bench.close()


def test_an_executable_that_does_not_fit_is_out_of_memory_and_leaves_none() -> None:
    driver = EmulatedDriver(total_memory=BYTES_PER_NODE)
    graph = driver.create_graph()
    address = driver.alloc(1)
    driver.add_node(graph, [], AllocParams(1))
    with refused("OUT_OF_MEMORY"):
        driver.instantiate(graph)
    driver.free(address)
    driver.destroy_exec(driver.instantiate(graph))


def test_a_launch_whose_allocations_do_not_fit_runs_nothing() -> None:
    driver = EmulatedDriver(total_memory=100_000)
    graph = driver.create_graph()
    node = driver.add_node(graph, [], AllocParams(60_000))
    params = driver.node_params(node)
    assert isinstance(params, AllocParams)
    driver.add_node(graph, [node], FreeParams(params.address))
    executable = driver.instantiate(graph)
    stream = driver.create_stream(blocking=False)
    held = driver.alloc(50_000)
    with refused("OUT_OF_MEMORY"):
        driver.launch_graph(executable, stream)
    assert driver.allocation_of(params.address) is None
    driver.free(held)
    driver.launch_graph(executable, stream)


def test_an_address_a_graph_owned_is_free_for_others_once_the_graph_is_gone() -> None:
    driver = EmulatedDriver()
    graph = driver.create_graph()
    node = driver.add_node(graph, [], AllocParams(12_345))
    params = driver.node_params(node)
    assert isinstance(params, AllocParams)
    assert driver.alloc(12_345) != params.address
    driver.destroy_graph(graph)
    del node
    gc.collect()
    assert driver.alloc(12_345) == params.address


def test_an_allocation_outlives_the_graph_that_made_it_until_it_is_freed() -> None:
    driver = EmulatedDriver()
    graph = driver.create_graph()
    params = driver.node_params(driver.add_node(graph, [], AllocParams(64)))
    assert isinstance(params, AllocParams)
    executable = driver.instantiate(graph)
    driver.launch_graph(executable, driver.create_stream(blocking=False))
    driver.destroy_exec(executable)
    driver.destroy_graph(graph)
    gc.collect()
    assert driver.allocation_of(params.address) is not None
    driver.free(params.address)
    assert driver.allocation_of(params.address) is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"devices": 0}, "devices"),
        ({"order": "random"}, "order"),
        ({"total_memory": 0}, "total_memory"),
        ({"device": 1}, "device"),
        ({"device": -1}, "device"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_by_name(
    options: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: expected"):
        EmulatedDriver(**options)  # type: ignore[arg-type]
