"""Division by a fixed number as a multiplication and a shift: what the kernels do per dimension.

``n // d == (high(n * magic) + n) >> shift`` for ``0 <= n < 2**(bits - 1)``, where ``high`` is the
upper word of the product (Granlund and Montgomery, "Division by invariant integers using
multiplication", PLDI 1994).
"""

from __future__ import annotations

from typing import NamedTuple


class Magic(NamedTuple):
    """What replaces a divisor."""

    magic: int
    shift: int


def magic(divisor: int, bits: int) -> Magic:
    """The multiplier and shift of ``divisor`` (1 to 2**(bits - 1)) for words of ``bits``."""
    shift = (divisor - 1).bit_length()
    return Magic(((1 << bits) * ((1 << shift) - divisor)) // divisor + 1, shift)


def divide(number: int, by: Magic, bits: int) -> int:
    """``number`` divided as the kernels do it, with words of ``bits``."""
    return ((number * by.magic >> bits) + number) >> by.shift
