"""Pinned memory: one address for host and device, given back when nobody holds it."""

from __future__ import annotations

import gc

import pytest
from helpers.kernels import ONE_BLOCK, copy_bytes

import graphcore
from graphcore.driver import Driver
from graphcore.driver.kernel import Pointer
from graphcore.driver.records import MemoryKind
from graphcore.errors import CaptureError, GraphcoreWarning
from graphcore.resources.buffer import Buffer
from graphcore.resources.pinned import PinnedMemory


def test_host_and_device_read_and_write_it_at_one_address(graphcore_driver: Driver) -> None:
    memory = PinnedMemory(graphcore_driver, 16)
    found = graphcore_driver.allocation_of(memory.address)
    assert found is not None
    assert (found.memory, found.size) == (MemoryKind.HOST, 16)
    words = Pointer(memory.address, "int64").array(2)
    words[:] = [7, -1]
    device = Buffer.allocate(1, "int64", driver=graphcore_driver)
    stream = graphcore_driver.stream()
    function = graphcore_driver.function(copy_bytes)
    for to, source in ((device.address, memory.address), (memory.address + 8, device.address)):
        arguments = copy_bytes.pack(to, source, 8)
        graphcore_driver.launch(function, ONE_BLOCK, arguments, stream.handle)
    stream.synchronize()
    assert words.tolist() == [7, 7]


def test_it_is_given_back_when_the_last_holder_lets_go_and_not_inside_a_capture(
    graphcore_driver: Driver,
) -> None:
    memory = PinnedMemory(graphcore_driver, 64)
    address = memory.address
    assert "64 bytes" in repr(memory)
    with graphcore.capture(driver=graphcore_driver):
        del memory
        gc.collect()
    assert graphcore_driver.allocation_of(address) is None


def test_what_cannot_be_given_back_is_a_warning() -> None:
    driver = graphcore.open_driver("emulated")
    held = [PinnedMemory(driver, 8)]
    driver.free_pinned(held[0].address)
    with pytest.warns(GraphcoreWarning, match="while freeing pinned memory"):
        held.clear()


def test_none_is_made_inside_a_capture() -> None:
    driver = graphcore.open_driver("emulated")
    with pytest.raises(CaptureError, match="pinned"), graphcore.capture(driver=driver):
        PinnedMemory(driver, 8)
