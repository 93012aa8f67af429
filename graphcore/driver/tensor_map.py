"""The tensor map: a tensor, and the box of it that the copy engine of sm_90 takes at once."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from graphcore.errors import ConfigurationError

TENSOR_MAP_BYTES = 128
TENSOR_MAP_TYPE = f"bytes:{TENSOR_MAP_BYTES}"
"""Of a parameter, as a kernel's signature has it."""
_ADDRESS_BYTES = 8
_MOST_AXES = 5
_MOST_BOX = 256
_SWIZZLED_BYTES = 128
_CHUNK_BYTES = 16
_MOST_STEP = 1 << 40
_MOST_SIZE = 1 << 32
_ELEMENT_BYTES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What a kernel's copies of boxes are described by; a kernel takes it as ``bytes:128``.

    Rows of a box lie in shared memory one after the other, 128 bytes each, in groups of eight
    within which chunks of 16 bytes are exchanged: chunk c of row r lies at c xor r % 8. What is
    outside the tensor is zero. The first word of an encoded map is the address: whoever looks for
    words that point into memory, as rebind does, finds it, and moves the tensor by changing it.

    Args:
        address: Of the first element; a multiple of 16.
        element_bytes: 1, 2, 4 or 8.
        sizes: Of the axes, in elements, the innermost (which is dense) first; up to five.
        steps: Bytes from one index to the next, of all axes but the innermost; multiples of 16.
        box: Of the axes, in elements, at most 256 each; 128 bytes along the innermost.
    """

    address: int
    element_bytes: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    box: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = len(self.sizes)
        for field, holds, expected in (
            ("element_bytes", self.element_bytes in _ELEMENT_BYTES, "1, 2, 4 or 8"),
            ("address", self.address % _CHUNK_BYTES == 0, "a multiple of 16"),
            ("sizes", 1 <= axes <= _MOST_AXES and all(0 < n <= _MOST_SIZE for n in self.sizes),
             "one to five sizes of 1 to 2^32"),
            ("steps", len(self.steps) == axes - 1 and all(
                0 < n < _MOST_STEP and n % _CHUNK_BYTES == 0 for n in self.steps),
             f"{axes - 1} multiples of 16 below 2^40"),
            ("box", len(self.box) == axes and all(0 < n <= _MOST_BOX for n in self.box),
             f"{axes} sizes of 1 to 256"),
            ("box", self.box[:1] == (_SWIZZLED_BYTES // max(1, self.element_bytes),),
             "128 bytes along the innermost axis"),
        ):  # fmt: skip
            if not holds:
                raise ConfigurationError(
                    f"tensor map {field}: expected {expected}, got {getattr(self, field)}"
                )

    def packed(self) -> bytes:
        """What the emulated driver makes of it: the fields themselves, in 128 bytes."""
        axes = len(self.sizes)
        filled = (1,) * (_MOST_AXES - axes)
        data = struct.pack(
            "<QII4Q5Q5I", self.address, axes, self.element_bytes,
            *self.steps, *(0,) * (_MOST_AXES - axes), *self.sizes, *filled, *self.box, *filled,
        )  # fmt: skip
        return data.ljust(TENSOR_MAP_BYTES, b"\0")


def encoded_address(encoded: bytes) -> int:
    """Where the tensor of an encoded map begins."""
    return int.from_bytes(encoded[:_ADDRESS_BYTES], "little")


def with_address(encoded: bytes, address: int) -> bytes:
    """An encoded map of the same tensor elsewhere."""
    return address.to_bytes(_ADDRESS_BYTES, "little") + encoded[_ADDRESS_BYTES:]
