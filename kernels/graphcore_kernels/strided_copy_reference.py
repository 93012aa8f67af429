"""What the strided_copy kernels do, in NumPy; the emulated driver runs it.

It reads the very arguments the device gets, packed axes and boxes included.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

from graphcore.driver import Pointer
from graphcore_kernels._copy_arguments import MAX_AXES
from graphcore_kernels.copy_plan import CopyForm

if TYPE_CHECKING:
    import numpy

    from graphcore.driver.records import LaunchConfig

# words are moved, not numbers: no type here has a value that a copy could change
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "V16"}


def reference(form: CopyForm, word: int, index_bits: int) -> Callable[..., None]:
    """The reference of one kernel, called as ``reference(config, *arguments)``."""

    def contiguous(
        config: LaunchConfig, dst: Pointer, src: Pointer, head: int, count: int, tail: int
    ) -> None:
        nbytes = head + count * word + tail
        dst.array(nbytes)[...] = src.array(nbytes)

    def rows(
        config: LaunchConfig,
        dst: Pointer,
        src: Pointer,
        count: int,
        row: int,
        axes: bytes,
        rank: int,
    ) -> None:
        sizes, dst_strides, src_strides = _shared(axes, index_bits, 64, rank)
        shape = (*sizes[:-1], row)
        _view(dst, 1, shape, (*dst_strides[:-1], 1))[...] = _view(
            src, 1, shape, (*src_strides[:-1], 1)
        )

    def packed(
        config: LaunchConfig,
        dst: Pointer,
        src: Pointer,
        count: int,
        row: int,
        axes: bytes,
        rank: int,
    ) -> None:
        sizes, dst_strides, src_strides = _shared(axes, index_bits, 64, rank)
        written = _bytes_apart(dst.address, word, sizes, dst_strides)
        written[...] = _bytes_apart(src.address, word, sizes, src_strides)

    def repeat(config: LaunchConfig, dst: Pointer, src: Pointer, *numbers: Any) -> None:
        _, copies, apart, last, axes, rank = numbers
        sizes, dst_strides, src_strides = _shared(axes, 32, 64, rank)
        words = _view(src, word, sizes, src_strides)
        _view(dst, word, (copies - 1, *sizes), (apart, *dst_strides))[...] = words
        furthest = Pointer(dst.address + last * word, dst.dtype)
        _view(furthest, word, sizes, dst_strides)[...] = words

    def few(config: LaunchConfig, dst: Pointer, src: Pointer, *numbers: int) -> None:
        count, row, _, _, dst_stride, src_stride = numbers
        shape = count // row, row
        _view(dst, word, shape, (dst_stride, 1))[...] = _view(src, word, shape, (src_stride, 1))

    def tile(config: LaunchConfig, dst: Pointer, src: Pointer, tile: bytes) -> None:
        _move_boxes(dst.address, src.address, tile, word)

    def shared(
        config: LaunchConfig, dst: Pointer, src: Pointer, count: int, axes: bytes, rank: int
    ) -> None:
        sizes, dst_strides, src_strides = _shared(axes, index_bits, index_bits, rank)
        _view(dst, word, sizes, dst_strides)[...] = _view(src, word, sizes, src_strides)

    def split(
        config: LaunchConfig,
        dst: Pointer,
        src: Pointer,
        count: int,
        axes: bytes,
        dst_rank: int,
        src_rank: int,
    ) -> None:
        half = len(axes) // 2
        sizes, strides = _side(axes[:half], index_bits, index_bits, dst_rank)
        src_sizes, src_strides = _side(axes[half:], index_bits, index_bits, src_rank)
        source = _view(src, word, src_sizes, src_strides)
        _view(dst, word, sizes, strides)[...] = source.reshape(sizes)

    references: dict[CopyForm, Callable[..., None]] = {
        CopyForm.CONTIGUOUS: contiguous,
        CopyForm.ROWS: rows,
        CopyForm.PACKED: packed,
        CopyForm.REPEAT: repeat,
        CopyForm.FEW: few,
        CopyForm.TILE: tile,
        CopyForm.SHARED: shared,
        CopyForm.SPLIT: split,
    }
    return references[form]


class _Reader:
    """Takes packed columns one after another."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{code}")
        return values

    def axes(self, code: str, rank: int = MAX_AXES) -> tuple[int, ...]:
        """A column of axes, from the slowest of the first ``rank`` to the fastest."""
        return self.numbers(code, MAX_AXES)[:rank][::-1]


_UNSIGNED = {32: "I", 64: "Q"}
_SIGNED = {32: "i", 64: "q"}


def _take_side(
    reader: _Reader, index_bits: int, offset_bits: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides); the divisors between them are the device's."""
    sizes, _, _ = (reader.axes(_UNSIGNED[index_bits], rank) for _ in range(3))
    return sizes, reader.axes(_SIGNED[offset_bits], rank)


def _side(
    axes: bytes, index_bits: int, offset_bits: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _take_side(_Reader(axes), index_bits, offset_bits, rank)


def _shared(
    axes: bytes, index_bits: int, offset_bits: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides in dst, strides in src)."""
    reader = _Reader(axes)
    sides = _take_side(reader, index_bits, offset_bits, rank)
    return (*sides, reader.axes(_SIGNED[offset_bits], rank))


def _view(
    pointer: Pointer, word: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> numpy.ndarray[Any, Any]:
    return Pointer(pointer.address, _WORDS[word]).array(sizes, strides)


def _bytes_apart(
    address: int, word: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> numpy.ndarray[Any, Any]:
    """A view whose strides, all multiples of ``word``, count bytes."""
    in_words = tuple(stride // word for stride in strides)
    return Pointer(address, _WORDS[word]).array(sizes, in_words)


def _move_boxes(dst: int, src: int, tile: bytes, word: int) -> None:
    """Box by box: into a room as shared memory is, in the order of src, and out in that of dst."""
    import numpy

    ranks = struct.unpack_from("<3I", tile, len(tile) - 48)
    load_units, _, load_bytes, store_bytes, gather = struct.unpack_from("<5I", tile, len(tile) - 36)
    reader = _Reader(tile)
    load, load_strides = _take_side(reader, 32, 64, ranks[0])
    store, store_strides = _take_side(reader, 32, 64, ranks[1])
    batch, batch_dst = _take_side(reader, 32, 64, ranks[2])
    batch_src, places = reader.axes("q", ranks[2]), reader.axes("I", ranks[1])
    steps = [(*reader.numbers("q", 2), *reader.numbers("I", 8)) for _ in range(2)]
    room = numpy.empty(load_units * load_bytes, numpy.uint8)
    words = store_bytes // word
    read = room.view(_WORDS[word]).reshape(*load, load_bytes // word)
    written = _bytes_apart(room.ctypes.data, word, (*store, words), (*places, gather))
    for at in product(*(range(size) for size in (*batch, steps[0][2], steps[1][2]))):
        to = dst + sum(n * stride for n, stride in zip(at, batch_dst, strict=False))
        source = src + sum(n * stride for n, stride in zip(at, batch_src, strict=False))
        for box, (to_stride, src_stride, _, extent, last, *_) in zip(at[-2:], steps, strict=True):
            start = min(box * extent, last)
            to, source = to + start * to_stride, source + start * src_stride
        read[...] = _bytes_apart(source, word, read.shape, (*load_strides, word))
        _bytes_apart(to, word, written.shape, (*store_strides, word))[...] = written
