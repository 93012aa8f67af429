"""KernelCall: one launch of a kernel whose pointers are places, to be filled in when it is made.

What a launch checks and chooses depends on sizes alone, so that it is done once for all layers of
a model and all tensors of a size. A *place* is an address beyond any memory: (number, offset).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphcore.driver import Driver, Kernel
from graphcore.driver.records import FunctionHandle, LaunchConfig, StreamHandle
from graphcore.driver.tensor_map import TENSOR_MAP_TYPE

_FIRST = 1 << 56
_STEP = 1 << 44
_POINTER_BYTES = 8


def place_address(number: int) -> int:
    """Where place ``number`` seems to begin; it has room for more than any device's memory."""
    return _FIRST + number * _STEP


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel, how it is launched, and where its arguments name places.

    Args:
        kernel: To launch.
        config: Its launch shape.
        arguments: Packed; the first word of one that points at a place has no meaning. The rest of
            a tensor map stays.
        pointers: (index of the argument, number of the place, offset in it).
    """

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[bytes, ...]
    pointers: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def over_places(
        cls, kernel: Kernel, config: LaunchConfig, arguments: tuple[bytes, ...]
    ) -> KernelCall:
        """The call whose packed ``arguments`` point at places, which are found."""
        found = []
        for index, parameter in enumerate(kernel.parameters):
            if not (parameter.is_pointer or parameter.type == TENSOR_MAP_TYPE):
                continue
            address = int.from_bytes(arguments[index][:_POINTER_BYTES], "little")
            if address >= _FIRST:
                found.append((index, *divmod(address - _FIRST, _STEP)))
        return cls(kernel, config, arguments, tuple(found))

    def filled(self, addresses: Mapping[int, int]) -> KernelCall:
        """The same with some places filled in.

        Args:
            addresses: Number of a place -> address.
        """
        arguments = list(self.arguments)
        left = []
        for index, number, offset in self.pointers:
            if number in addresses:
                arguments[index] = _pointed(arguments[index], addresses[number] + offset)
            else:
                left.append((index, number, offset))
        return KernelCall(self.kernel, self.config, tuple(arguments), tuple(left))

    def launch(
        self,
        driver: Driver,
        function: FunctionHandle,
        stream: StreamHandle,
        addresses: Sequence[int],
    ) -> None:
        """Launches with place n at ``addresses[n]``.

        Raises:
            CudaError: The driver refused.
        """
        arguments = list(self.arguments)
        for index, number, offset in self.pointers:
            arguments[index] = _pointed(arguments[index], addresses[number] + offset)
        driver.launch(function, self.config, arguments, stream)


def _pointed(argument: bytes, address: int) -> bytes:
    """A pointer, or a tensor map, to ``address``."""
    return address.to_bytes(_POINTER_BYTES, "little") + argument[_POINTER_BYTES:]
