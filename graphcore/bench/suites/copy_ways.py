"""How a case of suite copy is done: by our kernel, by others, and the floor beneath them all.

A way is a function of a pair that gives what one call puts on a stream; it plans, and makes what it
needs, before. None: the way cannot do such a copy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from graphcore_kernels import strided_copy

from graphcore.bench.replays import Call
from graphcore.bench.suites.copy_cases import WORD
from graphcore.bench.suites.copy_operands import CopyOperands, Pair, random_bits
from graphcore.driver import Driver
from graphcore.driver.records import CopyOperand, MemcpyParams, MemsetParams

Way = Callable[[Driver, torch.Tensor, torch.Tensor], Call | None]
"""(driver, destination, source) -> the call."""

OURS = "ours"
TORCH, CUPY, MEMCPY_2D, MEMCPY_3D = "torch copy_", "CuPy", "cudaMemcpy2D", "cudaMemcpy3D"

_LEAST_WIDTH = 32  # bytes of a row, below which a pitched copy is not what one would call
_LARGE = 1 << 26


def ours(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call:
    """A planned ``strided_copy``."""
    return strided_copy.plan(dst, src).launch


def torch_copy(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call:
    """``dst.copy_(src)``."""
    return lambda stream: dst.copy_(src)


def cupy_copy(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call:
    """``cupy.copyto`` of arrays that share the tensors' memory."""
    cupy = importlib.import_module("cupy")
    to, source = cupy.from_dlpack(dst), cupy.from_dlpack(src)
    return lambda stream: cupy.copyto(to, source)


def memcpy_2d(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call | None:
    """The driver's pitched copy, where the views are rows at one pitch each."""
    return _pitched(driver, dst, src, axes=2)


def memcpy_3d(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call | None:
    """The driver's copy of slices of rows, where the views are such."""
    return _pitched(driver, dst, src, axes=3)


PEERS: Mapping[str, Way] = {
    TORCH: torch_copy,
    CUPY: cupy_copy,
    MEMCPY_2D: memcpy_2d,
    MEMCPY_3D: memcpy_3d,
}
EMULATED_PEERS: Mapping[str, Way] = {name: PEERS[name] for name in (TORCH, MEMCPY_2D, MEMCPY_3D)}


def calls_of(way: Way, driver: Driver, pairs: Sequence[Pair]) -> list[Call] | None:
    """The calls of all ``pairs``; None where the way cannot do them."""
    made = {id(pair): way(driver, *pair) for pair in pairs}
    calls = [call for pair in pairs if (call := made[id(pair)]) is not None]
    return calls if len(calls) == len(pairs) else None


@dataclass(frozen=True)
class Floor:
    """A way of moving as many bytes as a case does, from one run of memory to another.

    Args:
        name: Of the arm.
        calls: As many as the case has.
        is_captured: Whether they are timed in a graph; else they are called on the stream.
    """

    name: str
    calls: Sequence[Call]
    is_captured: bool = True


def floors(driver: Driver, operands: CopyOperands, device: str) -> list[Floor]:
    """Copies of as many bytes, or fills where nearly nothing is read; the fastest is the floor.

    The driver takes another way for a memcpy node than for the same call on a stream, and another
    one for other sizes, so that none of them is the floor of all cases.
    """
    count = len(operands.pairs)
    if operands.case.is_fill:
        dst = operands.pairs[0][0]
        fill = MemsetParams(dst.data_ptr(), 0x3F9D70A4, WORD, dst.numel())
        fills: list[Call] = [lambda stream: driver.fill(fill, stream.handle)] * count
        return [Floor("memset node", fills), Floor("memset on a stream", fills, is_captured=False)]
    words = operands.bytes_moved // (2 * WORD)
    places = 1 if words * WORD > _LARGE else count
    src, dst = (random_bits((places, words), device) for _ in range(2))
    pairs = [(dst[at % places], src[at % places]) for at in range(count)]
    copies = _calls(_device_copy, driver, pairs)
    return [
        Floor("memcpy node", copies),
        Floor("memcpy on a stream", copies, is_captured=False),
        Floor("torch add", _calls(_torch_add, driver, pairs)),
        Floor("strided_copy of one run", _calls(ours, driver, pairs)),
    ]


def _calls(
    way: Callable[[Driver, torch.Tensor, torch.Tensor], Call],
    driver: Driver,
    pairs: Sequence[Pair],
) -> list[Call]:
    return [way(driver, *pair) for pair in pairs]


def _device_copy(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call:
    params = MemcpyParams(
        CopyOperand(dst.data_ptr()), CopyOperand(src.data_ptr()), dst.numel() * WORD
    )
    return lambda stream: driver.copy(params, stream.handle)


def _torch_add(driver: Driver, dst: torch.Tensor, src: torch.Tensor) -> Call:
    """Elementwise, of integers: the same words come out, by a kernel and not by a memcpy."""
    to, source = dst.view(torch.int32), src.view(torch.int32)
    return lambda stream: torch.add(source, 0, out=to)


def _pitched(driver: Driver, dst: torch.Tensor, src: torch.Tensor, axes: int) -> Call | None:
    params = pitched_params(dst, src)
    if params is None or (3 if params.depth > 1 else 2) != axes or params.is_1d:
        return None
    return lambda stream: driver.copy(params, stream.handle)


def pitched_params(dst: torch.Tensor, src: torch.Tensor) -> MemcpyParams | None:
    """The copy as width, rows and slices; None where it is not of that form."""
    axes = _merged(dst, src)
    width = axes[-1][0]
    if len(axes) > 3 or axes[-1][1:] != (1, 1) or width * WORD < _LEAST_WIDTH:
        return None
    height, depth = (axes[-at][0] if len(axes) >= at else 1 for at in (2, 3))
    operands = []
    for side, tensor in enumerate((dst, src), start=1):
        pitch = axes[-2][side] if height > 1 else width
        slices = axes[-3][side] if depth > 1 else 0
        if pitch < width or slices % pitch or 0 < slices < height * pitch:
            return None
        operands.append(CopyOperand(tensor.data_ptr(), pitch=pitch * WORD, rows=slices // pitch))
    to, source = operands
    return MemcpyParams(to, source, width * WORD, height, depth)


def _merged(dst: torch.Tensor, src: torch.Tensor) -> list[tuple[int, int, int]]:
    """(size, stride in dst, stride in src) of the axes that are left when neighbours are merged."""
    axes = [axis for axis in zip(dst.shape, dst.stride(), src.stride(), strict=True) if axis[0] > 1]
    merged = axes[:1]
    for (_, *outer), (size, *inner) in pairwise(axes):
        if all(far == size * near for far, near in zip(outer, inner, strict=True)):
            merged[-1] = (merged[-1][0] * size, inner[0], inner[1])
        else:
            merged.append((size, inner[0], inner[1]))
    return merged or [(1, 1, 1)]
