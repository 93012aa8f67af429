"""Contract: device and pinned memory, copies and fills outside captures."""

from __future__ import annotations

import ctypes
import struct

import numpy
import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d, refused

from graphcore.driver import Driver
from graphcore.driver.records import CopyOperand, MemcpyParams, MemoryKind, MemsetParams


@covers("alloc", "free", "allocation_of")
def test_an_allocation_is_aligned_and_known_by_every_address_in_it(
    graphcore_driver: Driver,
) -> None:
    address = graphcore_driver.alloc(1000)
    assert address % 256 == 0
    for inside in (address, address + 1, address + 999):
        found = graphcore_driver.allocation_of(inside)
        assert found is not None
        assert found.base == address
        assert found.size >= 1000
        assert found.memory is MemoryKind.DEVICE
        assert found.device == graphcore_driver.device
    graphcore_driver.free(address)
    assert graphcore_driver.allocation_of(address) is None


@covers("allocation_of")
def test_memory_of_nobody_is_in_no_allocation(graphcore_driver: Driver) -> None:
    buffer = ctypes.create_string_buffer(64)
    assert graphcore_driver.allocation_of(ctypes.addressof(buffer)) is None


@covers("alloc", "free", "allocation_of")
def test_each_allocation_has_an_id_of_its_own_also_at_the_same_address(
    graphcore_driver: Driver,
) -> None:
    ids = []
    for _ in range(4):
        address = graphcore_driver.alloc(4096)
        found = graphcore_driver.allocation_of(address)
        assert found is not None
        ids.append(found.buffer_id)
        graphcore_driver.free(address)
    assert len(set(ids)) == 4


@covers("alloc")
def test_an_allocation_of_nothing_is_refused(graphcore_driver: Driver) -> None:
    with refused("INVALID_VALUE"):
        graphcore_driver.alloc(0)


@covers("alloc", "memory_info")
def test_more_memory_than_there_is_is_refused_and_nothing_is_taken(
    graphcore_driver: Driver,
) -> None:
    free, total = graphcore_driver.memory_info()
    with refused("OUT_OF_MEMORY"):
        graphcore_driver.alloc(total * 2)
    # others may use the device too: far less is gone than was asked for
    assert free - graphcore_driver.memory_info()[0] < total // 4
    graphcore_driver.free(graphcore_driver.alloc(2**20))


@covers("free")
def test_only_the_start_of_a_live_allocation_can_be_freed(graphcore_driver: Driver) -> None:
    address = graphcore_driver.alloc(1024)
    with refused("INVALID_VALUE"):
        graphcore_driver.free(address + 256)
    graphcore_driver.free(address)
    with refused("INVALID_VALUE"):
        graphcore_driver.free(address)


@covers("alloc_pinned", "free_pinned", "allocation_of")
def test_pinned_memory_is_the_hosts_and_the_device_reads_it(bench: Bench) -> None:
    pinned = bench.driver.alloc_pinned(8)
    ctypes.memmove(pinned, struct.pack("=2f", 3, 4), 8)
    x = bench.alloc(8)
    bench.driver.copy(copy_1d(x, pinned, 8, src_memory=MemoryKind.HOST), bench.stream.handle)
    assert bench.get(x, 2) == [3, 4]
    found = bench.driver.allocation_of(pinned + 4)
    assert found is not None
    assert found.memory is MemoryKind.HOST
    bench.driver.free_pinned(pinned)
    with refused("INVALID_VALUE"):
        bench.driver.free_pinned(pinned)


@covers("read", "write")
def test_bytes_written_are_read_back(bench: Bench) -> None:
    x = bench.alloc(16)
    bench.driver.write(x + 4, b"abcdefgh")
    assert bench.driver.read(x, 16) == b"\xff" * 4 + b"abcdefgh" + b"\xff" * 4
    assert bench.driver.read(x, 0) == b""


@covers("copy")
def test_a_copy_moves_exactly_its_bytes(bench: Bench) -> None:
    src = bench.put(range(8), "uint8")
    dst = bench.alloc(8)
    bench.driver.copy(copy_1d(dst + 1, src + 2, 5), bench.stream.handle)
    assert bench.get(dst, 8, "uint8") == [255, 2, 3, 4, 5, 6, 255, 255]


