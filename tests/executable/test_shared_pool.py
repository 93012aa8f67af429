"""capture(pool=...): several captures into one torch memory pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tensors import cuda_driver, filled, replayed

import graphcore
from graphcore import CacheTypeError, ConfigurationError, Graph
from graphcore.driver import Driver
from graphcore.interop.torch import MemoryPool

BUCKETS = 64


def step(x: torch.Tensor) -> torch.Tensor:
    return ((x + 1) * 2 - x).sum(0, keepdim=True)


def test_graphs_that_share_a_pool_each_give_the_eager_result(graphcore_driver: Driver) -> None:
    pool = MemoryPool(graphcore_driver.device)
    inputs = [filled(graphcore_driver, value, 4, 3) for value in (1.0, 5.0)]
    graphs = [
        graphcore.capture_function(step, x, driver=graphcore_driver, pool=pool) for x in inputs
    ]
    for graph, x in zip(graphs, inputs, strict=True):
        assert replayed(graph, graph.outputs) == step(x).tolist()
    assert [graph.memory_report().shares_pool for graph in graphs] == [
        not graphcore_driver.is_emulated
    ] * 2


def test_captures_into_a_pool_take_its_stream(graphcore_driver: Driver) -> None:
    pool = MemoryPool(graphcore_driver.device)
    with graphcore.capture(driver=graphcore_driver, pool=pool) as one:
        pass
    with graphcore.capture(driver=graphcore_driver, pool=pool) as two:
        pass
    with graphcore.capture(driver=graphcore_driver, pool=pool, on_legacy_work="ignore") as three:
        pass
    assert one.stream is two.stream
    assert (one.stream.is_blocking, three.stream.is_blocking) == (True, False)
    own = graphcore_driver.stream(blocking=True)
    with graphcore.capture(own, driver=graphcore_driver, pool=pool) as four:
        pass
    assert four.stream is own


@pytest.mark.parametrize("pool", ["pool", object(), 3], ids=["text", "object", "number"])
def test_what_is_no_pool_is_refused(graphcore_driver: Driver, pool: Any) -> None:
    with pytest.raises(CacheTypeError, match=r"pool: expected a graphcore\.interop"):
        graphcore.capture(driver=graphcore_driver, pool=pool)


def test_a_pool_of_another_device_is_refused(graphcore_driver: Driver) -> None:
    pool = MemoryPool(graphcore_driver.device)
    pool.device += 1
    with pytest.raises(ConfigurationError, match="pool: expected one of device"):
        graphcore.capture_function(lambda: None, driver=graphcore_driver, pool=pool)


def test_one_graph_alone_does_not_share_its_pool(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0, 4, 3)
    pool = MemoryPool(graphcore_driver.device)
    with pytest.raises(ZeroDivisionError), graphcore.capture(driver=graphcore_driver, pool=pool):
        _ = 1 // 0
    graph = graphcore.capture_function(step, x, driver=graphcore_driver, pool=pool)
    assert not graph.memory_report().shares_pool
    assert graph.memory_report().pool_bytes > 0


@pytest.mark.gpu
def test_64_buckets_in_one_pool_take_less_than_in_64_pools() -> None:
    driver = cuda_driver()
    inputs = [filled(driver, 1.0, rows, 4096) for rows in range(BUCKETS, 0, -1)]

    def captured(pool: MemoryPool | None) -> list[Graph]:
        return [graphcore.capture_function(step, x, driver=driver, pool=pool) for x in inputs]

    private = captured(None)
    separate = sum(graph.memory_report().pool_bytes for graph in private)
    pool = MemoryPool(driver.device)
    shared = captured(pool)
    # what an estimate from one private pool would say is far from what the shared pool takes
    assert pool.bytes() * 8 < separate
    assert pool.bytes() * 8 < private[0].memory_report().pool_bytes * BUCKETS
    assert {graph.memory_report().pool_bytes for graph in shared} == {pool.bytes()}
    for graph, x in zip(shared, inputs, strict=True):
        assert replayed(graph, graph.outputs) == step(x).tolist()


@pytest.mark.gpu
def test_a_failed_capture_into_a_pool_leaves_its_memory_to_the_next_one() -> None:
    driver = cuda_driver()
    pool = MemoryPool(driver.device)
    x = filled(driver, 1.0, 1024, 1024)
    graphcore.capture_function(step, x, driver=driver, pool=pool).close()
    taken = pool.bytes()

    def failing() -> None:
        step(x)
        raise ZeroDivisionError

    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            graphcore.capture_function(failing, driver=driver, pool=pool, warmup=0)
        assert pool.bytes() == taken
