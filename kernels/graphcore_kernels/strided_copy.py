"""``strided_copy``: the launcher of the strided copy kernels. It checks, chooses and launches.

A copy is checked whole before anything is launched; one that raises has written nothing. Planning
is remembered by shapes, strides and alignment (copy_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from graphcore.driver import Driver, Kernel, kernel
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError
from graphcore.resources.overlap import overlap
from graphcore.resources.tensors import TensorRef, describe
from graphcore_kernels._copy_arguments import boxes_bytes, shared_bytes, split_bytes
from graphcore_kernels._drivers import Operand, choose_driver, device_facts
from graphcore_kernels._module import load, load_through_cupy, read_source
from graphcore_kernels._planned import KernelLaunch, Planned
from graphcore_kernels.copy_plan import (
    WIDEST_WORD,
    CopyClass,
    CopyForm,
    CopyLayout,
    kernel_name,
    lay_out,
)
from graphcore_kernels.strided_copy_reference import reference

# (blocks a multiprocessor, threads a block), measured on an H200 (docs/kernel-notes.md)
_SHAPES = {
    CopyForm.CONTIGUOUS: (1, 512),
    CopyForm.ROWS: (8, 256),
    CopyForm.PACKED: (8, 256),
    CopyForm.REPEAT: (1, 1024),
    CopyForm.TILE: (4, 256),
    CopyForm.SHARED: (4, 256),
    CopyForm.SPLIT: (4, 256),
}
_LARGE_SHAPES = {  # many blocks are begun in the order of addresses
    CopyForm.CONTIGUOUS: (256, 256),
    CopyForm.PACKED: (64, 256),
    CopyForm.REPEAT: (64, 1024),
}
_WHOLE_ROWS = (1, 512)  # rows of words of 16 bytes: as contiguous
_NARROW_ROWS = (8, 256)  # of narrower ones, more of which must be under way
_SMALL = LaunchConfig((64, 1, 1), (256, 1, 1))  # small copies wait for all blocks to start
_ITEMSIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class CopyPlan(Planned):
    """One copy, checked and chosen; launch it as often as wanted.

    Args:
        dst: What is written; the plan keeps it alive.
        src: What is read; the plan keeps it alive.
        layout: How it is done.
        kernel: The kernel that does it; None where there is nothing to copy.
        arguments: The kernel's arguments, packed.
    """

    name: ClassVar[str] = "strided_copy"
    dst: Operand
    src: Operand
    layout: CopyLayout
    kernel: Kernel | None
    arguments: tuple[bytes, ...]

    @property
    def copy_class(self) -> CopyClass:
        return self.layout.copy_class

    def config(self, driver: Driver) -> LaunchConfig:
        """The launch shape on the driver's device.

        It depends on the kernel, the class, and whether the copy is small or large; not on sizes
        within.
        """
        layout = self.layout
        if layout.is_small:
            return _SMALL
        blocks, threads = _SHAPES[layout.form]
        if layout.is_large:
            blocks, threads = _LARGE_SHAPES.get(layout.form, (blocks, threads))
        if layout.form is CopyForm.SHARED and layout.copy_class is CopyClass.ROWS:
            blocks, threads = _WHOLE_ROWS if layout.word == WIDEST_WORD else _NARROW_ROWS
        return LaunchConfig((blocks * device_facts(driver).multiprocessors, 1, 1), (threads, 1, 1))

    @property
    def is_empty(self) -> bool:
        return self.kernel is None

    def kept(self) -> Mapping[str, Operand]:
        return {"dst": self.dst, "src": self.src}

    def kernels(self, driver: Driver) -> Sequence[KernelLaunch]:
        assert self.kernel is not None
        return (KernelLaunch(self.kernel, self.config(driver), self.arguments),)


class StridedCopy:
    """The callable behind :data:`strided_copy`; it holds nothing."""

    def __call__(self, dst: Any, src: Any, stream: Any = None) -> None:
        """Copies the elements of ``src`` into ``dst``, bit for bit.

        Elements go in row-major order of both shapes, so the shapes may differ (a reshaping copy)
        as long as they hold as many elements. On a device this is one kernel; in a capture one
        kernel node, whose kernel and launch shape depend on the copy's class and on whether it is
        small (at most 65536 words of those that move at once) or large (500 MB or more), and not
        on its sizes within. Small rows of one pitch on each side have a kernel of their own, so
        one more dimension that does not merge is another kernel too. With no elements nothing is
        launched and a capture gets no node.

        Args:
            dst: Tensor to write: any shape and strides that give each element a place of its own.
                One that requires grad is taken detached.
            src: Tensor to read, of the same element type and device: any strides, 0 and negative
                too. Both need at most eight dimensions after neighbouring ones are merged.
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy
                stream.

        Raises:
            CacheTypeError: An operand is no tensor, or ``stream`` no stream.
            ConfigurationError: Element types, counts or devices differ; ``dst`` is read-only or
                overlaps itself; the two share memory; more than eight dimensions are left.
            CudaError: The driver refused the launch.
        """
        _plan(dst, src).launch(stream)

    def plan(self, dst: Any, src: Any) -> CopyPlan:
        """Checks and chooses now, and loads the kernel, so that a capture only launches.

        Args and errors as for the call itself.
        """
        plan = _plan(dst, src)
        if plan.kernel is not None:
            load(choose_driver((plan.dst, plan.src)), plan.kernel)
        return plan

    def __repr__(self) -> str:
        return "strided_copy(dst, src, stream=None)"


strided_copy = StridedCopy()


_FILES = {
    CopyForm.ROWS: ("strided_copy_rows.cu",),
    CopyForm.PACKED: ("strided_copy_rows.cu",),
    CopyForm.REPEAT: ("strided_copy_rows.cu",),
    CopyForm.TILE: ("strided_copy_boxes.cu",),
}


def block_sizes(form: CopyForm, word: int) -> tuple[int, ...]:
    """Threads of a block that launches of a kernel of this form and word may have, ascending."""
    shapes = [table[form] for table in (_SHAPES, _LARGE_SHAPES) if form in table]
    if form is CopyForm.SHARED:
        shapes.append(_WHOLE_ROWS if word == WIDEST_WORD else _NARROW_ROWS)
    found = {threads for _, threads in shapes}
    if form is not CopyForm.TILE:
        found.add(_SMALL.block[0])
    return tuple(sorted(found))


_WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "u128"}


@cache
def copy_kernel(form: CopyForm, word: int, index_bits: int) -> Kernel:
    """The kernel of one form, word width (bytes) and index width (bits); one object each."""
    name = kernel_name(form, word, index_bits)
    index, offset = f"u{index_bits}", f"i{index_bits}"
    types, sizes = {
        CopyForm.CONTIGUOUS: ((), "u64 head, u64 count, u64 tail"),
        CopyForm.ROWS: (
            (name, _WORDS[word], index),
            f"u64 count, i64 row, bytes:{shared_bytes(index_bits, 64)} axes, u32 rank",
        ),
        CopyForm.PACKED: (
            (name, index),
            f"u64 count, i64 row, bytes:{shared_bytes(index_bits, 64)} axes, u32 rank",
        ),
        CopyForm.REPEAT: (
            (),
            "u32 count, u64 copies, i64 apart, i64 last, "
            f"bytes:{shared_bytes(32, 64)} axes, u32 rank",
        ),
        CopyForm.FEW: (
            (name, _WORDS[word]),
            "u32 count, u32 row, u32 magic, u32 shift, i32 dst_stride, i32 src_stride",
        ),
        CopyForm.TILE: ((name, _WORDS[word]), f"bytes:{boxes_bytes()} tile"),
        CopyForm.SHARED: (
            (name, _WORDS[word], index, offset),
            f"u64 count, bytes:{shared_bytes(index_bits, index_bits)} axes, u32 rank",
        ),
        CopyForm.SPLIT: (
            (name, _WORDS[word], index, offset),
            f"u64 count, bytes:{split_bytes(index_bits, index_bits)} axes, "
            "u32 dst_rank, u32 src_rank",
        ),
    }[form]
    made = f"{form.name}_KERNEL" + (f"({', '.join(types)})" if types else "")
    files = ("strided_copy.cu", *_FILES.get(form, ()))
    return kernel(
        name,
        f"void* dst, const void* src, {sizes}",
        "\n".join((*map(read_source, files), made, "")),
        reference(form, word, index_bits),
        loader=load_through_cupy,
    )


def _plan(dst: Any, src: Any) -> CopyPlan:
    to = describe(dst, writable=True, name="dst")
    source = describe(src, name="src")
    operands = Operand(dst, to), Operand(src, source)
    _check_operands(to, source)
    layout = lay_out(
        tuple(zip(to.shape, to.strides, strict=True)),
        tuple(zip(source.shape, source.strides, strict=True)),
        to.itemsize,
        to.address % WIDEST_WORD,
        source.address % WIDEST_WORD,
    )
    if layout.copy_class is CopyClass.EMPTY:
        return CopyPlan(*operands, layout, None, ())
    _check_apart(to, source)
    chosen = copy_kernel(layout.form, layout.word, layout.index_bits)
    arguments = chosen.pack(*layout.arguments(to.address, source.address))
    return CopyPlan(*operands, layout, chosen, arguments)


def _check_operands(dst: TensorRef, src: TensorRef) -> None:
    if dst.dtype != src.dtype:
        raise ConfigurationError(f"src.dtype: expected {dst.dtype} as dst has, got {src.dtype}")
    if dst.itemsize not in _ITEMSIZES:
        raise ConfigurationError(
            f"dst.dtype: expected elements of {_ITEMSIZES} bytes, got {dst.itemsize} ({dst.dtype})"
        )
    if (dst.device_kind, dst.device) != (src.device_kind, src.device):
        raise ConfigurationError(
            f"src.device: expected {dst.device_kind}:{dst.device} as dst, "
            f"got {src.device_kind}:{src.device}"
        )


def _check_apart(dst: TensorRef, src: TensorRef) -> None:
    sides = [
        tuple(
            (size, stride * ref.itemsize)
            for size, stride in zip(ref.shape, ref.strides, strict=True)
        )
        for ref in (dst, src)
    ]
    if overlap(*sides, src.address - dst.address, dst.itemsize):
        raise ConfigurationError(
            f"src: expected memory apart from dst (at {dst.address:#x}, shape {dst.shape}, "
            f"strides {dst.strides}), got memory that shares bytes with it (at {src.address:#x}, "
            f"shape {src.shape}, strides {src.strides})"
        )
