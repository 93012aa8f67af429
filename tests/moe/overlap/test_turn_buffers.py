"""Pinned buffers that take turns: none is touched while a copy of it may be under way."""

from __future__ import annotations

import random

import pytest
from helpers.late_driver import LateDriver

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CudaError
from graphcore.moe.overlap.turn_buffers import TurnBuffers
from graphcore.resources.buffer import Buffer
from graphcore.testing import inject


def test_words_go_to_the_device_and_back(graphcore_driver: Driver) -> None:
    stream = graphcore_driver.stream()
    there = Buffer.allocate(3, "int64", driver=graphcore_driver)
    buffers = TurnBuffers(graphcore_driver, 3)
    to, back = buffers.take(), buffers.take()
    to.words[:] = [7, -1, 2**40]
    to.copy_to(there.address, stream)
    back.copy_from(there.address, stream)
    back.wait()
    assert list(back.words) == [7, -1, 2**40]
    assert buffers.free == 2


def test_two_buffers_take_turns_and_one_is_left_out() -> None:
    buffers = TurnBuffers(EmulatedDriver(), 1)
    first, second = buffers.take(), buffers.take()
    assert first is not second
    assert buffers.take() is first
    assert buffers.take(kept=second) is first
    assert buffers.take(kept=first) is second


def test_a_buffer_is_taken_only_when_its_copy_is_over() -> None:
    driver = LateDriver(draw=random.Random(0))
    stream = driver.stream()
    there = Buffer.allocate(1, "int64", driver=driver)
    buffers = TurnBuffers(driver, 1)
    first = buffers.take()
    first.words[0] = 5
    first.copy_to(there.address, stream)
    assert driver.late == 1
    buffers.take()
    assert driver.late == 1  # the other one has no copy
    assert buffers.take() is first
    assert driver.late == 0
    first.words[0] = 6
    assert there.read().tolist() == [5]


def test_how_many_are_free_is_asked_without_waiting() -> None:
    draw = random.Random(0)
    driver = LateDriver(draw=draw)
    stream = driver.stream()
    there = Buffer.allocate(1, "int64", driver=driver)
    buffers = TurnBuffers(driver, 1)
    buffers.take().copy_to(there.address, stream)
    draw.randint = lambda low, high: low  # the device stands still
    assert buffers.free == 1
    draw.randint = lambda low, high: high
    assert buffers.free == 2


@pytest.mark.parametrize("call", ["copy", "record_event"])
def test_after_a_copy_that_failed_the_buffer_is_not_touched_before_all_work_is_over(
    call: str,
) -> None:
    driver = LateDriver(draw=random.Random(0))
    stream = driver.stream()
    there = Buffer.allocate(1, "int64", driver=driver)
    buffers = TurnBuffers(driver, 1)
    first = buffers.take()
    first.words[0] = 5
    with inject(driver, call), pytest.raises(CudaError):
        first.copy_to(there.address, stream)
    assert driver.late == (call == "record_event")
    assert not first.is_free
    buffers.take()
    assert buffers.take() is first
    assert driver.late == 0
    assert first.is_free
