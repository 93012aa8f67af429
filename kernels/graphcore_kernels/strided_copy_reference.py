"""What the strided_copy kernels do, in NumPy; the emulated driver runs it.

It reads the very arguments the device gets, packed axes included.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphcore.driver import Pointer
from graphcore_kernels.copy_plan import MAX_AXES, CopyForm

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

    def shared(
        config: LaunchConfig, dst: Pointer, src: Pointer, count: int, axes: bytes, rank: int
    ) -> None:
        sizes, _, _, dst_strides, src_strides = _columns(axes, index_bits, rank)
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
        sizes, _, _, strides = _columns(axes[:half], index_bits, dst_rank)
        src_sizes, _, _, src_strides = _columns(axes[half:], index_bits, src_rank)
        source = _view(src, word, src_sizes, src_strides)
        _view(dst, word, sizes, strides)[...] = source.reshape(sizes)

    references: dict[CopyForm, Callable[..., None]] = {
        CopyForm.CONTIGUOUS: contiguous,
        CopyForm.SHARED: shared,
        CopyForm.SPLIT: split,
    }
    return references[form]


def _columns(axes: bytes, index_bits: int, rank: int) -> list[tuple[int, ...]]:
    """Sizes, multipliers, shifts and strides (of one or two sides) of the first ``rank`` axes."""
    code = {32: "i", 64: "q"}[index_bits]
    values = struct.unpack(f"<{len(axes) * 8 // index_bits}{code}", axes)
    return [values[at : at + rank] for at in range(0, len(values), MAX_AXES)]


def _view(
    pointer: Pointer, word: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> numpy.ndarray[Any, Any]:
    return Pointer(pointer.address, _WORDS[word]).array(sizes, strides)
