"""OwnedMemory: the memory that a graph's own allocation nodes make, as an update sees it.

An update keeps whether a copy works on such memory, and refuses a fill of such memory where the
graph frees it too (seen on an H200, driver 580.159). Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from graphcore.driver.records import AllocParams, FreeParams, NodeParams


class OwnedMemory:
    """The allocations of one graph, by address; ``params`` are those of its nodes."""

    __slots__ = ("_ends", "_freed", "_starts")

    def __init__(self, params: Iterable[NodeParams] = ()) -> None:
        listed = [each for each in params if isinstance(each, (AllocParams, FreeParams))]
        made = sorted((each.address, each.size) for each in listed if isinstance(each, AllocParams))
        self._starts = [address for address, _ in made]
        self._ends = [address + size for address, size in made]
        self._freed = {each.address for each in listed if isinstance(each, FreeParams)}

    def start_of(self, address: int) -> int | None:
        """Where the allocation that ``address`` lies in begins, or None."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ends[index]:
            return None
        return self._starts[index]

    def holds(self, address: int) -> bool:
        """Whether the graph allocates this memory."""
        return bool(self._starts) and self.start_of(address) is not None

    def gives_back(self, address: int) -> bool:
        """Whether the graph allocates this memory and frees it again."""
        return bool(self._starts) and self.start_of(address) in self._freed
