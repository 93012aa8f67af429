"""SlotTables: which expert sits where, in device memory, at addresses for life.

The device reads and writes them (``route_plan``); the host copies them out and in whole, after all
work. Which tables there are stands in ``graphcore_kernels.route_layout``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from graphcore_kernels.route_layout import table_shapes

from graphcore.driver import Driver, active
from graphcore.moe.decisions.static_tensors import StaticTensors
from graphcore.moe.slots.slot_state import SlotState
from graphcore.resources.buffer import Buffer

_CODES = {"int32": "i", "int64": "q"}


class SlotTables:
    """The tables of one group, holding ``state``.

    Raises:
        CudaError: Out of memory, or the driver refused the copy.
    """

    def __init__(self, driver: Driver, state: SlotState) -> None:
        self.driver = driver
        self.experts, self.slots = state.experts, state.slots
        self._shapes = table_shapes(state.experts, state.slots)
        self._static = StaticTensors(driver, self._shapes)
        self.write(state)

    @property
    def tensors(self) -> Mapping[str, Buffer]:
        """Every table by its name; what ``route_plan`` and ``expert_gather`` take."""
        return self._static.tensors

    @property
    def nbytes(self) -> int:
        """Of the allocation."""
        return self._static.memory.nbytes

    def read(self) -> SlotState:
        """A copy, after all work."""
        memory = self._static.memory
        with active.outside_captures():
            data = self.driver.read(memory.address, memory.nbytes)
        words = {
            name: list(
                struct.unpack_from(f"<{shape[0]}{_CODES[dtype]}", data, self._static.offsets[name])
            )
            for name, (dtype, shape) in self._shapes.items()
        }
        return SlotState(self.experts, self.slots, words)

    def write(self, state: SlotState) -> None:
        """Takes ``state``, after all work, in one copy."""
        data = bytearray(self.nbytes)
        for name, (dtype, shape) in self._shapes.items():
            offset = self._static.offsets[name]
            struct.pack_into(f"<{shape[0]}{_CODES[dtype]}", data, offset, *state.words[name])
        with active.outside_captures():
            self.driver.write(self._static.memory.address, bytes(data))

    def close(self) -> None:
        """Lets go of the memory; graphs that use it keep it."""
        self._static.close()