@covers("copy")
def test_a_copy_of_no_bytes_does_nothing(bench: Bench) -> None:
    dst = bench.alloc(4)
    bench.driver.copy(copy_1d(dst, dst, 0), bench.stream.handle)
    assert bench.get(dst, 4, "uint8") == [255] * 4


@covers("copy")
def test_a_copy_reaches_host_memory(bench: Bench) -> None:
    src = bench.put([1, 2, 3])
    pinned = bench.driver.alloc_pinned(12)
    bench.driver.copy(copy_1d(pinned, src, 12, MemoryKind.HOST), bench.stream.handle)
    bench.driver.synchronize()
    assert struct.unpack("=3f", ctypes.string_at(pinned, 12)) == (1, 2, 3)
    bench.driver.free_pinned(pinned)


@covers("copy")
def test_a_2d_copy_keeps_to_its_rows(bench: Bench) -> None:
    src = bench.put(numpy.arange(24).reshape(4, 6), "uint8")
    dst = bench.alloc(20)
    bench.driver.copy(copy_2d(dst, src, 3, 4, 5, 6), bench.stream.handle)
    got = numpy.array(bench.get(dst, 20, "uint8")).reshape(4, 5)
    assert (got[:, :3] == numpy.arange(24).reshape(4, 6)[:, :3]).all()
    assert (got[:, 3:] == 255).all()


@covers("copy")
def test_a_3d_copy_keeps_to_its_slices(bench: Bench) -> None:
    data = numpy.arange(2 * 4 * 6).reshape(2, 4, 6)
    src = bench.put(data, "uint8")
    dst = bench.alloc(2 * 3 * 5)
    params = MemcpyParams(
        CopyOperand(dst, pitch=5, rows=3), CopyOperand(src, pitch=6, rows=4), 4, 2, 2
    )
    bench.driver.copy(params, bench.stream.handle)
    got = numpy.array(bench.get(dst, 30, "uint8")).reshape(2, 3, 5)
    assert (got[:, :2, :4] == data[:, :2, :4]).all()
    assert (got[:, 2:] == 255).all()
    assert (got[:, :, 4:] == 255).all()


@covers("copy")
def test_a_pitch_below_the_width_is_refused(bench: Bench) -> None:
    x = bench.put([0] * 64, "uint8")
    with refused("INVALID_VALUE"):
        bench.driver.copy(copy_2d(x, x + 32, 8, 2, 4, 8), bench.stream.handle)


@covers("fill")
@pytest.mark.parametrize(
    ("element_size", "value"), [(1, 0xAB), (2, 0xABCD), (4, 0xABCDEF01)], ids=["1", "2", "4"]
)
def test_a_fill_writes_elements_of_its_size(bench: Bench, element_size: int, value: int) -> None:
    x = bench.alloc(6 * element_size)
    params = fill_1d(x + element_size, value, 4, element_size)
    bench.driver.fill(params, bench.stream.handle)
    ones = 2 ** (8 * element_size) - 1
    expected = [ones, *[value] * 4, ones]
    assert bench.get(x, 6, f"uint{8 * element_size}") == expected


@covers("fill")
def test_a_2d_fill_keeps_to_its_rows(bench: Bench) -> None:
    x = bench.alloc(12)
    bench.driver.fill(MemsetParams(x, 7, 1, 2, height=3, pitch=4), bench.stream.handle)
    assert bench.get(x, 12, "uint8") == [7, 7, 255, 255] * 3


@covers("fill")
def test_a_value_wider_than_its_element_is_refused(bench: Bench) -> None:
    x = bench.alloc(4)
    with refused("INVALID_VALUE"):
        bench.driver.fill(fill_1d(x, 256, 4, 1), bench.stream.handle)
    assert bench.get(x, 4, "uint8") == [255] * 4


@covers("fill")
def test_an_element_of_three_bytes_is_refused(bench: Bench) -> None:
    x = bench.alloc(12)
    with refused("INVALID_VALUE"):
        bench.driver.fill(fill_1d(x, 1, 4, 3), bench.stream.handle)
