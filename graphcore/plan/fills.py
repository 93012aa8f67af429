"""What a memset of a plan writes: the bits of one element, from a value of the element's type."""

from __future__ import annotations

import struct
from typing import Any

from graphcore.errors import ConfigurationError
from graphcore.plan.integers import as_int
from graphcore.plan.records import View

_FLOATS = {"float16": "<e", "float32": "<f", "float64": "<d"}


def fill_of(view: View, value: Any) -> tuple[View, int]:
    """(what a memset node fills, the bits of one element of 1, 2 or 4 bytes).

    A float is a value of a float view; an int is the bits of the element (negative ones in two's
    complement), as in ``cuMemsetD32``. Elements of 8 or 16 bytes are filled as 4-byte words where
    all words of the value are equal (zero, say).

    Raises:
        ConfigurationError: The value does not fit the element type, or its words differ.
    """
    where = f"memset of {view.buffer.name} ({view.dtype}): value"
    bits = _bits(where, view, value)
    if view.itemsize <= 4:
        return view, bits
    word = bits & 0xFFFFFFFF
    words = view.itemsize // 4
    if bits != sum(word << (32 * index) for index in range(words)):
        raise ConfigurationError(
            f"{where}: a memset node fills words of at most 4 bytes, so the {words} words of an "
            f"element must be equal; got {value!r:.40}; use a kernel"
        )
    return view.view("uint32"), word


def _bits(where: str, view: View, value: Any) -> int:
    if hasattr(value, "dtype") and hasattr(value, "item") and not hasattr(value, "__dlpack__"):
        value = value.item()
    if isinstance(value, float):
        return int.from_bytes(_float_bytes(where, view, value), "little")
    if isinstance(value, bool) and view.dtype == "bool":
        return int(value)
    bits, width = as_int(value), 8 * view.itemsize
    if bits is None:
        raise ConfigurationError(f"{where}: expected an int or a float, got {value!r:.40}")
    if not -(1 << (width - 1)) <= bits < 1 << width:
        raise ConfigurationError(f"{where}: expected a value that fits {width} bits, got {bits}")
    return bits & ((1 << width) - 1)


def _float_bytes(where: str, view: View, value: float) -> bytes:
    try:
        if view.dtype == "bfloat16":
            return _bfloat16(value)
        if view.dtype in _FLOATS:
            return struct.pack(_FLOATS[view.dtype], value)
    except OverflowError:
        raise ConfigurationError(f"{where}: {value!r} is too large for {view.dtype}") from None
    raise ConfigurationError(
        f"{where}: expected an int, the bits of one element; got the float {value!r}"
    )


def _bfloat16(value: float) -> bytes:
    """The upper half of the float32, rounded to even; a NaN stays one."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    if value != value:  # noqa: PLR0124 -- NaN
        return ((bits >> 16) | 0x40).to_bytes(2, "little")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to_bytes(2, "little")
