"""StaticTensors: several named tensors of one driver in one allocation, at addresses for life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from graphcore.driver import Driver
from graphcore.resources.buffer import Buffer
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import contiguous_strides

_ALIGNMENT = 256


Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (element type, shape)."""


def offsets_of(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Where each tensor begins in memory that holds them one after another, and all bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        offsets[name] = end
        end += -(-prod(shape) * DTYPES[dtype].itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def carve(memory: Buffer, shapes: Shapes) -> dict[str, Buffer]:
    """The tensors, one after another, in ``memory``, which is large enough."""
    offsets, _ = offsets_of(shapes)
    whole = memory.__graphcore_tensor__()
    return {
        name: Buffer(
            replace(
                whole,
                address=whole.address + offsets[name],
                shape=shape,
                strides=contiguous_strides(shape),
                dtype=dtype,
                itemsize=DTYPES[dtype].itemsize,
            ),
            memory.driver,
        )
        for name, (dtype, shape) in shapes.items()
    }


class StaticTensors:
    """Tensors of the given shapes, one after another; their contents are undefined.

    Args:
        driver: Where.
        shapes: Name -> (element type, shape).

    Raises:
        CudaError: Out of memory, or inside a capture that does not allow it.
    """

    def __init__(self, driver: Driver, shapes: Shapes) -> None:
        self.offsets, size = offsets_of(shapes)
        self.memory = Buffer.allocate(max(size, 1), "uint8", driver=driver)
        self.tensors: Mapping[str, Buffer] = MappingProxyType(carve(self.memory, shapes))

    def close(self) -> None:
        """Lets go of the memory; graphs that use it keep it, and refuse where they are guarded."""
        self.memory.close()
        for tensor in self.tensors.values():
            tensor.close()
