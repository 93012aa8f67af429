"""WrittenMemory: where the nodes of a graph write, as far as they say so.

Copies and fills do, and kernels whose signature is known, by their pointers that are not const. Of
other kernels every aligned word of their parameters may be a pointer that they write through. What
is written through addresses that lie in memory themselves (tables of pointers) no node shows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.records import AllocParams, HostParams, MemcpyParams, MemsetParams
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.footprint import Touch, touches
from graphcore.resources.lifetime import OwnerSet, memory_of
from graphcore.resources.spans import extent
from graphcore.resources.tensors import describe

Piece = tuple[int, int]
"""(address, bytes)."""


class WrittenMemory:
    """What one snapshot says; made once for each, and asked for every tensor."""

    def __init__(self, snapshot: GraphSnapshot) -> None:
        self._calls_host = False
        self._made: list[Piece] = []
        self._filled: list[Piece] = []
        for node in snapshot.walk():
            self._note(node)
        may_write: set[int] = set()
        read: dict[int, Touch] = {}
        for touch in touches(snapshot):
            if _only_reads(touch):
                read.setdefault(touch.address, touch)
            else:
                may_write.add(touch.address)
        self._may_write = sorted(may_write)
        self._read = sorted(read.items(), key=lambda item: item[0])
        self._read_at = [address for address, _ in self._read]

    def why_not(self, memory: Sequence[Piece], *, host_writes: bool) -> str | None:
        """Why no node writes there, in words; None where one does, or may.

        Args:
            memory: The tensor, and around it what kernels may count their elements from.
            host_writes: Whether host callbacks could write it.
        """
        if host_writes and self._calls_host:
            return None
        around = [*memory, *(piece for piece in self._made if _overlap(piece, memory))]
        if any(_overlap(piece, memory) for piece in self._filled):
            return None
        if any(_first(self._may_write, piece) is not None for piece in around):
            return None
        for piece in around:
            at = _first(self._read_at, piece)
            if at is not None:
                return f"one that its nodes only read ({self._read[at][1].operand})"
        return "memory that no node refers to"

    def _note(self, node: NodeRecord) -> None:
        params = node.params
        if isinstance(params, AllocParams):
            self._made.append((params.address, params.size))
        elif isinstance(params, HostParams):
            self._calls_host = True
        elif isinstance(params, MemsetParams):
            row = params.width * params.element_size
            self._filled.append((params.address, (params.height - 1) * params.pitch + row))
        elif isinstance(params, MemcpyParams):
            dst = params.dst
            rows = (params.depth - 1) * dst.rows + params.height - 1
            self._filled.append((dst.address, rows * dst.pitch + params.width))


def memory_around(tensor: Any, name: str, driver: Driver, owners: OwnerSet) -> list[Piece]:
    """The memory of ``tensor``, and the whole of what it is a part of: its storage, a tensor that a
    graph keeps, where no library says more the driver's allocation.
    """
    ref = describe(tensor, name=name)
    own = extent(name, ref)
    pieces = [own]
    whole = _whole(memory_of(tensor, ref))
    if whole is None:
        allocation = driver.allocation_of(ref.address)
        whole = None if allocation is None else (allocation.base, allocation.size)
    if whole is not None:
        pieces.append(whole)
    kept = (extent(owner.label, owner.record.tensor) for owner in owners if owner.record)
    return [*pieces, *(piece for piece in kept if _overlap(piece, [own]))]


def _whole(memory: Any) -> Piece | None:
    """A storage of torch, a chunk of CuPy or an array of NumPy as (address, bytes)."""
    if hasattr(memory, "nbytes") and callable(getattr(memory, "data_ptr", None)):
        return memory.data_ptr(), memory.nbytes()
    address, size = getattr(memory, "ptr", None), getattr(memory, "size", None)
    if isinstance(address, int) and isinstance(size, int):
        return address, size
    if hasattr(memory, "__array_interface__") and memory.flags.forc:
        return memory.__array_interface__["data"][0], memory.nbytes
    return None


def _only_reads(touch: Touch) -> bool:
    if isinstance(touch.field, str):
        is_free = not isinstance(touch.node.params, (MemcpyParams, MemsetParams))
        return touch.field == "src" or is_free
    kernel = touch.node.kernel
    if kernel is None or not touch.field.is_pointer:
        return False
    return kernel.parameters[touch.field.index].is_read_only


def _overlap(piece: Piece, memory: Iterable[Piece]) -> bool:
    start, size = piece
    return any(start < other + length and other < start + size for other, length in memory)


def _first(addresses: Sequence[int], piece: Piece) -> int | None:
    """The index of the first address in ``piece``."""
    at = bisect_left(addresses, piece[0])
    return at if at < len(addresses) and addresses[at] < piece[0] + piece[1] else None
