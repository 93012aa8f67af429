"""Writing an array into the leading corner of a larger one, and a fill value into the rest.

Through copies and fills of a driver alone, so that it works for every library's memory, every
element type, and on any stream, without waiting for anything. Shapes count elements, C order; the
memory written must be contiguous, and so must the source.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from graphcore.driver.records import (
    CopyOperand,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    StreamHandle,
)
from graphcore.errors import ConfigurationError
from graphcore.resources.contents import as_contents
from graphcore.resources.dtypes import DTYPES

if TYPE_CHECKING:
    from graphcore.driver.api import Driver
    from graphcore.resources.tensors import TensorRef

Shape = tuple[int, ...]


def pattern_of(value: Any, dtype: str, field: str) -> bytes:
    """The bytes of one element that holds ``value``.

    Raises:
        ConfigurationError: ``value`` is no single number, or one that ``dtype`` does not hold.
    """
    known = DTYPES[dtype]
    if isinstance(value, (list, tuple)) or getattr(value, "shape", ()) != ():
        raise ConfigurationError(f"{field}: expected one number, got {value!r}")
    if known.is_numpy:
        try:
            return as_contents(value, known).tobytes()
        except ConfigurationError as error:
            raise ConfigurationError(f"{field}: {error}") from None
    if value == 0:
        return bytes(known.itemsize)
    if dtype == "bfloat16":
        return _bfloat16(value, field)
    torch = sys.modules.get("torch")
    if torch is None:
        raise ConfigurationError(f"{field}: a {dtype} other than 0 needs torch, got {value!r}")
    element = torch.tensor([float(value)]).to(getattr(torch, dtype))
    return bytes(element.view(torch.uint8).tolist())


def write_corner(
    driver: Driver,
    stream: StreamHandle,
    target: TensorRef,
    source: TensorRef,
    pattern: bytes | None,
    memory: MemoryKind = MemoryKind.DEVICE,
) -> None:
    """Writes ``source`` at the start of every axis of ``target``, ``pattern`` everywhere else.

    Args:
        driver: Whose memory ``target`` is.
        stream: Where the work goes.
        target: Contiguous memory.
        source: Contiguous memory of the same element type and rank, nowhere longer.
        pattern: One element; None where the shapes are equal.
        memory: Where the source lies.
    """
    if source.shape != target.shape:
        assert pattern is not None
        start, count = _beyond(target, source)
        fill(driver, stream, target.address + start * target.itemsize, count, pattern)
    for params in _copies(target, source, memory):
        driver.copy(params, stream)


def fill(driver: Driver, stream: StreamHandle, address: int, count: int, pattern: bytes) -> None:
    """Writes ``count`` elements of ``pattern``; a fill of CUDA knows 1, 2 and 4 bytes."""
    if not count:
        return
    size = len(pattern)
    if size <= 4:
        value = int.from_bytes(pattern, "little")
        driver.fill(MemsetParams(address, value, size, count), stream)
        return
    words = struct.unpack(f"<{size // 4}I", pattern)
    if len(set(words)) == 1:
        driver.fill(MemsetParams(address, words[0], 4, count * len(words)), stream)
        return
    for index, word in enumerate(words):  # a column of every element's first word, second word ...
        params = MemsetParams(address + 4 * index, word, 4, 1, count, size)
        if count == 1:
            params = MemsetParams(address + 4 * index, word, 4, 1)
        driver.fill(params, stream)


def _beyond(target: TensorRef, source: TensorRef) -> tuple[int, int]:
    """(first element, elements) to fill: the tail where only rows are missing, else everything."""
    if target.shape[1:] != source.shape[1:]:
        return 0, target.size
    row = math.prod(target.shape[1:])
    return source.shape[0] * row, (target.shape[0] - source.shape[0]) * row


def _copies(target: TensorRef, source: TensorRef, memory: MemoryKind) -> Iterator[MemcpyParams]:
    if not source.size:
        return
    # up to the last axis in which they differ, elements lie apart in the target
    axis = max(
        (i for i in range(len(target.shape)) if target.shape[i] != source.shape[i]), default=0
    )
    inner = math.prod(target.shape[axis + 1 :]) * target.itemsize
    wide, width = (ref.shape[axis] * inner if ref.shape else inner for ref in (target, source))
    rows = source.shape[axis - 1] if axis else 1
    outer = source.shape[: max(axis - 1, 0)]
    pitches = (wide, width) if rows > 1 else (0, 0)
    for position in product(*map(range, outer)):
        at, taken = (_row(position, ref.shape, axis) for ref in (target, source))
        yield MemcpyParams(
            CopyOperand(target.address + at * wide, pitch=pitches[0]),
            CopyOperand(source.address + taken * width, memory, pitch=pitches[1]),
            width,
            rows,
        )


def _row(position: tuple[int, ...], shape: Shape, axis: int) -> int:
    """How many rows of ``axis`` lie before the first one of an outer ``position``."""
    before = 0
    for index, place in enumerate(position):
        before = before * (shape[index] if index else 1) + place
    return before * (shape[axis - 1] if axis else 1)


def _bfloat16(value: Any, field: str) -> bytes:
    """The upper half of a float32, rounded to the nearest even."""
    try:
        bits = int.from_bytes(struct.pack("<f", value), "little")
    except (struct.error, OverflowError, TypeError):
        raise ConfigurationError(f"{field}: expected a bfloat16, got {value!r}") from None
    if not math.isnan(value):  # rounding would turn one into another number
        bits += 0x7FFF + (bits >> 16 & 1)
    return (bits >> 16).to_bytes(2, "little")
