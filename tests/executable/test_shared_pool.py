"""capture(pool=...): several captures into one torch memory pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tensors import cuda_driver, filled, replay, replayed

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    Graph,
    GraphExec,
    OutputGuard,
    OverwrittenOutputError,
)
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


class Segment(MemoryPool):
    """A pool of one piece of memory that tests chose."""

    def __init__(self, driver: Driver, memory: torch.Tensor) -> None:
        super().__init__(driver.device)
        self.memory = memory

    def segments(self) -> list[tuple[int, int]]:
        return [(self.memory.data_ptr(), self.memory.nbytes)]


def pooled(
    driver: Driver, memory: torch.Tensor, pool: MemoryPool, outside: torch.Tensor
) -> tuple[GraphExec, Any]:
    """A graph that counts up a part of ``memory`` and ``outside``, as if captured into ``pool``."""
    with graphcore.capture(driver=driver) as capture:
        capture.keep(pool, "torch memory pool")
        memory[:4].add_(1)
        outside.add_(1)
    pool.note_capture(capture.graph.runs)
    return capture.graph.instantiate(), capture.graph


def test_a_run_of_a_graph_captured_before_into_the_pool_overwrites_an_output(
    graphcore_driver: Driver,
) -> None:
    memory = filled(graphcore_driver, 0.0, 64)
    pool = Segment(graphcore_driver, memory)
    outside = [filled(graphcore_driver, 0.0) for _ in range(2)]
    (first, _one), (second, _two) = (
        pooled(graphcore_driver, memory, pool, each) for each in outside
    )
    replay(first)
    replay(second)
    guards = {
        "second": OutputGuard(second, memory[:4]),
        "first": OutputGuard(first, memory[8:]),
        "outside": OutputGuard(second, outside[1]),
    }
    assert not any(guard.is_overwritten for guard in guards.values())
    replay(first)
    with pytest.raises(OverwrittenOutputError, match="a run of another graph"):
        guards["second"].get()
    assert not guards["outside"].is_overwritten, "a tensor that is not in the pool"
    newest = guards["first"].latest()
    replay(second)
    assert not newest.is_overwritten, "memory of an output that was there goes to no later capture"
    replay(first)
    assert newest.is_overwritten


@pytest.mark.gpu
def test_what_a_guard_says_of_a_shared_pool_is_what_happens() -> None:
    driver = cuda_driver()
    pool = MemoryPool(driver.device)
    x = filled(driver, 1.0, 1 << 20)
    first = graphcore.capture_function(lambda: torch.sum((x + 1) * 2), driver=driver, pool=pool)
    # its output lies where a temporary of the first one does
    second = graphcore.capture_function(lambda: x * 3, driver=driver, pool=pool)
    with first.instantiate() as one, second.instantiate() as two:
        guards = [OutputGuard(one, first.outputs), OutputGuard(two, second.outputs)]
        replay(one)
        replay(two)
        assert guards[1].get().unique().tolist() == [3.0]
        assert guards[0].get().item() == 4.0 * (1 << 20), "of the graph captured first"
        replay(one)
        assert second.outputs.unique().tolist() != [3.0]
        with pytest.raises(OverwrittenOutputError, match="a run of another graph"):
            guards[1].get()
