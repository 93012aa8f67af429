"""The cases of suite copy: which tensors, how many bytes a copy of them has to move, the target.

Where a case is about gaps, a tensor is a view of storage that holds more. On the emulated driver
the same cases are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphcore.bench.targets import Target

WORD = 4
"""Bytes of an element: everything is float32, of random bits."""

_SECTOR = 32  # what device memory moves at least
_APPENDED = 256  # places of a cache that one graph writes


@dataclass(frozen=True)
class CopyCase:
    """A copy between two views.

    Args:
        name: Stable.
        src: Shape of the source's storage.
        dst: Shape of the destination's.
        target: On an H200, at the sizes that are not small.
        source: The view that is read.
        destinations: The views that the calls write in turn.
        is_fill: Whether the floor is a fill, since nearly nothing is read.
    """

    name: str
    src: tuple[int, ...]
    dst: tuple[int, ...]
    target: Target
    source: Callable[[torch.Tensor], torch.Tensor] = lambda storage: storage
    destinations: Callable[[torch.Tensor], list[torch.Tensor]] = lambda storage: [storage]
    is_fill: bool = False


def cases(*, small: bool = False) -> list[CopyCase]:
    """All cases in the order of the table."""
    return [*_rows(small), *_permuted(small), *_gathered(small), *_appended(small)]


def bytes_touched(view: torch.Tensor) -> int:
    """What memory moves for one pass over ``view``, each word once.

    Where words lie apart in runs shorter than a sector, the sectors that they touch count; an axis
    of stride 0 costs nothing.
    """
    axes = sorted(
        (stride, size)
        for stride, size in zip(view.stride(), view.shape, strict=True)
        if size > 1 and stride
    )
    run = 1
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    runs = math.prod(size for _, size in axes)
    each = run * WORD
    if axes and each < _SECTOR:
        each = min(_SECTOR, axes[0][0] * WORD)
    return runs * each


def _rows(small: bool) -> list[CopyCase]:
    count = 1 << (10 if small else 28)
    pitched = (64, 48, 56) if small else (32768, 4096, 4608)
    odd = (64, 21, 29) if small else (131072, 1021, 1029)
    return [
        CopyCase("contiguous", (count,), (count,), _target(0.99)),
        _pitched("pitched", *pitched, _target(0.97)),
        _pitched("odd-rows", *odd, _target(0.90)),
    ]


def _pitched(name: str, rows: int, columns: int, pitch: int, target: Target) -> CopyCase:
    """Rows of a wider matrix, packed."""
    return CopyCase(name, (rows, pitch), (rows, columns), target, lambda each: each[:, :columns])


def _permuted(small: bool) -> list[CopyCase]:
    side = 48 if small else 16384
    batch, heads, tokens, depth = (2, 3, 16, 8) if small else (8, 32, 4096, 128)
    bhsd, bhds = (batch, heads, tokens, depth), (batch, heads, depth, tokens)
    five = (4, 3, 4, 2, 5) if small else (64, 64, 64, 32, 16)
    return [
        _permutation("transpose", (side, side), (1, 0), 0.88),
        _permutation("bshd-bhsd", (batch, tokens, heads, depth), (0, 2, 1, 3), 0.97),
        CopyCase("bhsd-bhds", bhsd, bhds, _target(0.85), lambda each: each.transpose(2, 3)),
        _permutation("reverse-5d", five, (4, 3, 2, 1, 0), 0.75),
    ]


def _permutation(
    name: str, src: tuple[int, ...], axes: tuple[int, ...], of_floor: float
) -> CopyCase:
    dst = tuple(src[axis] for axis in axes)
    return CopyCase(name, src, dst, _target(of_floor), lambda each: each.permute(axes))


def _gathered(small: bool) -> list[CopyCase]:
    side = 64 if small else 16384
    rows, columns = (32, 24) if small else (65536, 4096)
    return [
        CopyCase(
            "every-second",
            (side, side),
            (side, side // 2),
            _target(0.90),
            lambda each: each[:, ::2],
        ),
        CopyCase(
            "broadcast",
            (columns,),
            (rows, columns),
            _target(1.0),
            lambda each: each.expand(rows, columns),
            is_fill=True,
        ),
    ]


def _appended(small: bool) -> list[CopyCase]:
    """One token's keys for each of b sequences, behind what a cache [b, heads, tokens, d] holds."""
    heads, tokens, depth = (2, 16, 8) if small else (8, 4096, 128)
    step = max(1, tokens // _APPENDED)
    return [
        CopyCase(
            f"kv-append b={batch}",
            (batch, heads, depth),
            (batch, heads, tokens, depth),
            Target(vs_best_peer=1.0, most=2.5),
            destinations=lambda each: [each[:, :, at] for at in range(0, tokens, step)],
        )
        for batch in (1, 8, 64)
    ]


def _target(of_floor: float) -> Target:
    return Target(of_floor=of_floor, vs_best_peer=1.0)
