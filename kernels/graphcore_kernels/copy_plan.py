"""How one strided copy is done: its class, axes, word and index widths. Pure, knows no address.

:func:`lay_out` decides from shapes, strides and the alignment of the two pointers, and remembers
what it decided. It refuses what no launch could do: a destination that overlaps itself, and more
than eight axes after merging.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from math import gcd, prod

from graphcore.errors import ConfigurationError
from graphcore.resources.overlap import overlaps_itself, span
from graphcore_kernels._axes import (
    Axes,
    Axis,
    PairedAxes,
    PairedAxis,
    can_widen,
    dst_side,
    is_dst_run,
    merge,
    narrow,
    order,
    pair,
    src_side,
    turn_forward,
    widen,
)
from graphcore_kernels._boxes import Boxes, divide, pays
from graphcore_kernels._copy_arguments import (
    MAX_AXES,
    few_rows,
    find_repeat,
    pack_axes,
    pack_boxes,
    pack_shared,
    packed_rows,
    row_pieces,
)

WIDEST_WORD = 16
_SECTOR = 32  # bytes: the least that memory moves at a time
_LONG_ROW = 256  # bytes, from which on pieces of 16 are worth finding
_PIECED = 2  # bytes of the widest word that moves slower than pieces do
_PACKED = 4  # bytes of words that move slower alone than four at a time
_PACKED_ROW = 2048  # bytes, from which on the ends of rows are few against their pieces
_SMALL = 2**16  # words that all threads of a small launch move at once
_LARGE = 500_000_000  # bytes: copies from here on were measured with many blocks
_MOST_WORDS = 2**31  # that 32-bit indices count


class CopyClass(Enum):
    """What a copy looks like to the memory."""

    EMPTY = "empty"
    CONTIGUOUS = "contiguous"
    ROWS = "rows"
    TRANSPOSE = "transpose"
    SHORT_INNER = "short_inner"
    GENERAL = "general"


class CopyForm(Enum):
    """Which of the kernels does it: they differ in how an element's place is found."""

    CONTIGUOUS = "contiguous"
    ROWS = "rows"
    PACKED = "packed"
    REPEAT = "repeat"
    FEW = "few"
    TILE = "tile"
    SHARED = "shared"
    SPLIT = "split"


@dataclass(frozen=True)
class CopyLayout:
    """One copy, decided.

    Args:
        copy_class: What it looks like.
        form: CONTIGUOUS where one run of bytes is aligned alike on both sides, ROWS where runs
            are not aligned, PACKED where many such runs make one of dst, REPEAT where 16-byte
            words are read once and written often, TILE where boxes pass through shared memory, FEW
            where few words make rows of one pitch on each side, else SHARED where both sides have
            the same axes and SPLIT where each has its own, or common ones would be more than eight.
        word: Bytes that lie side by side, aligned, on both sides: 1, 2, 4, 8 or 16.
        index_bits: 32 where every index and offset fits, else 64.
        count: Words to move (CONTIGUOUS: whole words between ``head`` and ``tail``).
        dst_axes, src_axes: (size, stride) in words, from the slowest to the fastest.
        dst_start, src_start: Bytes from each pointer to the first word.
        head, tail: Bytes before the first and after the last whole word (CONTIGUOUS only).
        boxes: How it is divided (TILE only).
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
    boxes: Boxes | None = None

    @property
    def is_small(self) -> bool:
        """Whether so few words move that the start of a kernel is most of its time."""
        return self.form is not CopyForm.TILE and self.count <= _SMALL

    @property
    def is_large(self) -> bool:
        """Whether so much moves that the start of many blocks is nothing against it."""
        return self.head + self.count * self.word + self.tail >= _LARGE

    @property
    def kernel_name(self) -> str:
        """The ``extern "C"`` name of the kernel that does it."""
        return kernel_name(self.form, self.word, self.index_bits)

    def arguments(self, dst: int, src: int) -> tuple[int | bytes, ...]:
        """The kernel's arguments for these two addresses, unpacked."""
        return (dst + self.dst_start, src + self.src_start, *self._sizes)

    @cached_property
    def _sizes(self) -> tuple[int | bytes, ...]:
        bits = self.index_bits
        if self.form is CopyForm.CONTIGUOUS:
            return self.head, self.count, self.tail
        if self.form is CopyForm.SPLIT:
            packed = b"".join(
                pack_axes(side, bits, bits) for side in (self.dst_axes, self.src_axes)
            )
            return self.count, packed, len(self.dst_axes), len(self.src_axes)
        axes = _paired(self.dst_axes, self.src_axes)
        if self.form is CopyForm.ROWS:
            pieces, row = row_pieces(axes, self.word)
            count = prod(axis.size for axis in pieces)
            return count, row, pack_shared(pieces, bits, 64), len(pieces)
        if self.form is CopyForm.PACKED:
            rows, row = packed_rows(axes, self.word)
            return self.count, row, pack_shared(rows, bits, 64), len(rows)
        if self.form is CopyForm.FEW:
            return self.count, *few_rows(axes)
        if self.form is CopyForm.REPEAT:
            made = find_repeat(axes)
            assert made is not None
            packed = pack_shared(made.axes, 32, 64)
            return made.count, made.copies, made.apart, made.last, packed, len(made.axes)
        if self.form is CopyForm.TILE:
            assert self.boxes is not None
            return (pack_boxes(self.boxes),)
        return self.count, pack_shared(axes, bits, bits), len(axes)


