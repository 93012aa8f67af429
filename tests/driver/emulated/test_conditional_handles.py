"""Conditional handles: who may set them, and how long they live."""

from __future__ import annotations

import gc

import pytest
from helpers.contract import Bench, refused
from helpers.kernels import add_one

from graphcore.driver.emulated import EmulatedDriver, set_conditional
from graphcore.driver.records import ConditionalParams
from graphcore.errors import CudaError


def test_a_value_set_by_hand_decides_where_launches_do_not_assign() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.put([1])
    graph = bench.new_graph()
    handle = driver.create_conditional(graph, assign_at_launch=False)
    params = driver.node_params(bench.add(graph, ConditionalParams(handle, "if")))
    assert isinstance(params, ConditionalParams)
    bench.add_kernel(params.bodies[0], add_one, x, 1)
    executable = bench.instantiate(graph)
    bench.replay(executable)
    assert bench.get(x, 1) == [1]
    driver.set_conditional(handle, 1)
    bench.replay(executable, times=2)
    assert bench.get(x, 1) == [3]
    bench.close()


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_value_is_an_unsigned_32_bit_integer(value: int) -> None:
    driver = EmulatedDriver()
    graph = driver.create_graph()
    with refused("INVALID_VALUE"):
        driver.create_conditional(graph, value)
    handle = driver.create_conditional(graph)
    with pytest.raises(CudaError, match="32-bit"):
        set_conditional(handle, value)


def test_a_handle_dies_with_everything_that_has_it() -> None:
    driver = EmulatedDriver()
    graph = driver.create_graph()
    handle = driver.create_conditional(graph)
    set_conditional(handle, 1)
    driver.destroy_graph(graph)
    gc.collect()
    with pytest.raises(CudaError, match="no conditional has handle"):
        set_conditional(handle, 1)


def test_a_conditional_of_an_unknown_form_is_refused() -> None:
    driver = EmulatedDriver()
    graph = driver.create_graph()
    handle = driver.create_conditional(graph)
    with pytest.raises(CudaError, match="form: expected if, while or switch, got 'until'"):
        driver.add_node(graph, [], ConditionalParams(handle, "until"))
    assert driver.nodes(graph) == []
