"""The arguments of the strided_copy kernels: axes, boxes and repeats, packed for the source.

Axes are packed from the fastest on, eight of each kind, unused ones 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from graphcore_kernels._axes import Axes, PairedAxes, PairedAxis, dst_side
from graphcore_kernels._boxes import Boxes, BoxStep
from graphcore_kernels._division import magic

MAX_AXES = 8
PIECE = 16
"""Bytes of a write of rows that begin anywhere."""

_REPEATERS = 1024  # threads that repeat side by side


def pack_axes(axes: Axes, index_bits: int, offset_bits: int) -> bytes:
    """``Side<u{index_bits}, i{offset_bits}>`` of axes from the slowest to the fastest."""
    divisors = [magic(axis.size, index_bits) for axis in axes]
    return (
        _pack((axis.size for axis in axes), index_bits)
        + _pack((divisor.magic for divisor in divisors), index_bits)
        + _pack((divisor.shift for divisor in divisors), index_bits)
        + pack_strides((axis.stride for axis in axes), offset_bits)
    )


def pack_strides(strides: Iterable[int], bits: int) -> bytes:
    return _pack(strides, bits, signed=True)


def shared_bytes(index_bits: int, offset_bits: int) -> int:
    """Bytes of ``SharedAxes<u{index_bits}, i{offset_bits}>``."""
    return (3 * index_bits + 2 * offset_bits) * MAX_AXES // 8


def split_bytes(index_bits: int, offset_bits: int) -> int:
    """Bytes of ``SplitAxes<u{index_bits}, i{offset_bits}>``."""
    return 2 * (3 * index_bits + offset_bits) * MAX_AXES // 8


def pack_shared(axes: PairedAxes, index_bits: int, offset_bits: int) -> bytes:
    """``SharedAxes``: one set of axes, a stride of each side per axis."""
    return pack_axes(dst_side(axes), index_bits, offset_bits) + pack_strides(
        (axis.src for axis in axes), offset_bits
    )


def few_rows(axes: PairedAxes) -> tuple[int, int, int, int, int]:
    """(words of a row, multiplier and shift that divide by them, words to the next row: dst, src).

    Of two axes, the faster of which runs through memory on both sides.
    """
    outer, inner = axes
    divisor = magic(inner.size, 32)
    return inner.size, divisor.magic, divisor.shift, outer.dst, outer.src


def row_pieces(axes: PairedAxes, word: int) -> tuple[PairedAxes, int]:
    """(axes in bytes, the fastest of which counts pieces, bytes of a row).

    A row that begins anywhere touches at most so many pieces of 16 aligned bytes of dst.
    """
    *outer, inner = axes
    row = inner.size * word
    pieces = PairedAxis(-(-(row + PIECE - word) // PIECE), PIECE, PIECE)
    strides = (PairedAxis(axis.size, axis.dst * word, axis.src * word) for axis in outer)
    return (*strides, pieces), row


def packed_rows(axes: PairedAxes, word: int) -> tuple[PairedAxes, int]:
    """(axes in bytes, the fastest of which counts words, bytes of a row)."""
    strides = (PairedAxis(axis.size, axis.dst * word, axis.src * word) for axis in axes)
    return tuple(strides), axes[-1].size * word


@dataclass(frozen=True, slots=True)
class Repeat:
    """Words that are read once and written often; strides in words.

    Args:
        axes: Of the words.
        count: How many.
        copies: Times that each is written.
        apart: From one copy to the next.
        last: Where the last copy lies: it may lie nearer than ``apart`` to the one before.
    """

    axes: PairedAxes
    count: int
    copies: int
    apart: int
    last: int


def find_repeat(axes: PairedAxes) -> Repeat | None:
    """The longest axis along which src stays where it is, unless it is the fastest one."""
    repeated = [axis for axis in axes[:-1] if not axis.src]
    if not repeated:
        return None
    axis = max(repeated, key=lambda each: each.size)
    words = [each for each in axes if each is not axis]
    count = 1
    for each in words:
        count *= each.size
    # so few words are copied several times side by side
    beside = max(1, min(axis.size, _REPEATERS // count))
    if beside > 1:
        words = sorted((*words, PairedAxis(beside, axis.dst, 0)), key=lambda each: -each.dst)
    apart, last = beside * axis.dst, (axis.size - beside) * axis.dst
    return Repeat(tuple(words), count * beside, -(-axis.size // beside), apart, last)


def boxes_bytes() -> int:
    """Bytes of ``TileAxes``."""
    return 3 * _SIDE_BYTES + MAX_AXES * 12 + 2 * _STEP.size + _REST.size


_SIDE_BYTES = (3 * 4 + 8) * MAX_AXES
_STEP = struct.Struct("<2q8I")
_REST = struct.Struct("<12I")


def pack_boxes(boxes: Boxes) -> bytes:
    """``TileAxes``."""
    batch = boxes.batch or (PairedAxis(1, 0, 0),)
    load_units, store_units = (_units(side) for side in (boxes.load, dst_side(boxes.store)))
    return (
        pack_axes(boxes.load, 32, 64)
        + pack_axes(dst_side(boxes.store), 32, 64)
        + pack_axes(dst_side(batch), 32, 64)
        + pack_strides((axis.src for axis in batch), 64)
        + _pack((axis.src for axis in boxes.store), 32)
        + b"".join(map(_pack_step, boxes.steps))
        + _REST.pack(
            len(boxes.load), len(boxes.store), len(batch), load_units, store_units,
            boxes.load_bytes, boxes.store_bytes, boxes.gather, *boxes.swizzle, boxes.count,
        )
    )  # fmt: skip


def _units(axes: Axes) -> int:
    count = 1
    for axis in axes:
        count *= axis.size
    return count


def _pack_step(step: BoxStep) -> bytes:
    groups = magic(step.groups, 32)
    return _STEP.pack(
        step.dst, step.src, step.count, step.extent, step.last,
        step.groups, groups.magic, groups.shift, step.bits, 0,
    )  # fmt: skip


def _pack(values: Iterable[int], bits: int, *, signed: bool = False) -> bytes:
    code = {32: "I", 64: "Q"}[bits]
    known = tuple(values)[::-1]
    padded = chain(known, [0] * (MAX_AXES - len(known)))
    return struct.pack(f"<{MAX_AXES}{code.lower() if signed else code}", *padded)
