"""Calls whose pointers are places: found, filled in once, filled in at each launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphcore.driver import Driver, kernel, open_driver
from graphcore.driver.records import LaunchConfig
from graphcore.driver.tensor_map import TENSOR_MAP_TYPE, TensorMap
from graphcore.moe.layers.kernel_call import KernelCall, place_address
from graphcore.resources.buffer import Buffer


def _add(config, out, left, right, count):
    out.array(count)[:] = left.array(count) + right.array(count)


ADD = kernel(
    "add_places",
    "f32* out, const f32* left, const f32* right, i32 count",
    'extern "C" __global__ void add_places(float* out, const float* left, const float* right, '
    "int count) { int i = threadIdx.x; if (i < count) out[i] = left[i] + right[i]; }",
    _add,
)
CONFIG = LaunchConfig((1, 1, 1), (32, 1, 1))


def test_pointers_to_places_are_found_with_their_offsets_and_others_stay() -> None:
    arguments = ADD.pack(place_address(2) + 8, place_address(0), 4096, 2)
    call = KernelCall.over_places(ADD, CONFIG, arguments)
    assert call.pointers == ((0, 2, 8), (1, 0, 0))
    filled = call.filled({2: 1 << 20})
    assert filled.pointers == ((1, 0, 0),)
    assert ADD.unpack(filled.arguments)[0].address == (1 << 20) + 8
    assert ADD.unpack(filled.arguments)[2].address == 4096
    assert call.pointers == ((0, 2, 8), (1, 0, 0)), "filling in makes another call"


def test_a_tensor_map_of_a_place_is_filled_in_and_keeps_the_rest() -> None:
    driver = open_driver("emulated")
    takes_map = kernel("takes_map", f"{TENSOR_MAP_TYPE} map, bytes:16 other", "")
    described = TensorMap(place_address(1) + 32, 2, (64, 9), (128,), (64, 8))
    other = place_address(0).to_bytes(8, "little") * 2
    call = KernelCall.over_places(
        takes_map, CONFIG, takes_map.pack(driver.encode_tensor_map(described), other)
    )
    assert call.pointers == ((0, 1, 32),), "structures are no maps"
    filled = call.filled({1: 1 << 20})
    placed = replace(described, address=(1 << 20) + 32)
    assert filled.arguments == (driver.encode_tensor_map(placed), other)


@pytest.mark.parametrize("early", [{}, {0}, {0, 1, 2}], ids=["none", "one", "all"])
def test_a_launch_works_on_the_addresses_of_its_own_time(
    graphcore_driver: Driver, early: set[int]
) -> None:
    call = KernelCall.over_places(
        ADD, CONFIG, ADD.pack(place_address(0) + 4, place_address(1), place_address(2), 2)
    )
    buffers = [Buffer.allocate(4, driver=graphcore_driver) for _ in range(3)]
    for buffer, values in zip(buffers, ([-1] * 4, [1, 2, 3, 4], [10, 20, 30, 40]), strict=True):
        buffer.write(values)
    addresses = [each.address for each in buffers]
    call = call.filled({place: addresses[place] for place in early})
    call.launch(graphcore_driver, graphcore_driver.function(ADD), 1, addresses)
    assert buffers[0].read().tolist() == [-1, 11, 22, -1]
