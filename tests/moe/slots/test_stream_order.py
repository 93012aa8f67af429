"""Steps on several streams follow each other on the device; those on one stream cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.moe_steps import Scene

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CudaError
from graphcore.moe import SlotPool
from graphcore.moe.slots.stream_order import StreamOrder
from graphcore.testing import inject


def test_steps_of_one_stream_ask_the_driver_for_nothing() -> None:
    driver = EmulatedDriver()
    stream = driver.stream()
    order = StreamOrder(driver)
    faults = [driver.faults.inject(call, after=1 << 40) for call in ("record_event", "wait_event")]
    for _ in range(3):
        order.enter(stream)
    assert order.handle == stream.handle
    assert [fault.good_calls for fault in faults] == [1 << 40] * 2


def test_a_step_on_another_stream_waits_for_the_one_before(graphcore_driver: Driver) -> None:
    first, second = graphcore_driver.stream(), graphcore_driver.stream()
    order = StreamOrder(graphcore_driver)
    order.enter(first)
    order.enter(second)
    assert order.handle == second.handle
    order.enter(first)
    graphcore_driver.synchronize()


def test_a_stream_that_was_closed_is_waited_for_with_everything_else(
    graphcore_driver: Driver,
) -> None:
    first, second = graphcore_driver.stream(), graphcore_driver.stream()
    order = StreamOrder(graphcore_driver)
    order.enter(first)
    first.close()
    order.enter(second)
    assert order.handle == second.handle


def test_where_the_wait_is_refused_the_order_is_as_before() -> None:
    driver = EmulatedDriver()
    first, second = driver.stream(), driver.stream()
    order = StreamOrder(driver)
    order.enter(first)
    with inject(driver, "wait_event"), pytest.raises(CudaError):
        order.enter(second)
    assert order.handle == first.handle
    order.enter(second)
    assert order.handle == second.handle


def another_stream(pool: SlotPool) -> None:
    pool.order.enter(pool.driver.stream())


def a_step_in_doubt(pool: SlotPool) -> None:
    pool.doubt("layers.0")


def more_slots(pool: SlotPool) -> None:
    pool.grow(5)


def the_end(pool: SlotPool) -> None:
    pool.close()


@pytest.mark.parametrize("happens", [another_stream, a_step_in_doubt, more_slots, the_end])
def test_a_turn_ends_with_whatever_a_step_that_was_the_same_has_to_know(
    happens: Callable[[SlotPool], None],
) -> None:
    scene = Scene(EmulatedDriver())
    pool, stream = scene.pool, scene.driver.stream()
    pool.order.enter(stream)
    turn = pool.order.turn
    assert pool.stands(stream.handle)
    pool.order.enter(stream)
    pool.settle()
    assert (pool.order.turn, pool.stands(stream.handle)) == (turn, True)
    happens(pool)
    assert pool.order.turn != turn
    assert pool.stands(stream.handle) == (happens is more_slots)
