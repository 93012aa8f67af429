"""Tensor maps: what is refused, and where the address of an encoded one lies."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from graphcore.driver import open_driver
from graphcore.driver.tensor_map import (
    TENSOR_MAP_BYTES,
    TensorMap,
    encoded_address,
    with_address,
)
from graphcore.errors import ConfigurationError

BOXES = TensorMap(0x1230, 2, (72, 40, 3), (144, 5760), (64, 32, 1))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("address", 8, "a multiple of 16"),
        ("element_bytes", 3, "1, 2, 4 or 8"),
        ("sizes", (), "one to five sizes of 1 to 2^32"),
        ("sizes", (72, 0, 3), "one to five sizes of 1 to 2^32"),
        ("sizes", (72, 2**32 + 1, 3), "one to five sizes of 1 to 2^32"),
        ("sizes", (1,) * 6, "one to five sizes of 1 to 2^32"),
        ("steps", (144,), "2 multiples of 16 below 2^40"),
        ("steps", (0, 5760), "2 multiples of 16 below 2^40"),
        ("steps", (144, 5768), "2 multiples of 16 below 2^40"),
        ("steps", (144, 2**40), "2 multiples of 16 below 2^40"),
        ("box", (64, 32), "3 sizes of 1 to 256"),
        ("box", (64, 257, 1), "3 sizes of 1 to 256"),
        ("box", (32, 32, 1), "128 bytes along the innermost axis"),
    ],
)
def test_what_no_device_takes_is_refused_by_field(field, value, expected):
    with pytest.raises(ConfigurationError) as refused:
        replace(BOXES, **{field: value})
    assert str(refused.value) == f"tensor map {field}: expected {expected}, got {value}"


def test_the_first_word_of_an_encoded_map_is_its_address():
    driver = open_driver("emulated")
    encoded = driver.encode_tensor_map(BOXES)
    assert len(encoded) == TENSOR_MAP_BYTES
    assert encoded_address(encoded) == BOXES.address
    moved = replace(BOXES, address=1 << 40)
    assert with_address(encoded, moved.address) == driver.encode_tensor_map(moved)


def test_the_emulated_map_has_every_field():
    fields = struct.unpack_from("<QII4Q5Q5I", open_driver("emulated").encode_tensor_map(BOXES))
    assert fields[:3] == (0x1230, 3, 2)
    assert fields[3:7] == (144, 5760, 0, 0)
    assert fields[7:12] == (72, 40, 3, 1, 1)
    assert fields[12:] == (64, 32, 1, 1, 1)