def kernel_name(form: CopyForm, word: int, index_bits: int) -> str:
    """The name of the kernel of a form; some do all words or all indices alike."""
    name = f"strided_copy_{form.value}"
    if form in (CopyForm.CONTIGUOUS, CopyForm.REPEAT):
        return name
    if form in (CopyForm.FEW, CopyForm.TILE):
        return f"{name}_w{word}"
    return f"{name}_w{word}_i{index_bits}"


def _paired(dst: Axes, src: Axes) -> PairedAxes:
    sides = zip(dst, src, strict=True)
    return tuple(PairedAxis(to.size, to.stride, source.stride) for to, source in sides)


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
    turned, *moved = turn_forward(shared or ())
    ordered = order(turned)
    if shared is None or len(ordered) > MAX_AXES:
        sides, starts = (axes[0], axes[1]), (0, 0)
        form, copy_class = CopyForm.SPLIT, CopyClass.GENERAL
    else:
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
    if (addresses[1] - addresses[0]) % WIDEST_WORD and nbytes >= WIDEST_WORD:
        # no word of both sides is aligned: one row
        word = gcd(nbytes, WIDEST_WORD // 2, *addresses)
        row = (Axis(nbytes // word, 1),)
        return _with_rows(CopyClass.CONTIGUOUS, word, (row, row), starts)
    # both sides reach a multiple of the word after the same few bytes, or have no whole word
    aligned = -addresses[0] % WIDEST_WORD
    head = nbytes if nbytes < WIDEST_WORD and aligned == 0 else min(aligned, nbytes)
    count, tail = divmod(nbytes - head, WIDEST_WORD)
    return CopyLayout(
        CopyClass.CONTIGUOUS,
        CopyForm.CONTIGUOUS,
        WIDEST_WORD,
        64,
        count,
        dst_start=starts[0],
        src_start=starts[1],
        head=head,
        tail=tail,
    )


def _with_rows(
    copy_class: CopyClass, word: int, sides: tuple[Axes, Axes], starts: tuple[int, int]
) -> CopyLayout:
    pieces, _ = row_pieces(_paired(*sides), word)
    bits = 32 if prod(axis.size for axis in pieces) < _MOST_WORDS else 64
    count = prod(axis.size for axis in sides[0])
    return CopyLayout(copy_class, CopyForm.ROWS, word, bits, count, *sides, *starts)


def _lay_out_strided(
    copy_class: CopyClass,
    form: CopyForm,
    sides: tuple[Axes, Axes],
    word: int,
    addresses: tuple[int, int],
    starts: tuple[int, int],
) -> CopyLayout:
    places = [address + start for address, start in zip(addresses, starts, strict=True)]
    words = _words_at_once(sides, gcd(*places, WIDEST_WORD) // word)
    if words > 1:
        word, sides = word * words, (widen(sides[0], words), widen(sides[1], words))
    if form is CopyForm.SPLIT:
        dst, src = (tuple(axis for axis in side if axis.size > 1) for side in sides)
    else:
        axes = tuple(axis for axis in _paired(*sides) if axis.size > 1)
        dst, src = dst_side(axes), src_side(axes)
        made = _special(copy_class, axes, word, places, starts)
        if made is not None:
            return made
    bits = 32 if _fits_32_bits(dst) and _fits_32_bits(src) else 64
    count = prod(axis.size for axis in dst)
    if form is CopyForm.SHARED and bits == 32 and count <= _SMALL and _are_rows(dst, src):
        form = CopyForm.FEW
    return CopyLayout(copy_class, form, word, bits, count, dst, src, *starts)


def _is_packed(axes: PairedAxes, word: int, count: int) -> bool:
    is_long = axes[-1].size * word >= _PACKED_ROW
    return word == _PACKED and is_long and count > _SMALL and is_dst_run(axes)


def _are_rows(dst: Axes, src: Axes) -> bool:
    return len(dst) == 2 and dst[-1].stride == src[-1].stride == 1


def _special(
    copy_class: CopyClass, axes: PairedAxes, word: int, places: list[int], starts: tuple[int, int]
) -> CopyLayout | None:
    """The copy by kernels that find more than one word's place at a time, where they can."""
    sides = dst_side(axes), src_side(axes)
    count = prod(axis.size for axis in axes)
    if copy_class is CopyClass.ROWS:
        if word <= _PIECED and axes[-1].size * word >= _LONG_ROW:
            return _with_rows(copy_class, word, sides, starts)
        if _is_packed(axes, word, count):
            bits = 32 if count < _MOST_WORDS else 64
            return CopyLayout(copy_class, CopyForm.PACKED, word, bits, count, *sides, *starts)
        repeat = find_repeat(axes) if word == WIDEST_WORD else None
        if repeat is not None and repeat.count < _MOST_WORDS:
            return CopyLayout(copy_class, CopyForm.REPEAT, word, 64, count, *sides, *starts)
        return None
    boxes = divide(axes, word, *places) if axes and pays(axes, word) else None
    if boxes is None:
        return None
    return CopyLayout(copy_class, CopyForm.TILE, word, 64, count, *sides, *starts, boxes=boxes)


def _words_at_once(sides: tuple[Axes, Axes], most: int) -> int:
    """The most words (a power of two) that can move as one on both sides."""
    while most > 1 and not all(can_widen(side, most) for side in sides):
        most //= 2
    return most


def _fits_32_bits(axes: Axes) -> bool:
    # offsets are summed axis by axis, so partial sums must fit too
    lowest, highest = span(axes)
    return prod(axis.size for axis in axes) < _MOST_WORDS and highest < 2**31 and -lowest < 2**31
