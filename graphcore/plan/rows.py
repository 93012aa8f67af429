"""Rows: how the elements of strided views lie in the dense rows that memcpy and memset nodes take.

Pure arithmetic: axes are brought into memory order and merged, one side or two alike. What has no
dense rows, or more than two axes of them, fits no node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# CUDA's limit of the bytes between rows (CU_DEVICE_ATTRIBUTE_MAX_PITCH)
_MAX_PITCH = 2**31 - 1

_Axis = tuple[int, tuple[int, ...]]  # elements, step in elements on each side


@dataclass(frozen=True, slots=True)
class Rows:
    """``depth`` slices of ``height`` rows of ``width`` bytes.

    Args:
        width: Bytes of a row.
        height: Rows of a slice.
        depth: Slices.
        pitches: Of each side: bytes between rows; 0 where there is one row.
        slices: Of each side: rows between slices; 0 where there is one slice.
        starts: Of each side: bytes from the view's first element to the first row (negative steps
            are walked the other way round).
    """

    width: int
    height: int
    depth: int
    pitches: tuple[int, ...]
    slices: tuple[int, ...]
    starts: tuple[int, ...]


def dense_rows(
    shape: Sequence[int], sides: Sequence[Sequence[int]], itemsize: int, *, least: int = 2
) -> Rows | None:
    """The rows of views of ``shape``; None where they have none.

    Args:
        shape: Sizes, none of them 0.
        sides: Strides in elements, of one view or of both views of a copy.
        itemsize: Bytes of one element.
        least: Elements that a row must have, where there are several rows.
    """
    pairs = zip(shape, zip(*sides, strict=True), strict=True)
    axes, starts = _forward([(count, tuple(steps)) for count, steps in pairs if count != 1], sides)
    axes = _merged(axes)
    if any(step <= 0 for _, steps in axes for step in steps):
        return None
    width = 1
    if axes and set(axes[-1][1]) == {1}:
        width, axes = axes[-1][0], axes[:-1]
    if len(axes) > 2 or (axes and width < least):
        return None
    return _rows(width * itemsize, axes, itemsize, tuple(start * itemsize for start in starts))


def _rows(width: int, axes: list[_Axis], itemsize: int, starts: tuple[int, ...]) -> Rows | None:
    nothing = (0,) * len(starts)
    if not axes:
        return Rows(width, 1, 1, nothing, nothing, starts)
    height, steps = axes[-1]
    pitches = tuple(step * itemsize for step in steps)
    if any(not width <= pitch <= _MAX_PITCH for pitch in pitches):
        return None
    if len(axes) == 1:
        return Rows(width, height, 1, pitches, nothing, starts)
    depth, outer = axes[0]
    if any(far % near or far // near < height for far, near in zip(outer, steps, strict=True)):
        return None
    slices = tuple(far // near for far, near in zip(outer, steps, strict=True))
    return Rows(width, height, depth, pitches, slices, starts)


def _forward(axes: list[_Axis], sides: Sequence[object]) -> tuple[list[_Axis], list[int]]:
    """The axes with those turned that all sides walk backwards, and where each side then begins."""
    starts = [0] * len(sides)
    turned = []
    for count, steps in axes:
        if all(step < 0 for step in steps):
            starts = [start + (count - 1) * step for start, step in zip(starts, steps, strict=True)]
            turned.append((count, tuple(-step for step in steps)))
        else:
            turned.append((count, steps))
    return turned, starts


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """The axes from the widest step to the narrowest, merged where one continues another."""
    merged: list[_Axis] = []
    # all sides take the same order, so which element goes where does not change
    for count, steps in sorted(axes, key=lambda axis: axis[1], reverse=True):
        if merged:
            outer_count, outer_steps = merged[-1]
            if outer_steps == tuple(count * step for step in steps):
                merged[-1] = (outer_count * count, steps)
                continue
        merged.append((count, steps))
    return merged
