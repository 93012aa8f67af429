"""LaunchMemory: what one launch hands to the driver, in memory that is made once.

A launch through the bindings makes an object for its configuration and a pointer for each argument,
which costs several times what the driver's own call does. Here both are written into one block of
memory as C has them, and the entry point is called with arguments that were made with the block.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.attributes import ATTRIBUTE_BYTES, MOST_ATTRIBUTES, packed_attributes
from graphcore.driver.cuda.versions import argument
from graphcore.driver.records import LaunchConfig

Layout = tuple[tuple[int, int], ...]
Call = Callable[..., int]

CALL = "cuLaunchKernelEx"
# CUlaunchConfig: grid, block, shared bytes; stream; attributes and how many
_CONFIG = struct.Struct("=7I4xQQI4x")
_POINTER = struct.Struct("=Q")
_ALIGNMENT = 16
_NOTHING = argument(0)


class LaunchMemory:
    """Configuration, arguments and pointers to them, of one launch at a time.

    Args:
        layout: (offset, size) of each parameter of the function.
    """

    __slots__ = ("_attributes", "_block", "_first", "_given", "_write")

    def __init__(self, layout: Layout) -> None:
        pointers = _CONFIG.size
        end = pointers + len(layout) * _POINTER.size
        self._first = first = -(-end // _ALIGNMENT) * _ALIGNMENT
        size = sum(layout[-1]) if layout else 0
        self._attributes = attributes = first + -(-size // _ALIGNMENT) * _ALIGNMENT
        self._block = block = ctypes.create_string_buffer(
            attributes + MOST_ATTRIBUTES * ATTRIBUTE_BYTES
        )
        for index, (offset, _) in enumerate(layout):
            place = pointers + index * _POINTER.size
            _POINTER.pack_into(block, place, ctypes.addressof(block) + first + offset)
        self._write = struct.Struct(_format(layout))
        self._given = ctypes.byref(block), ctypes.byref(block, pointers)

    def fill(self, config: LaunchConfig, arguments: Sequence[bytes], stream: int) -> None:
        """Writes all of a launch; ``arguments`` have the sizes of the layout.

        Raises:
            OverflowError: A number that fits none of CUDA's fields.
        """
        block = self._block
        attributes = packed_attributes(config)
        count = len(attributes) // ATTRIBUTE_BYTES
        at = 0
        if attributes:
            at = ctypes.addressof(block) + self._attributes
            ctypes.memmove(at, attributes, len(attributes))
        try:
            _CONFIG.pack_into(
                block, 0, *config.grid, *config.block, config.shared_bytes, stream, at, count
            )
        except struct.error as error:
            raise OverflowError(f"{config}: {error}") from None
        self._write.pack_into(block, self._first, *arguments)

    def given_to(self, function: int) -> tuple[object, ...]:
        """The arguments of a prepared call; they keep the memory alive."""
        config, pointers = self._given
        return config, argument(function), pointers, _NOTHING


class Parameters:
    """The parameters of a function, and spare memory for its launches.

    Memory is taken for as long as a launch lasts, because other threads launch meanwhile.
    """

    __slots__ = ("_sizes", "_spare", "layout")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._sizes = [size for _, size in layout]
        self._spare: list[LaunchMemory] = []

    def check(self, arguments: Sequence[bytes]) -> None:
        """Raises CudaError (INVALID_VALUE) where count or sizes are not the function's.

        CUDA would read past the bytes.
        """
        sizes = list(map(len, arguments))
        if sizes != self._sizes:
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE",
                CALL,
                description=f"arguments: expected sizes {self._sizes}, got {sizes} bytes",
            )

    def take(self) -> LaunchMemory:
        """Memory for a launch, to be given back."""
        try:
            return self._spare.pop()
        except IndexError:
            return LaunchMemory(self.layout)

    def give_back(self, memory: LaunchMemory) -> None:
        """Keeps ``memory``, whose launch is made, for another one."""
        self._spare.append(memory)


def _format(layout: Layout) -> str:
    """The struct format of arguments at their offsets."""
    pieces, end = ["="], 0
    for offset, size in layout:
        pieces.append(f"{offset - end}x{size}s")
        end = offset + size
    return "".join(pieces)
