"""Strided views for copy tests: hypothesis strategies, and the same view in NumPy and on a driver.

A view is a shape, strides in elements and the place of its first element in a buffer; around what
it covers lie guard bytes, which belong to the buffer and must not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy
from hypothesis import strategies as st

from graphcore.driver import Driver
from graphcore.resources.tensors import TensorRef, contiguous_strides

GUARD = 64
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}
# what arithmetic or a float register could change: quiet and signalling NaNs with payloads, -0.0,
# a denormal, an infinity
SPECIAL_FLOATS = (0x7FC01234, 0x7F800001, 0xFFA5A5A5, 0x80000000, 0x00000001, 0xFF800000)


@dataclass(frozen=True)
class View:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int = 4
    # bytes that the buffer's first element lies off a 256-byte boundary
    shift: int = 0

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.shape, self.strides, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def start(self) -> int:
        """Byte of the first element in its buffer."""
        reach = sum(min(0, (n - 1) * s) for n, s in self.sides) if self.size else 0
        return GUARD + self.shift - reach * self.itemsize

    @property
    def buffer_size(self) -> int:
        reach = sum(max(0, (n - 1) * s) for n, s in self.sides) + 1 if self.size else 0
        return self.start + reach * self.itemsize + GUARD

    def array(self, buffer: numpy.ndarray) -> numpy.ndarray:
        """The view of a uint8 buffer, as elements without meaning."""
        strides = [stride * self.itemsize for stride in self.strides]
        kind = f"V{self.itemsize}"
        return numpy.ndarray(self.shape, kind, buffer=buffer, offset=self.start, strides=strides)

    def at(self, address: int, driver: Driver) -> TensorRef:
        """The view of device memory at ``address``."""
        return TensorRef(
            address + self.start,
            self.shape,
            self.strides,
            DTYPES[self.itemsize],
            self.itemsize,
            "cpu" if driver.is_emulated else "cuda",
            0 if driver.is_emulated else driver.device,
            owner=_Home(driver),
        )


@dataclass(frozen=True)
class _Home:
    driver: Driver


@dataclass(frozen=True)
class Pair:
    dst: View
    src: View

    def expected(self, dst: numpy.ndarray, src: numpy.ndarray) -> numpy.ndarray:
        """The whole destination buffer after the copy, as NumPy makes it."""
        result = dst.copy()
        self.dst.array(result)[...] = self.src.array(src).reshape(self.dst.shape)
        return result


def dense(*shape: int, **options: int) -> View:
    """A contiguous view."""
    return View(shape, contiguous_strides(shape), **options)


def like(array: Callable[[numpy.ndarray], numpy.ndarray], *shape: int, **options: int) -> View:
    """The view that ``array`` makes of a dense int8 array: slices, transposes, broadcasts.

    Only its shape and strides count; the caller sees to it that the start does not matter.
    """
    made = array(numpy.empty(shape, numpy.int8))
    return View(made.shape, made.strides, **options)


def random_bytes(size: int, seed: int = 0) -> numpy.ndarray:
    """Random bytes, every third float of which is special."""
    raw = numpy.random.default_rng(seed).integers(0, 256, size + 16, numpy.uint8)
    words = raw[: (size + 12) // 4 * 4].view(numpy.uint32)
    words[::3] = numpy.resize(numpy.array(SPECIAL_FLOATS, numpy.uint32), words[::3].shape)
    return raw[:size]


@contextmanager
def device_buffers(driver: Driver, *contents: numpy.ndarray) -> Iterator[list[int]]:
    """Device memory with these contents; yields the addresses, 256-byte aligned."""
    addresses = []
    try:
        for content in contents:
            addresses.append(driver.alloc(max(1, content.size)))
            driver.write(addresses[-1], content.tobytes())
        yield addresses
    finally:
        for address in addresses:
            driver.free(address)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int, *, is_source: bool) -> View:
    """A view of this shape; a destination's elements each have a place of their own."""
    strides = [0] * len(shape)
    reach = 1
    for axis in draw(st.permutations(range(len(shape)))):
        if is_source and draw(st.integers(0, 9)) == 0:
            continue
        strides[axis] = reach * draw(st.sampled_from([1, 1, 1, 2, 3]))
        reach = strides[axis] * max(1, shape[axis]) + draw(st.sampled_from([0, 0, 0, 1, 4]))
        if draw(st.integers(0, 5)) == 0:
            strides[axis] *= -1
    if draw(st.booleans()):
        strides = list(contiguous_strides(shape))
    shifts = st.sampled_from([0, 0, itemsize, 2 * itemsize, 3 * itemsize])
    shift = draw(st.one_of(shifts, st.integers(0, 17)))
    return View(shape, tuple(strides), itemsize, shift)


