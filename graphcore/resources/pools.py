"""Blocks: the pieces that a library's allocator hands out of larger allocations of the driver.

torch takes segments of 2 MiB and more from the driver and gives out pieces of them: the driver has
one id for all of a segment, so that only the allocator itself can say that a piece was given back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """One piece.

    Args:
        address: Its first byte.
        size: Bytes, rounded up by the allocator.
        requested: Bytes that were asked for.
        is_live: Whether somebody holds it now.
        library: Whose allocator it is, "torch".
    """

    address: int
    size: int
    requested: int
    is_live: bool
    library: str = "torch"


class Blocks:
    """All pieces of one device at one moment, for look-ups by address."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._blocks = sorted(blocks, key=lambda block: block.address)
        self._starts = [block.address for block in self._blocks]

    def find(self, address: int) -> Block | None:
        """The piece that ``address`` lies in, live or not; None outside every segment."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        block = self._blocks[index]
        return block if address < block.address + block.size else None

    def __len__(self) -> int:
        return len(self._blocks)
