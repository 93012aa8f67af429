"""Divisor tables: the part of torch's kernel arguments that holds numbers, and what nobody wrote.

torch's elementwise kernels take the layout of their operands as a count of dimensions, a table of
25 divisors, and 25 strides for each operand; their addresses come behind. Only as many entries are
written as there are dimensions: the others are what the host's stack held before, which is often
the address of some tensor. What is written tells a table from anything else: each divisor stands
beside its own shift and multiplier. How many operands there are tells the number of bytes behind
it; where that is no such structure, the strides are left to whoever looks at them.

Source: torch's ATen/cuda/detail/OffsetCalculator.cuh and IntegerDivider.cuh, versions 2.11 to 2.13;
the arguments themselves on an H200.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence

_ENTRIES, _NUMBERS = 25, 3  # divisor, multiplier, shift
_TABLE = 1 + _ENTRIES * _NUMBERS  # 32-bit words, the count of dimensions with them
_LARGEST = 2**31 - 1
_BYTES, _ADDRESS = 4, 8
_LEAST = _BYTES * (_TABLE + _ENTRIES)  # one operand
_OPERANDS = range(1, 6)
_OPERATION = 48  # bytes at most: what the kernel does to its operands, padding with it

_COUNT = re.compile(rb"[\x01-\x19]\0{3}")  # of dimensions

Range = tuple[int, int]
"""First byte, and the byte behind the last one."""


def divisor_tables(data: bytes) -> tuple[Range, ...]:
    """Where in the bytes of an argument such tables are; none of their words is an address.

    The strides behind a table count where it is known how many there are.
    """
    if len(data) < _LEAST:
        return ()
    starts = list(_starts(data))
    nexts = [*starts[1:], None]
    return tuple((at, _end(at, after, len(data))) for at, after in zip(starts, nexts, strict=False))


def outside(found: Iterable[tuple[int, int]], tables: Sequence[Range]) -> Iterator[tuple[int, int]]:
    """Those of (byte offset, value of eight bytes) that reach into none of ``tables``."""
    for at, value in found:
        if not any(start < at + 8 and at < end for start, end in tables):
            yield at, value


def _starts(data: bytes) -> Iterator[int]:
    """The bytes at which tables begin."""
    behind = 0
    for match in _COUNT.finditer(data, 0, len(data) - _LEAST + _BYTES):
        at = match.start()
        if at % _BYTES == 0 and at >= behind and _are_divisors(data, at + _BYTES, data[at]):
            yield at
            behind = at + _BYTES * _TABLE


def _end(start: int, following: int | None, size: int) -> int:
    """The byte behind the strides of a table; behind the table, where nothing tells how many.

    Args:
        start: Where it begins.
        following: Where the next one begins.
        size: Of the argument.
    """
    table = start + _BYTES * _TABLE
    for operands in _OPERANDS:
        strides = table + operands * _ENTRIES * _BYTES
        if following is not None:
            is_right = strides == following
        else:
            addresses = strides + -strides % _ADDRESS
            rest = size - addresses - operands * _ADDRESS
            is_right = strides == size or 0 <= rest <= _OPERATION
        if is_right:
            return strides
    return table


def _are_divisors(data: bytes, first: int, count: int) -> bool:
    """Whether ``count`` entries from byte ``first`` on are divisors, not all of them one."""
    numbers: tuple[int, ...] = struct.unpack_from(f"<{_NUMBERS * count}I", data, first)
    for divisor, multiplier, shift in zip(*[iter(numbers)] * _NUMBERS, strict=True):
        if not 1 <= divisor <= _LARGEST or shift != (divisor - 1).bit_length():
            return False
        if multiplier != (((1 << shift) - divisor) << 32) // divisor + 1:
            return False
    return max(numbers[::_NUMBERS]) > 1
