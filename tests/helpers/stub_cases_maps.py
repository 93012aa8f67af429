"""What graphcore.driver.cuda asks the stub about tensor maps."""

import struct
from dataclasses import replace

from helpers.stub_driver import driver, raises, stub

from graphcore.driver.tensor_map import TensorMap, with_address

BOXES = TensorMap(0x7F00_0000_1230, 2, (72, 40, 3), (144, 5760), (64, 32, 1))


def a_tensor_map_is_encoded_with_its_address_in_the_first_word():
    cuda = driver()
    encoded = cuda.encode_tensor_map(BOXES)
    words = struct.unpack("16Q", encoded)
    assert words[0] == BOXES.address
    # 16-bit elements, three axes, no interleave, swizzle of 128 bytes, 256 of promotion, zeros
    assert words[1] == 1 | 3 << 8 | 0 << 16 | 3 << 20 | 3 << 24 | 0 << 28
    assert (words[2:5], words[7:9]) == (BOXES.sizes, BOXES.steps)
    assert words[11] == 64 | 32 << 10 | 1 << 20
    assert words[12] == 1 | 1 << 10 | 1 << 20
    place = replace(BOXES, address=1 << 56)
    assert cuda.encode_tensor_map(place) == with_address(encoded, place.address)


def a_tensor_map_that_the_driver_refuses_is_told_whole():
    cuda = driver()
    stub().stub_fail(b"cuTensorMapEncodeTiled", 1)
    try:
        error = raises("CUDA_ERROR_INVALID_VALUE", cuda.encode_tensor_map, BOXES)
        assert str(BOXES) in str(error)
    finally:
        stub().stub_fail(b"cuTensorMapEncodeTiled", 0)


def a_driver_that_lays_the_address_elsewhere_is_refused():
    cuda = driver()
    cuda._encode = lambda *arguments: 0
    error = raises("CUDA_ERROR_NOT_SUPPORTED", cuda.encode_tensor_map, BOXES)
    assert "first word" in str(error)
