"""Views of plan buffers by basic indexing and the usual re-arrangements; nothing is ever copied.

As NumPy does it, except that what would need a copy, or reach past the view, is an error. Only
:func:`as_strided` checks nothing: what it makes is checked by the plan's validation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.plan.integers import as_int, check_size, check_sizes
from graphcore.plan.records import PlanBuffer, View
from graphcore.resources.dtypes import find_dtype
from graphcore.resources.tensors import contiguous_strides


def index_view(view: View, index: Any) -> View:
    """``view[index]`` with ints, slices, ``...`` and None.

    Raises:
        ConfigurationError: An index out of range, too many of them, or of another kind.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(1 for entry in entries if entry is not None and entry is not ...)
    # by identity: an array among the entries compares element by element
    dots = [at for at, entry in enumerate(entries) if entry is ...] or [len(entries)]
    if len(dots) > 1 or taken > len(view.shape):
        raise _misfit(view, f"index {_shown(index)} does not fit {len(view.shape)} axes")
    entries[dots[0] : dots[0] + 1] = [slice(None)] * (len(view.shape) - taken)
    offset, axis = view.offset, 0
    shape: list[int] = []
    strides: list[int] = []
    for entry in entries:
        if entry is None:
            shape.append(1)
            strides.append(0)
            continue
        size, stride = view.shape[axis], view.strides[axis]
        if isinstance(entry, slice):
            start, count, step = _slice(view, entry, size)
            shape.append(count)
            strides.append(stride * step)
            # an empty slice stays where it is, so that it never points past the buffer
            offset += start * stride * view.itemsize if count else 0
        else:
            offset += _position(view, entry, size, axis) * stride * view.itemsize
        axis += 1
    return replace(view, offset=offset, shape=tuple(shape), strides=tuple(strides))


def _slice(view: View, entry: slice, size: int) -> tuple[int, int, int]:
    try:
        start, stop, step = entry.indices(size)
    except (TypeError, ValueError) as error:
        raise _misfit(view, f"index {_shown(entry)}: {error}") from None
    return start, len(range(start, stop, step)), step


def _position(view: View, entry: Any, size: int, axis: int) -> int:
    position = None if getattr(entry, "shape", ()) != () else as_int(entry)
    if position is None:
        raise _misfit(
            view,
            f"index: expected ints, slices, ... or None, got {type(entry).__name__} {entry!r:.30}",
        )
    if not -size <= position < size:
        raise _misfit(view, f"index {position} is out of range for axis {axis} of size {size}")
    return position % size


def reshape_view(view: View, shape: Sequence[Any]) -> View:
    """The same elements in C order under another shape; one size may be -1.

    Raises:
        ConfigurationError: Another number of elements, or a shape that would need a copy.
    """
    sizes = _sizes(view, shape)
    if view.size == 0:
        return replace(view, shape=sizes, strides=contiguous_strides(sizes))
    strides = _reshaped_strides(view, sizes)
    if strides is None:
        raise _misfit(
            view, f"shape {view.shape} with strides {view.strides} as {sizes} would need a copy"
        )
    return replace(view, shape=sizes, strides=strides)


