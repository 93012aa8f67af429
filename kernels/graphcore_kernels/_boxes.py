"""How a copy is divided into boxes that pass through shared memory: pure arithmetic.

A box is so many neighbours along each axis, so chosen that its runs are long in both memories. It
is read in the order of src and written in that of dst. Boxes of an axis that they do not divide
evenly overlap instead of being cut off: what is written twice is written alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from graphcore_kernels._axes import Axes, Axis, PairedAxes, PairedAxis, merge, order

BOX_BYTES = 16384
"""Shared memory of a block."""

_SECTOR = 32  # bytes: the least that memory moves at a time
_FEWEST_BOXES = 256  # of a small copy, so that all multiprocessors have some
_LEAST_BOX = 4096  # bytes
_TOGETHER = 2  # 2**2 boxes along each of two axes are neighbours in time
_WASTE = 1.06  # what overlapping boxes may copy twice, where there is a choice
_BANKS = 128  # bytes of shared memory that are moved at once
_MOST_BOXES = 2**31


@dataclass(frozen=True, slots=True)
class BoxStep:
    """An axis that boxes divide; box c of it begins at ``min(c * extent, last)``.

    Args:
        dst, src: Bytes between neighbours.
        count: Boxes along it.
        extent: Neighbours in a box.
        last: Where the last box begins.
        bits: 2**bits boxes along it are neighbours in time.
    """

    dst: int = 0
    src: int = 0
    count: int = 1
    extent: int = 1
    last: int = 0
    bits: int = 0

    @property
    def groups(self) -> int:
        return -(-self.count >> self.bits)


@dataclass(frozen=True, slots=True)
class Boxes:
    """One copy, divided. Axes run from the slowest to the fastest, strides are bytes.

    Args:
        load: Of units of ``load_bytes`` in a box: where in src.
        store: Of units of ``store_bytes``: where in dst, and (as ``src``) where in shared memory.
        batch: The axes along which a box has no neighbours.
        steps: The two axes that boxes divide; the faster one in dst first.
        load_bytes, store_bytes: What a thread moves at once.
        gather: Bytes in shared memory between words that lie side by side in dst.
        swizzle: (from, mask, to): byte ``at`` lies at ``at ^ ((at >> from & mask) << to)``.
    """

    load: Axes
    store: PairedAxes
    batch: PairedAxes
    steps: tuple[BoxStep, BoxStep]
    load_bytes: int
    store_bytes: int
    gather: int
    swizzle: tuple[int, int, int]

    @property
    def count(self) -> int:
        """Box numbers; those beyond the last of an axis are passed over."""
        along = prod(step.groups << step.bits for step in self.steps)
        return along * prod(axis.size for axis in self.batch)


def pays(axes: PairedAxes, word: int) -> bool:
    """Whether boxes move longer runs than words in the order of dst do.

    Args:
        axes: From the slowest in dst to the fastest, strides in words.
        word: Bytes.
    """
    rest = axes
    if rest[-1].dst == rest[-1].src == 1:
        if rest[-1].size * word >= _SECTOR:
            return False
        rest = rest[:-1]
    read = [axis for axis in rest if axis.src]
    if not read or not rest[-1].src:
        return False
    fastest = min(read, key=lambda axis: abs(axis.src))
    return fastest is not rest[-1] and abs(fastest.src) * word < _SECTOR


def divide(axes: PairedAxes, word: int, dst_address: int, src_address: int) -> Boxes | None:
    """The boxes of a copy; None where there are too many to count.

    Args:
        axes: From the slowest in dst to the fastest, strides in words.
        word: Bytes of one.
        dst_address: Of the first word, modulo 16.
        src_address: Of the first word, modulo 16.
    """
    extents = _extents(axes, word)
    steps = _steps(axes, extents, word)
    within = [
        PairedAxis(extent, axis.dst * word, axis.src * word)
        for axis, extent in zip(axes, extents, strict=True)
        if extent > 1
    ]
    batch = tuple(
        PairedAxis(axis.size, axis.dst * word, axis.src * word)
        for axis, extent in zip(axes, extents, strict=True)
        if extent == 1
    )
    load = sorted(within, key=_slowness_in_src)
    places, place = [], word
    for axis in reversed(load):
        places.append(PairedAxis(axis.size, axis.dst, place))
        place *= axis.size
    store = order(tuple(places))
    read = merge(Axis(axis.size, axis.src) for axis in load)
    written = tuple(Axis(axis.size, axis.dst) for axis in store)
    jumps_dst = [axis.dst for axis in batch] + [
        s.dst * n for s in steps for n in (s.extent, s.last)
    ]
    jumps_src = [axis.src for axis in batch] + [
        s.src * n for s in steps for n in (s.extent, s.last)
    ]
    load_bytes = _widest(read, word, (src_address, *jumps_src))
    store_bytes = _widest(written, word, (dst_address, *jumps_dst))
    fastest, words = store[-1], store_bytes // word
    if words > 1:
        unit = PairedAxis(fastest.size // words, store_bytes, fastest.src * words)
        store = (*store[:-1], unit)
    if load_bytes > word:
        read = (*read[:-1], Axis(read[-1].size * word // load_bytes, load_bytes))
    swizzle = _swizzle(load_bytes, fastest.src * words)
    made = Boxes(read, store, batch, steps, load_bytes, store_bytes, fastest.src, swizzle)
    return made if made.count < _MOST_BOXES else None


def _slowness_in_src(axis: PairedAxis) -> tuple[bool, int]:
    """Sorts axes as they are read; along one of stride 0 the same words are read once more."""
    return axis.src != 0, -abs(axis.src)


def _extents(axes: PairedAxes, word: int) -> list[int]:
    """Neighbours in a box along each axis; at most two axes are divided."""
    total = prod(axis.size for axis in axes) * word
    room = _LEAST_BOX
    while room < BOX_BYTES and room * _FEWEST_BOXES < total:
        room *= 2
    room //= word
    by_dst = sorted(range(len(axes)), key=lambda k: axes[k].dst)
    by_src = sorted((k for k in by_dst if axes[k].src), key=lambda k: abs(axes[k].src))
    extents = [1] * len(axes)
    for dst_run, src_run in _runs(room):
        extents = [1] * len(axes)
        _grow(axes, by_dst, dst_run, extents, word)
        _grow(axes, by_src, src_run, extents, word)
        if prod(extents) <= room:
            break
    _fill(axes, by_dst, extents, room, word)
    return extents


def _runs(room: int) -> Iterator[tuple[int, int]]:
    """Words that a run is to have in dst and in src, less and less of them."""
    bits = room.bit_length() - 1
    for left in range(bits, -1, -1):
        yield 1 << (left + 1) // 2, 1 << left // 2


def _grow(
    axes: PairedAxes, by_speed: Sequence[int], run: int, extents: list[int], word: int
) -> None:
    """Makes runs of ``run`` words along the axes, the fastest first."""
    made = 1
    for k in by_speed:
        if made >= run:
            break
        size = axes[k].size
        if extents[k] < size:
            need = max(extents[k], -(-run // made))
            extents[k] = _least(size, need, _multiple(size, word) if made == 1 else 1)
        made *= extents[k]
        if extents[k] < size:
            break


def _fill(
    axes: PairedAxes, by_dst: Sequence[int], extents: list[int], room: int, word: int
) -> None:
    """Makes a box that leaves room larger: along axes that it divides, then along others."""
    for k in sorted(by_dst, key=lambda k: not 1 < extents[k] < axes[k].size):
        size, spare = axes[k].size, room // prod(extents)
        if spare < 2 or extents[k] == size:
            continue
        most = min(size, extents[k] * spare)
        divided = sum(1 < e < axis.size for e, axis in zip(extents, axes, strict=True))
        if most < size and extents[k] == 1 and divided == 2:
            continue
        extents[k] = _most(size, most, _multiple(size, word))


def _multiple(size: int, word: int) -> int:
    """What extents are multiples of, so that as many words move at once as may."""
    words = max(1, 16 // word)
    while size % words:
        words //= 2
    return words


def _least(size: int, need: int, multiple: int) -> int:
    """An extent of ``need`` or somewhat more, that divides ``size`` well."""
    need = min(size, need + -need % multiple)
    return _choose(size, range(need, min(size, 2 * need) + 1, multiple))


def _most(size: int, most: int, multiple: int) -> int:
    """An extent of ``most`` or somewhat less."""
    if most < size:
        most -= most % multiple if most >= multiple else 0
    return _choose(size, range(most, (most + 1) // 2, -multiple) if most > 1 else (most,))


def _choose(size: int, extents: Sequence[int]) -> int:
    def waste(extent: int) -> float:
        return -(-size // extent) * extent / size

    return next((e for e in extents if waste(e) <= _WASTE), None) or min(extents, key=waste)


def _steps(axes: PairedAxes, extents: Sequence[int], word: int) -> tuple[BoxStep, BoxStep]:
    steps = []
    for axis, extent in zip(reversed(axes), reversed(extents), strict=True):
        if 1 < extent < axis.size:
            count = -(-axis.size // extent)
            bits = min(_TOGETHER, count.bit_length() - 1)
            last = axis.size - extent
            steps.append(BoxStep(axis.dst * word, axis.src * word, count, extent, last, bits))
    first, second = (*steps, BoxStep(), BoxStep())[:2]
    return first, second


def _widest(axes: Axes, word: int, offsets: Sequence[int]) -> int:
    """The most bytes, up to 16, that lie side by side and aligned wherever they move at once."""
    fastest = axes[-1] if axes else Axis(1, word)
    for width in (16, 8, 4):
        if (
            width > word
            and fastest.stride == word
            and not fastest.size * word % width
            and not any(axis.stride % width for axis in axes[:-1])
            and not any(offset % width for offset in offsets)
        ):
            return width
    return word


def _swizzle(load_bytes: int, apart: int) -> tuple[int, int, int]:
    """Spreads over the banks what neighbouring threads read, ``apart`` bytes from each other."""
    to = max(4, load_bytes).bit_length() - 1
    mask = (_BANKS >> to) - 1
    first = min(max(apart.bit_length() - 1, 7), (BOX_BYTES // (mask + 1)).bit_length() - 1)
    return first, mask, to
