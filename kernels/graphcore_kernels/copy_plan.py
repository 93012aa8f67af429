"""How one strided copy is done: its class, axes, word and index widths. Pure, knows no address.

:func:`lay_out` decides from shapes, strides and the alignment of the two pointers, and remembers
what it decided. It refuses what no launch could do: a destination that overlaps itself, and more
than eight axes after merging.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from math import gcd, prod

from graphcore.errors import ConfigurationError
from graphcore.resources.overlap import overlaps_itself, span
from graphcore_kernels._axes import (
    Axes,
    Axis,
    can_widen,
    dst_side,
    merge,
    narrow,
    order,
    pair,
    src_side,
    turn_forward,
    widen,
)
from graphcore_kernels._division import magic

MAX_AXES = 8
WIDEST_WORD = 16
_SECTOR = 32  # bytes: the least that memory moves at a time


class CopyClass(Enum):
    """What a copy looks like to the memory; the launch shape depends on nothing else."""

    EMPTY = "empty"
    CONTIGUOUS = "contiguous"
    ROWS = "rows"
    TRANSPOSE = "transpose"
    SHORT_INNER = "short_inner"
    GENERAL = "general"


class CopyForm(Enum):
    """Which of the kernels does it: they differ in how an element's place is found."""

    CONTIGUOUS = "contiguous"
    SHARED = "shared"
    SPLIT = "split"


@dataclass(frozen=True)
class CopyLayout:
    """One copy, decided.

    Args:
        copy_class: What it looks like.
        form: SHARED where both sides have the same axes, SPLIT where each has its own.
        word: Bytes moved at a time: 1, 2, 4, 8 or 16.
        index_bits: 32 where every index and offset fits, else 64.
        count: Words to move (CONTIGUOUS: whole words between ``head`` and ``tail``).
        dst_axes, src_axes: (size, stride) in words, from the slowest to the fastest.
        dst_start, src_start: Bytes from each pointer to the first word.
        head, tail: Bytes before the first and after the last whole word (CONTIGUOUS only).
    """

    copy_class: CopyClass
    form: CopyForm
    word: int
    index_bits: int
    count: int
    dst_axes: Axes = ()
    src_axes: Axes = ()
    dst_start: int = 0
    src_start: int = 0
    head: int = 0
    tail: int = 0

    @property
    def kernel_name(self) -> str:
        """The ``extern "C"`` name of the kernel that does it."""
        name = f"strided_copy_{self.form.value}_w{self.word}"
        return name if self.form is CopyForm.CONTIGUOUS else f"{name}_i{self.index_bits}"

    def arguments(self, dst: int, src: int) -> tuple[int | bytes, ...]:
        """The kernel's arguments for these two addresses, unpacked."""
        pointers = (dst + self.dst_start, src + self.src_start)
        if self.form is CopyForm.CONTIGUOUS:
            return (*pointers, self.head, self.count, self.tail)
        ranks = [len(self.dst_axes)]
        if self.form is CopyForm.SPLIT:
            ranks.append(len(self.src_axes))
        return (*pointers, self.count, self._packed_axes, *ranks)

    @cached_property
    def _packed_axes(self) -> bytes:
        if self.form is CopyForm.SPLIT:
            return self._packed_side(self.dst_axes) + self._packed_side(self.src_axes)
        strides = [axis.stride for axis in self.src_axes]
        return self._packed_side(self.dst_axes) + self._packed(strides, signed=True)

    def _packed_side(self, axes: Axes) -> bytes:
        divisors = [magic(axis.size, self.index_bits) for axis in axes]
        return (
            self._packed(axis.size for axis in axes)
            + self._packed(divisor.magic for divisor in divisors)
            + self._packed(divisor.shift for divisor in divisors)
            + self._packed((axis.stride for axis in axes), signed=True)
        )

    def _packed(self, values: Iterable[int], *, signed: bool = False) -> bytes:
        code = {32: "I", 64: "Q"}[self.index_bits]
        known = tuple(values)
        padded = chain(known, [0] * (MAX_AXES - len(known)))
        return struct.pack(f"<{MAX_AXES}{code.lower() if signed else code}", *padded)


def dims_bytes(form: CopyForm, index_bits: int) -> int:
    """Bytes of the structure that holds a copy's axes, as the kernels declare it."""
    columns = {CopyForm.SHARED: 5, CopyForm.SPLIT: 8}[form]
    return columns * MAX_AXES * index_bits // 8


