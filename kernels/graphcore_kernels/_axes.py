"""The axes of a copy: merging, splitting, ordering and widening them, as pure arithmetic.

Elements are copied in row-major order of both shapes, so any refinement of the two shapes that
keeps that order is the same copy. Sizes and strides count words of one width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Axis(NamedTuple):
    """One dimension of one side."""

    size: int
    stride: int


class PairedAxis(NamedTuple):
    """One dimension both sides share: its size, and the stride of each side."""

    size: int
    dst: int
    src: int


Axes = tuple[Axis, ...]
PairedAxes = tuple[PairedAxis, ...]


def merge(axes: Iterable[Axis]) -> Axes:
    """Axes without those of size 1, neighbours made one where the outer continues the inner."""
    merged: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged and merged[-1].stride == axis.stride * axis.size:
            merged[-1] = Axis(merged[-1].size * axis.size, axis.stride)
        else:
            merged.append(axis)
    return tuple(merged)


def pair(dst: Axes, src: Axes) -> PairedAxes | None:
    """The coarsest axes that refine both sides, or None where the shapes have none."""
    pairs: list[PairedAxis] = []
    left, right = list(dst), list(src)
    while left and right:
        ours, theirs = left.pop(), right.pop()
        size = min(ours.size, theirs.size)
        if ours.size % size or theirs.size % size:
            return None
        pairs.append(PairedAxis(size, ours.stride, theirs.stride))
        for stack, axis in ((left, ours), (right, theirs)):
            if axis.size > size:
                stack.append(Axis(axis.size // size, axis.stride * size))
    assert not left
    assert not right
    return tuple(reversed(pairs))


def turn_forward(axes: PairedAxes) -> tuple[PairedAxes, int, int]:
    """Axes that all run forward in dst, and the words by which dst and src then start further."""
    dst_start = sum((size - 1) * dst for size, dst, _ in axes if dst < 0)
    src_start = sum((size - 1) * src for size, dst, src in axes if dst < 0)
    turned = [PairedAxis(a.size, -a.dst, -a.src) if a.dst < 0 else a for a in axes]
    return tuple(turned), dst_start, src_start


def order(axes: PairedAxes) -> PairedAxes:
    """Axes from the slowest in dst to the fastest, merged: writes then run through memory."""
    merged: list[PairedAxis] = []
    for axis in sorted(axes, key=lambda axis: -axis.dst):
        outer = merged[-1] if merged else None
        if outer and (outer.dst, outer.src) == (axis.dst * axis.size, axis.src * axis.size):
            merged[-1] = PairedAxis(outer.size * axis.size, axis.dst, axis.src)
        else:
            merged.append(axis)
    return tuple(merged)


def is_dst_run(axes: PairedAxes) -> bool:
    """Whether the axes run through one piece of dst, word after word."""
    return axes[-1].dst == 1 and all(
        outer.dst == inner.dst * inner.size for outer, inner in pairwise(axes)
    )


def dst_side(axes: PairedAxes) -> Axes:
    return tuple(Axis(axis.size, axis.dst) for axis in axes)


def src_side(axes: PairedAxes) -> Axes:
    return tuple(Axis(axis.size, axis.src) for axis in axes)


def narrow(axes: Iterable[Axis], pieces: int) -> Axes:
    """The same memory in words of a ``pieces``-th of the width."""
    return (*(Axis(axis.size, axis.stride * pieces) for axis in axes), Axis(pieces, 1))


def can_widen(axes: Sequence[Axis], words: int) -> bool:
    """Whether ``words`` words can move as one: they lie side by side, and every run of them."""
    if not axes or axes[-1].stride != 1 or axes[-1].size % words:
        return False
    return all(axis.stride % words == 0 for axis in axes[:-1])


def widen(axes: Axes, words: int) -> Axes:
    """The same memory in words ``words`` times as wide; :func:`can_widen` holds."""
    outer = (Axis(axis.size, axis.stride // words) for axis in axes[:-1])
    return (*outer, Axis(axes[-1].size // words, 1))
