"""Which bytes two views of one buffer share, exactly as far as that is affordable.

Whether they share any is decided by :mod:`graphcore.resources.overlap`: exact, except that a pair
of views which takes more than its bounded number of steps counts as overlapping. Which bytes is
exact for dense views and for views of at most ``_MOST_ELEMENTS`` elements; beyond that it is the
range in which both lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphcore.plan.records import View
from graphcore.resources.overlap import overlap

if TYPE_CHECKING:
    import numpy

_MOST_ELEMENTS = 1 << 20
_MOST_BYTES = 1 << 24


def share_bytes(first: View, second: View) -> bool:
    """Whether two views of one buffer have a byte in common."""
    low, high = _window(first, second)
    if low >= high:
        return False
    if is_dense(first) and is_dense(second):
        return True
    distance = second.offset - first.offset
    return overlap(_sides(first), _sides(second), distance, first.itemsize, second.itemsize)


def shared_range(first: View, second: View) -> tuple[int, int]:
    """(first byte, past the last byte) of what two overlapping views share."""
    low, high = _window(first, second)
    if is_dense(first) and is_dense(second):
        return low, high
    if max(first.size, second.size) > _MOST_ELEMENTS or high - low > _MOST_BYTES:
        return low, high
    both = (_mask(first, low, high) & _mask(second, low, high)).nonzero()[0]
    if not len(both):  # too hard to decide, and counted as overlapping
        return low, high
    return low + int(both[0]), low + int(both[-1]) + 1


def covered_range(view: View) -> tuple[int, int]:
    """(first byte, past the last byte) that the view touches without a gap; empty for others."""
    return view.extent if is_dense(view) else (0, 0)


def is_dense(view: View) -> bool:
    """Whether the view touches every byte of its extent exactly once."""
    reach = 1
    for stride, size in sorted((abs(s), n) for n, s in _axes(view)):
        if stride != reach:
            return False
        reach *= size
    return True


def overlaps_itself(view: View) -> bool:
    """Whether two elements of the view share memory."""
    from graphcore.resources import overlap as module

    return module.overlaps_itself(_sides(view)) if view.size else False


def _axes(view: View) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(view.shape, view.strides, strict=True) if n != 1]


def _sides(view: View) -> tuple[tuple[int, int], ...]:
    return tuple((size, stride * view.itemsize) for size, stride in _axes(view))


def _window(first: View, second: View) -> tuple[int, int]:
    """The range in which both lie; empty (low >= high) where there is none."""
    if not first.size or not second.size:
        return 0, 0
    ranges = first.extent, second.extent
    return max(low for low, _ in ranges), min(high for _, high in ranges)


def _mask(view: View, low: int, high: int) -> numpy.ndarray[Any, Any]:
    """Which bytes of [low, high) the view touches."""
    import numpy

    places = numpy.array([view.offset - low])
    for size, stride in _axes(view):
        steps = numpy.arange(size) * (stride * view.itemsize)
        places = (places[:, None] + steps).reshape(-1)
    mask = numpy.zeros(high - low, bool)
    for byte in range(view.itemsize):
        inside = places + byte
        mask[inside[(inside >= 0) & (inside < high - low)]] = True
    return mask
