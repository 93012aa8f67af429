"""Divisor tables: the part of torch's kernel arguments that holds numbers, and what nobody wrote.

torch's elementwise kernels take the layout of their operands as a count of dimensions and a table
of 25 divisors. Only as many entries are written as there are dimensions; the others are what the
host's stack held before, which is often the address of some tensor. What is written tells a table
from anything else: each divisor stands beside its own shift and multiplier. Source: torch's
ATen/cuda/detail/OffsetCalculator.cuh and IntegerDivider.cuh, versions 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_ENTRIES, _NUMBERS = 25, 3  # divisor, multiplier, shift
_TABLE = 1 + _ENTRIES * _NUMBERS  # 32-bit words, the count of dimensions with them
_LARGEST = 2**31 - 1
_BYTES = 4
_LEAST = _BYTES * (_TABLE + _ENTRIES)  # strides of one operand or more follow

Range = tuple[int, int]
"""First byte, and the byte behind the last one."""


def divisor_tables(data: bytes) -> tuple[Range, ...]:
    """Where in the bytes of an argument such tables are; none of their words is an address.

    Where a table and its strides are all there is, the strides count too.
    """
    if len(data) < _LEAST:
        return ()
    return tuple(_tables(memoryview(data)[: len(data) // _BYTES * _BYTES].cast("I")))


def outside(found: Iterable[tuple[int, int]], tables: Sequence[Range]) -> Iterator[tuple[int, int]]:
    """Those of (byte offset, value of eight bytes) that reach into none of ``tables``."""
    for at, value in found:
        if not any(start < at + 8 and at < end for start, end in tables):
            yield at, value


def _tables(words: memoryview[int]) -> Iterator[Range]:
    at, last = 0, len(words) - _TABLE - _ENTRIES
    while at <= last:
        dimensions = words[at]
        if 1 <= dimensions <= _ENTRIES and _are_divisors(words, at + 1, dimensions):
            end = at + _TABLE
            is_all = at == 0 and (len(words) - end) % _ENTRIES == 0
            yield _BYTES * at, _BYTES * (len(words) if is_all else end)
            at = end
        else:
            at += 1


def _are_divisors(words: memoryview[int], first: int, count: int) -> bool:
    """Whether ``count`` entries from ``first`` on are divisors, not all of them one."""
    largest = 0
    for at in range(first, first + _NUMBERS * count, _NUMBERS):
        divisor = words[at]
        if not 1 <= divisor <= _LARGEST:
            return False
        shift = (divisor - 1).bit_length()
        multiplier = (((1 << shift) - divisor) << 32) // divisor + 1
        if (words[at + 1], words[at + 2]) != (multiplier, shift):
            return False
        largest = max(largest, divisor)
    return largest > 1