def _sizes(view: View, shape: Sequence[Any]) -> tuple[int, ...]:
    sizes = check_sizes(_flat(shape), f"view of {view.buffer.name}.shape", least=-1)
    if sizes.count(-1) > 1:
        raise _misfit(view, f"shape {sizes}: only one size may be -1")
    if -1 in sizes:
        known = -math.prod(sizes)
        if not known or view.size % known:
            raise _misfit(view, f"{view.size} elements do not fit shape {sizes}")
        sizes = tuple(view.size // known if size == -1 else size for size in sizes)
    if math.prod(sizes) != view.size:
        raise _misfit(view, f"{view.size} elements do not fit shape {sizes}")
    return sizes


def _reshaped_strides(view: View, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of ``sizes`` over the same elements; None where no strides give them.

    Runs of axes that lie densely over each other are one long axis, which any sizes may split.
    """
    runs: list[list[int]] = []  # [elements left to hand out, stride of the innermost]
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    strides = [0] * len(sizes)
    step = runs[-1][1] if runs else 1
    for axis in range(len(sizes) - 1, -1, -1):
        if runs and runs[-1][0] == 1:
            runs.pop()
            step = runs[-1][1] if runs else step
        strides[axis] = step
        if sizes[axis] == 1:
            continue
        if not runs or runs[-1][0] % sizes[axis]:
            return None
        runs[-1][0] //= sizes[axis]
        step *= sizes[axis]
    return tuple(strides)


def permute_view(view: View, axes: Sequence[Any]) -> View:
    """Axes in another order; without any, reversed.

    Raises:
        ConfigurationError: ``axes`` names an axis twice, not at all, or one that is not there.
    """
    count = len(view.shape)
    wanted = _flat(axes) or tuple(range(count - 1, -1, -1))
    order = [axis for axis in map(as_int, wanted) if axis is not None and -count <= axis < count]
    if len(order) < len(wanted) or sorted(axis % count for axis in order) != [*range(count)]:
        raise _misfit(view, f"expected each of {count} axes once, got {wanted}")
    return replace(
        view,
        shape=tuple(view.shape[axis] for axis in order),
        strides=tuple(view.strides[axis] for axis in order),
    )


def retype_view(view: View, dtype: Any) -> View:
    """The same bytes as elements of another type; the last axis grows or shrinks as in NumPy.

    Raises:
        ConfigurationError: An unknown type; elements of another size where the last axis is not
            dense, or the bytes do not divide into whole, aligned elements.
    """
    try:
        wanted = find_dtype(dtype)
    except CacheTypeError as error:
        raise ConfigurationError(f"view of {view.buffer.name}: {error}") from None
    old, new = view.itemsize, wanted.itemsize
    if old == new:
        return replace(view, dtype=wanted.name)
    if not view.shape or (view.shape[-1] > 1 and view.strides[-1] != 1):
        raise _misfit(
            view,
            f"as {wanted.name}: elements of another size need a dense last axis, got shape "
            f"{view.shape}, strides {view.strides}",
        )
    outer = [stride * old for stride in view.strides[:-1]]
    row = view.shape[-1] * old
    if any(count % new for count in (row, view.offset, *outer)):
        raise _misfit(
            view,
            f"as {wanted.name}: rows of {row} bytes from byte {view.offset} do not divide into "
            f"aligned elements of {new} bytes",
        )
    return replace(
        view,
        shape=(*view.shape[:-1], row // new),
        strides=(*(step // new for step in outer), 1),
        dtype=wanted.name,
        itemsize=new,
    )


def as_strided(
    view: View, shape: Sequence[Any], strides: Sequence[Any] | None = None, offset: Any = 0
) -> View:
    """Any shape and strides, ``offset`` elements after the view's first; bounds are not checked.

    Raises:
        ConfigurationError: Values that are no ints, not a stride for each size, or further than
            any memory reaches.
    """
    name = f"view of {view.buffer.name}"
    sizes = check_sizes(shape, f"{name}.shape")
    steps = contiguous_strides(sizes) if strides is None else check_sizes(strides, name, least=None)
    if len(sizes) != len(steps):
        raise _misfit(view, f"expected a stride for each of {len(sizes)} axes, got {steps}")
    first = check_size(offset, f"{name}.offset", least=None)
    offset = view.offset + first * view.itemsize
    return check_reach(replace(view, offset=offset, shape=sizes, strides=steps), name)


_REACH = 1 << 62


def check_reach(view: View, name: str) -> View:
    """The view; ConfigurationError where no 64-bit address reaches what it would touch."""
    steps = [abs(stride) * view.itemsize for stride in view.strides]
    farthest = max(map(abs, (*view.extent, view.offset, view.size, *steps)))
    if farthest > _REACH:
        raise ConfigurationError(
            f"{name}: expected bytes and elements within 2**62, got shape {view.shape}, strides "
            f"{view.strides} from byte {view.offset} on"
        )
    return view


def as_view(operand: Any, name: str) -> View:
    """The view that a buffer or view stands for.

    Raises:
        ConfigurationError: Neither of them; a tensor is told where it belongs.
    """
    if isinstance(operand, PlanBuffer):
        return operand.whole
    if isinstance(operand, View):
        return operand
    from graphcore.resources.tensors import is_tensor

    hint = ""
    if is_tensor(operand):
        hint = ": declare it with plan.buffer(...) and give the tensor when the plan is run"
    raise ConfigurationError(
        f"{name}: expected a buffer of the plan or a view of one, got {type(operand).__name__}"
        f"{hint}"
    )


def _flat(values: Sequence[Any]) -> tuple[Any, ...]:
    """Both ``f((2, 3))`` and ``f(2, 3)`` are (2, 3)."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        return tuple(values[0])
    return tuple(values)


def _shown(index: Any) -> str:
    return f"{index!r:.60}"


def _misfit(view: View, why: str) -> ConfigurationError:
    return ConfigurationError(f"view of {view.buffer.name}: {why}")
