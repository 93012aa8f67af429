"""Threads that prepare and make captures on one driver at the same time do not break each other."""

from __future__ import annotations

import pytest
import torch
from helpers.contract import in_thread
from helpers.tensors import filled, poisoned, replayed

import graphcore
from graphcore import Graph
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver


def test_a_function_is_warmed_up_and_captured_while_another_thread_captures(
    graphcore_driver: Driver,
) -> None:
    x, y, z = (filled(graphcore_driver, 1.0) for _ in range(3))
    sum_of, out = poisoned(graphcore_driver), poisoned(graphcore_driver)

    def step() -> None:
        sum_of.copy_(y + z)

    with graphcore.capture(driver=graphcore_driver) as first:
        out.copy_(x * 2)
        second: Graph = in_thread(lambda: graphcore.capture_function(step, driver=graphcore_driver))
        out.add_(1)
    assert replayed(first.graph, out) == [3.0] * 4
    assert replayed(second, sum_of) == [2.0] * 4


@pytest.mark.parametrize("on_legacy_work", ["error", "ignore"])
def test_a_warm_up_reads_what_the_current_stream_wrote_before(
    graphcore_driver: Driver, on_legacy_work: str
) -> None:
    x, seen = filled(graphcore_driver, 0.0, 1 << 20), filled(graphcore_driver, 0.0, 1 << 20)
    for _ in range(50):
        x.add_(1)
    with graphcore.capture_function(
        lambda: seen.copy_(x), warmup=1, driver=graphcore_driver, on_legacy_work=on_legacy_work
    ):
        assert torch.equal(seen, torch.full_like(seen, 50.0))


def test_a_warm_up_that_fails_is_waited_for_and_keeps_its_own_error() -> None:
    driver = EmulatedDriver()

    def step() -> None:
        driver.faults.inject("synchronize_stream")
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="the step's own") as caught:
        graphcore.capture_function(step, warmup=1, driver=driver)
    assert "waiting for the warm-up that failed" in caught.value.__notes__[0]


def test_no_wait_for_the_whole_device_is_asked_for() -> None:
    driver = EmulatedDriver()
    driver.faults.inject("synchronize")
    x = filled(driver, 1.0)
    graph = graphcore.capture_function(lambda: x.add_(1), warmup=2, driver=driver)
    assert x.tolist() == [3.0] * 4
    assert len(graph.snapshot().nodes) == 1
