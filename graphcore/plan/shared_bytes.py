"""Which bytes two views of one buffer share, exactly as far as that is affordable.

Whether they share any is decided by :mod:`graphcore.resources.overlap`: exact, except that a pair
of views which takes more than its bounded number of steps counts as overlapping. Which bytes is
exact for dense views and for views of at most ``_MOST_ELEMENTS`` elements; beyond that it is the
range in which both lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphcore.plan.records import View
from graphcore.resources.overlap import overlap

if TYPE_CHECKING:
    import numpy

_MOST_ELEMENTS = 1 << 20
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a view, worked out once where it is held against many.

    Args:
        low: The first byte.
        high: Past the last byte; equal to ``low`` where there is none.
        is_dense: Whether it has every byte between.
        offset: Of the first element.
        itemsize: Bytes of an element.
        sides: (size, stride in bytes) of each axis with more than one element.
        period: The greatest number that divides all strides; 0 where there are none.
    """

    low: int
    high: int
    is_dense: bool
    offset: int
    itemsize: int
    sides: tuple[tuple[int, int], ...]
    period: int

    @staticmethod
    def of(view: View) -> Region:
        """The bytes of ``view``."""
        sides = _sides(view)
        period = math.gcd(*(stride for _, stride in sides))
        return Region(*view.extent, is_dense(view), view.offset, view.itemsize, sides, period)

    def meets(self, other: Region) -> bool:
        """Whether the two have a byte in common."""
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.low == self.high or other.low == other.high:
            return False
        if self.is_dense and other.is_dense:
            return True
        distance = other.offset - self.offset
        period = math.gcd(self.period, other.period)
        if period and self.itemsize <= distance % period <= period - other.itemsize:
            return False  # as columns of a matrix: the elements of one lie between the other's
        return overlap(self.sides, other.sides, distance, self.itemsize, other.itemsize)


def share_bytes(first: View, second: View) -> bool:
    """Whether two views of one buffer have a byte in common."""
    return Region.of(first).meets(Region.of(second))


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
