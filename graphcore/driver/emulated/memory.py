"""The memory of an emulated machine: every allocation, and raw copies and fills.

A device address is a host address, so NumPy, torch's CPU tensors and DLPack are device memory too;
only what was allocated here is known here. Sizes are bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import numpy

from graphcore.driver.codes import OUT_OF_MEMORY, memory_words
from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.records import Allocation, MemcpyParams, MemoryKind, MemsetParams

ALIGNMENT = 256
# freed blocks are kept for the next allocation of their size, as a device's allocator does: the
# address comes back with another id, and a late read of freed memory does not end the process
_RETAINED_BYTES = 64 * 2**20

_buffer_ids = itertools.count(1)


@dataclass(eq=False, slots=True)
class _Block:
    base: int
    size: int
    device: int
    memory: MemoryKind
    buffer: object
    buffer_id: int = 0
    owned_by_graph: bool = False


@dataclass(slots=True)
class _Live:
    """Live blocks by address, for look-ups of addresses inside them."""

    blocks: dict[int, _Block] = field(default_factory=dict)
    bases: list[int] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        self.blocks[block.base] = block
        bisect.insort(self.bases, block.base)

    def remove(self, base: int) -> _Block:
        del self.bases[bisect.bisect_left(self.bases, base)]
        return self.blocks.pop(base)

    def around(self, address: int) -> _Block | None:
        index = bisect.bisect_right(self.bases, address) - 1
        if index < 0:
            return None
        block = self.blocks[self.bases[index]]
        return block if address < block.base + block.size else None


class Memory:
    """All memory of a machine with ``devices`` devices of ``total`` bytes each."""

    def __init__(self, devices: int, total: int) -> None:
        self.total = total
        self._used = [0] * devices
        self._live = _Live()
        self._reserved: dict[int, _Block] = {}
        self._free: defaultdict[tuple[int, MemoryKind, int], list[_Block]] = defaultdict(list)
        self._retained = 0
        # several threads allocate, also while one captures
        self._lock = threading.RLock()

    def free_bytes(self, device: int) -> int:
        return self.total - self._used[device]

    def allocate(self, device: int, size: int) -> int:
        """New device memory; OUT_OF_MEMORY past ``total``."""
        if size < 1:
            raise invalid(f"size: expected at least 1 byte, got {size}")
        with self._lock:
            self.check_free(device, size)
            block = self._block(device, size, MemoryKind.DEVICE)
            self.charge(device, size)
            return self._start(block)

    def allocate_pinned(self, device: int, size: int) -> int:
        """New host memory that a device can read."""
        if size < 1:
            raise invalid(f"size: expected at least 1 byte, got {size}")
        with self._lock:
            return self._start(self._block(device, size, MemoryKind.HOST))

    def free(self, address: int, memory: MemoryKind) -> None:
        """Gives back what was allocated at exactly ``address``, a graph's allocation too."""
        with self._lock:
            block = self._live.blocks.get(address)
            if block is None or block.memory is not memory:
                raise invalid(f"address {address:#x} is not the start of a live allocation")
            self._end(block)
            if not block.owned_by_graph:
                self._retain(block)

    def find(self, address: int) -> Allocation | None:
        """The live allocation around ``address``."""
        with self._lock:
            block = self._live.around(address)
        if block is None:
            return None
        return Allocation(block.base, block.size, block.buffer_id, block.memory, block.device)

    # ---- memory that belongs to a graph ---------------------------------------------------------

    def reserve(self, device: int, size: int) -> int:
        """An address for a graph-owned allocation, which is not live yet."""
        if size < 1:
            raise invalid(f"size: expected at least 1 byte, got {size}")
        with self._lock:
            block = self._block(device, size, MemoryKind.DEVICE)
            block.owned_by_graph = True
            self._reserved[block.base] = block
            return block.base

    def is_reserved(self, address: int) -> bool:
        return address in self._reserved

    def is_live(self, address: int) -> bool:
        return address in self._live.blocks

    def start_reserved(self, address: int) -> None:
        """The allocation node at ``address`` runs."""
        with self._lock:
            block = self._reserved[address]
            self.charge(block.device, block.size)
            self._start(block)

    def free_reserved(self, address: int) -> None:
        """The free node of ``address`` runs."""
        self.free(address, MemoryKind.DEVICE)

    def check_free(self, device: int, size: int) -> None:
        """OUT_OF_MEMORY where ``size`` bytes are not free."""
        self.charge(device, size)
        self.discharge(device, size)

    def release(self, address: int) -> None:
        """The last graph that owned ``address`` is gone; a live allocation stays until freed."""
        with self._lock:
            block = self._reserved.pop(address, None)
            if block is not None and address not in self._live.blocks:
                block.owned_by_graph = False
                self._retain(block)

    # ---- accounting ------------------------------------------------------------------------------

    def charge(self, device: int, size: int) -> None:
        """Takes ``size`` bytes off what is free, or refuses with OUT_OF_MEMORY."""
        with self._lock:
            if size > self.free_bytes(device):
                words = memory_words(self.free_bytes(device), self.total, size)
                raise Refused(OUT_OF_MEMORY, words)
            self._used[device] += size

    def discharge(self, device: int, size: int) -> None:
        with self._lock:
            self._used[device] -= size

    def drop_retained(self) -> None:
        """Gives freed blocks back to the host."""
        with self._lock:
            self._free.clear()
            self._retained = 0

    def _block(self, device: int, size: int, memory: MemoryKind) -> _Block:
        waiting = self._free.get((device, memory, size))
        if waiting:
            self._retained -= size
            return waiting.pop()
        try:
            buffer = numpy.empty(size + ALIGNMENT - 1, numpy.uint8)
        except MemoryError:
            raise Refused(OUT_OF_MEMORY, f"the host has no {size} bytes") from None
        base = -(-buffer.ctypes.data // ALIGNMENT) * ALIGNMENT
        return _Block(base, size, device, memory, buffer)

    def _start(self, block: _Block) -> int:
        block.buffer_id = next(_buffer_ids)
        self._live.add(block)
        return block.base

    def _end(self, block: _Block) -> None:
        self._live.remove(block.base)
        if block.memory is MemoryKind.DEVICE:
            self.discharge(block.device, block.size)

    def _retain(self, block: _Block) -> None:
        if self._retained + block.size <= _RETAINED_BYTES:
            self._retained += block.size
            self._free[block.device, block.memory, block.size].append(block)


def check_copy(params: MemcpyParams) -> None:
    """INVALID_VALUE where a copy makes no sense."""
    if params.width < 0 or params.height < 0 or params.depth < 1:
        raise invalid(
            "copy: expected width >= 0, height >= 0, depth >= 1, got "
            f"{params.width} x {params.height} x {params.depth}"
        )
    for side, operand in (("dst", params.dst), ("src", params.src)):
        if not operand.address and params.width:
            raise invalid(f"copy: {side}: expected an address, got 0")
        if not params.is_1d and operand.pitch < params.width:
            raise invalid(
                f"copy: {side}.pitch: expected at least the width {params.width}, got "
                f"{operand.pitch}"
            )
        if params.depth > 1 and operand.rows < params.height:
            raise invalid(
                f"copy: {side}.rows: expected at least the height {params.height}, got "
                f"{operand.rows}"
            )


def run_copy(params: MemcpyParams) -> None:
    """Copies now."""
    for slice_index in range(params.depth):
        for row in range(params.height):
            dst, src = (
                side.address + (slice_index * side.rows + row) * side.pitch
                for side in (params.dst, params.src)
            )
            ctypes.memmove(dst, src, params.width)


def check_fill(params: MemsetParams) -> None:
    """INVALID_VALUE where a fill makes no sense."""
    if params.element_size not in (1, 2, 4):
        raise invalid(f"fill: element_size: expected 1, 2 or 4, got {params.element_size}")
    if params.width < 0 or params.height < 0:
        raise invalid(
            f"fill: expected width >= 0 and height >= 0, got {params.width} x {params.height}"
        )
    if not 0 <= params.value < 1 << (8 * params.element_size):
        raise invalid(
            f"fill: value: expected {params.element_size} unsigned bytes, got {params.value}"
        )
    if not params.address and params.width:
        raise invalid("fill: address: expected an address, got 0")
    if params.height > 1 and params.pitch < params.width * params.element_size:
        raise invalid(
            f"fill: pitch: expected at least {params.width * params.element_size}, got "
            f"{params.pitch}"
        )
    if params.address % params.element_size:
        raise invalid(
            f"fill: address: expected a multiple of {params.element_size}, got {params.address:#x}"
        )


def run_fill(params: MemsetParams) -> None:
    """Fills now."""
    row = params.value.to_bytes(params.element_size, "little") * params.width
    for index in range(params.height):
        ctypes.memmove(params.address + index * params.pitch, row, len(row))
