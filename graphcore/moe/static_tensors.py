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


class StaticTensors:
    """Tensors of the given shapes, one after another; their contents are undefined.

    Args:
        driver: Where.
        shapes: Name -> (element type, shape).

    Raises:
        CudaError: Out of memory, or inside a capture that does not allow it.
    """

    def __init__(self, driver: Driver, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in shapes.items():
            self.offsets[name] = end
            size = prod(shape) * DTYPES[dtype].itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.memory = Buffer.allocate(max(end, 1), "uint8", driver=driver)
        whole = self.memory.__graphcore_tensor__()
        self.tensors: Mapping[str, Buffer] = MappingProxyType(
            {
                name: Buffer(
                    replace(
                        whole,
                        address=whole.address + self.offsets[name],
                        shape=shape,
                        strides=contiguous_strides(shape),
                        dtype=dtype,
                        itemsize=DTYPES[dtype].itemsize,
                    ),
                    driver,
                )
                for name, (dtype, shape) in shapes.items()
            }
        )

    def close(self) -> None:
        """Lets go of the memory; graphs that use it keep it, and refuse where they are guarded."""
        self.memory.close()
        for tensor in self.tensors.values():
            tensor.close()