@lru_cache(maxsize=4096)
def lay_out(
    dst: tuple[tuple[int, int], ...],
    src: tuple[tuple[int, int], ...],
    itemsize: int,
    dst_address: int = 0,
    src_address: int = 0,
) -> CopyLayout:
    """How to copy ``src`` to ``dst``, elements in row-major order of both.

    Args:
        dst: (size, stride in elements) of each dimension.
        src: The same; as many elements as ``dst``.
        itemsize: Bytes of an element: 1, 2, 4, 8 or 16.
        dst_address: The address of ``dst`` modulo 16: only alignment matters here.
        src_address: The same of ``src``.

    Raises:
        ConfigurationError: ``dst`` overlaps itself, element counts differ, or more than eight
            axes are left after merging.
    """
    elements, given = (prod(size for size, _ in side) for side in (dst, src))
    if elements != given:
        raise ConfigurationError(
            f"src: expected {elements} elements as dst {_shape(dst)} has, "
            f"got {given} in {_shape(src)}"
        )
    if not elements:
        return CopyLayout(CopyClass.EMPTY, CopyForm.CONTIGUOUS, itemsize, 32, 0)
    if overlaps_itself(dst):
        raise ConfigurationError(
            "dst: expected strides that give each element a place of its own, got shape "
            f"{_shape(dst)} with strides {tuple(stride for _, stride in dst)}"
        )
    # an element at an address that is no multiple of its size moves in aligned pieces
    word = gcd(itemsize, dst_address, src_address)
    axes = [merge(narrow((Axis(*axis) for axis in side), itemsize // word)) for side in (dst, src)]
    shared = pair(*axes)
    if shared is None:
        sides, starts = (axes[0], axes[1]), (0, 0)
        form, copy_class = CopyForm.SPLIT, CopyClass.GENERAL
    else:
        turned, *moved = turn_forward(shared)
        ordered = order(turned)
        sides, starts = (dst_side(ordered), src_side(ordered)), (moved[0] * word, moved[1] * word)
        form, copy_class = CopyForm.SHARED, _classify(*sides, word)
    if copy_class is CopyClass.CONTIGUOUS:
        at = dst_address + starts[0], src_address + starts[1]
        return _lay_out_contiguous(elements * itemsize, at, starts)
    _check_axes(sides)
    return _lay_out_strided(copy_class, form, sides, word, (dst_address, src_address), starts)


def _shape(side: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(size for size, _ in side)


def _classify(dst: Axes, src: Axes, word: int) -> CopyClass:
    if not dst:
        return CopyClass.CONTIGUOUS
    fastest = [side[-1].stride == 1 for side in (dst, src)]
    if all(fastest):
        if len(dst) == 1:
            return CopyClass.CONTIGUOUS
        is_short = dst[-1].size * word < _SECTOR
        return CopyClass.SHORT_INNER if is_short else CopyClass.ROWS
    if fastest[0] and src[-1].stride and any(axis.stride in (1, -1) for axis in src[:-1]):
        return CopyClass.TRANSPOSE
    return CopyClass.GENERAL


def _check_axes(sides: tuple[Axes, Axes]) -> None:
    for name, axes in zip(("dst", "src"), sides, strict=True):
        if len(axes) > MAX_AXES:
            raise ConfigurationError(
                f"{name}: expected at most {MAX_AXES} dimensions after merging, got {len(axes)}: "
                f"{tuple(axes)} (size, stride)"
            )


def _lay_out_contiguous(
    nbytes: int, addresses: tuple[int, int], starts: tuple[int, int]
) -> CopyLayout:
    # both sides reach a multiple of the word after the same few bytes
    word = gcd(WIDEST_WORD, addresses[1] - addresses[0])
    head = min(-addresses[0] % word, nbytes)
    count, tail = divmod(nbytes - head, word)
    return CopyLayout(
        CopyClass.CONTIGUOUS,
        CopyForm.CONTIGUOUS,
        word,
        64,
        count,
        dst_start=starts[0],
        src_start=starts[1],
        head=head,
        tail=tail,
    )


def _lay_out_strided(
    copy_class: CopyClass,
    form: CopyForm,
    sides: tuple[Axes, Axes],
    word: int,
    addresses: tuple[int, int],
    starts: tuple[int, int],
) -> CopyLayout:
    aligned = gcd(*(address + start for address, start in zip(addresses, starts, strict=True)))
    words = _words_at_once(sides, gcd(aligned, WIDEST_WORD) // word)
    if words > 1:
        sides = widen(sides[0], words), widen(sides[1], words)
    dst, src = (tuple(axis for axis in side if axis.size > 1) for side in sides)
    return CopyLayout(
        copy_class,
        form,
        word * words,
        32 if _fits_32_bits(dst) and _fits_32_bits(src) else 64,
        prod(axis.size for axis in dst),
        dst,
        src,
        *starts,
    )


def _words_at_once(sides: tuple[Axes, Axes], most: int) -> int:
    """The most words (a power of two) that can move as one on both sides."""
    while most > 1 and not all(can_widen(side, most) for side in sides):
        most //= 2
    return most


def _fits_32_bits(axes: Axes) -> bool:
    # offsets are summed axis by axis, so partial sums must fit too
    lowest, highest = span(axes)
    return prod(axis.size for axis in axes) < 2**31 and highest < 2**31 and -lowest < 2**31