@st.composite
def shapes_of(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Another shape of ``count`` elements."""
    sizes = [1] * draw(st.integers(1, 5))
    factors = _prime_factors(count)
    for factor in draw(st.permutations(factors)) if factors else ():
        sizes[draw(st.integers(0, len(sizes) - 1))] *= factor
    return tuple(sizes)


@st.composite
def pairs(draw: st.DrawFn, most: int = 5) -> Pair:
    """A copy: same shape or reshaping, any element width."""
    itemsize = draw(st.sampled_from(list(DTYPES)))
    sizes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), max_size=most)
    shape = tuple(draw(sizes))
    dst_shape = shape if draw(st.booleans()) else draw(shapes_of(math.prod(shape)))
    return Pair(
        draw(views(dst_shape, itemsize, is_source=False)),
        draw(views(shape, itemsize, is_source=True)),
    )


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def pair(dst: View, src: View, **options: int) -> Pair:
    """A copy between two views with these options set on both."""
    return Pair(replace(dst, **options), replace(src, **options))


# one of each class and kind that spec and code tell apart; sizes are odd on purpose
CASES: dict[str, Pair] = {
    "one element": pair(dense(), dense()),
    "contiguous, odd": pair(dense(12345), dense(12345)),
    "contiguous, both one element off": pair(dense(10007), dense(10007), shift=4),
    "contiguous, source one element off": Pair(dense(10007), dense(10007, shift=4)),
    "contiguous, off by a byte": Pair(dense(5001, shift=1), dense(5001, shift=3)),
    "contiguous bytes, one off": pair(dense(10007), dense(10007), itemsize=1, shift=1),
    "contiguous halves, one off": Pair(dense(999, itemsize=2), dense(999, itemsize=2, shift=2)),
    "contiguous, shorter than a word": pair(dense(3), dense(3)),
    "both reversed": pair(like(lambda a: a[::-1], 1000), like(lambda a: a[::-1], 1000)),
    "pitched rows": Pair(like(lambda a: a[:, :96], 61, 128), dense(61, 96)),
    "odd rows": pair(like(lambda a: a[:, :1021], 17, 1029), like(lambda a: a[:, :1021], 17, 1033)),
    "odd rows that make one run": Pair(dense(131, 521), like(lambda a: a[:, :521], 131, 529)),
    "rows, misaligned": Pair(like(lambda a: a[:, :64], 33, 72, shift=4), dense(33, 64)),
    "rows, misaligned by a byte": Pair(like(lambda a: a[:, :64], 9, 72, shift=3), dense(9, 64)),
    "rows of halves": Pair(
        like(lambda a: a[:, :90], 31, 98, itemsize=2), dense(31, 90, itemsize=2)
    ),
    "rows of doubles": Pair(
        like(lambda a: a[:, :33], 31, 35, itemsize=8), dense(31, 33, itemsize=8)
    ),
    "short rows": Pair(like(lambda a: a[:, :3], 401, 8), dense(401, 3)),
    "short rows, one word": Pair(like(lambda a: a[:, :4], 401, 8), dense(401, 4)),
    "transpose": Pair(dense(67, 45), like(lambda a: a.T, 45, 67)),
    "transpose, batched": Pair(dense(5, 33, 29), like(lambda a: a.transpose(0, 2, 1), 5, 29, 33)),
    "transpose of bytes": Pair(dense(65, 43, itemsize=1), like(lambda a: a.T, 43, 65, itemsize=1)),
    "transpose of complex": Pair(
        dense(65, 43, itemsize=16), like(lambda a: a.T, 43, 65, itemsize=16)
    ),
    "BSHD to BHSD": Pair(dense(2, 5, 7, 64), like(lambda a: a.transpose(0, 2, 1, 3), 2, 7, 5, 64)),
    "BHSD to BHDS": Pair(dense(2, 5, 64, 7), like(lambda a: a.transpose(0, 1, 3, 2), 2, 5, 7, 64)),
    "5-D reverse": Pair(dense(4, 5, 6, 7, 3), like(lambda a: a.T, 3, 7, 6, 5, 4)),
    "8-D reverse": Pair(dense(*[2] * 8), like(lambda a: a.T, *[2] * 8)),
    "every second column": Pair(dense(37, 50), like(lambda a: a[:, ::2], 37, 100)),
    "into every second column": Pair(like(lambda a: a[:, ::2], 37, 100), dense(37, 50)),
    "reversed columns": Pair(dense(37, 50), like(lambda a: a[:, ::-1], 37, 50)),
    "into reversed rows": Pair(like(lambda a: a[::-1], 37, 50), dense(37, 50)),
    "broadcast row": Pair(dense(41, 96), View((41, 96), (0, 1))),
    "broadcast column": Pair(dense(41, 96), View((41, 96), (1, 0))),
    "broadcast element": Pair(dense(41, 96), View((41, 96), (0, 0))),
    "reshape, dense": Pair(dense(15, 28), dense(20, 21)),
    "reshape of a transpose": Pair(dense(420), like(lambda a: a.T, 20, 21)),
    "reshape without common axes": Pair(
        like(lambda a: a[:, :28], 15, 30), like(lambda a: a[:, :20], 21, 24)
    ),
    "reshape without common axes, by odd rows": Pair(
        like(lambda a: a[:, :9], 10, 11), like(lambda a: a[:, ::-2], 15, 12)
    ),
    "ten dimensions that merge": Pair(dense(*[2] * 10), dense(*[2] * 10)),
}
