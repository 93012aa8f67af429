"""AddressBook: which buffer an address lies in, by the names a user gives, else by allocation.

Ranges are read once and searched; the driver is asked once per unknown word (a query costs about
1.5 us on a device), and never again for words inside an allocation it has already told of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.records import Allocation
from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import describe

# what can be an address at all: above the first page, below the end of user space
_LOWEST, _HIGHEST = 1 << 12, 1 << 57


@dataclass(frozen=True, slots=True)
class Place:
    """Where an address lies.

    Args:
        matches: (name, offset in bytes) for every named range that holds it; more than one means
            that the names overlap and none of them can be preferred.
        allocation: The allocation, where no name holds it.
        offset: Bytes from the start of the first named range, or of the allocation.
    """

    matches: tuple[tuple[str, int], ...]
    allocation: Allocation | None
    offset: int

    @property
    def is_ambiguous(self) -> bool:
        return len(self.matches) > 1

    def __str__(self) -> str:
        if self.is_ambiguous:
            return "ambiguous: " + " or ".join(_sum(*match) for match in self.matches)
        if self.matches:
            return _sum(*self.matches[0])
        assert self.allocation is not None
        known = self.allocation
        details = f"{known.size} bytes, buffer id {known.buffer_id}, device {known.device}"
        return f"{_sum(f'allocation {known.base:#x}', self.offset)} ({details})"


def _sum(name: str, offset: int) -> str:
    return f"{name} + {offset} bytes" if offset else name


class AddressBook:
    """Named ranges, and the allocations met so far.

    Args:
        names: Name -> tensor, buffer, ``TensorRef``, or (address, bytes).
        driver: Whom to ask about other addresses; None asks nobody.

    Raises:
        CacheTypeError: A named object is no tensor, no buffer and no (address, bytes).
        ConfigurationError: ``names`` is no mapping.
    """

    def __init__(self, names: Mapping[str, Any], driver: Driver | None = None) -> None:
        if not isinstance(names, Mapping):
            raise ConfigurationError(
                f"names: expected a mapping of name -> tensor, got {type(names).__name__}"
            )
        ranges = sorted((*extent(name, item), str(name)) for name, item in names.items())
        self._starts = [address for address, _, _ in ranges]
        self._ranges = ranges
        # the furthest end of all ranges up to each: tells when looking further back is useless
        self._ends = list(accumulate((start + size for start, size, _ in ranges), max))
        self._driver = driver
        self._asked: dict[int, Allocation | None] = {}
        self._bases: list[int] = []
        self._allocations: dict[int, Allocation] = {}

    def find(self, address: int) -> Place | None:
        """Where ``address`` lies, or None for a number that is in no known memory."""
        if not _LOWEST <= address < _HIGHEST:
            return None
        named = self.find_named(address)
        if named is not None:
            return named
        allocation = self._allocation(address)
        if allocation is None:
            return None
        return Place((), allocation, address - allocation.base)

    def find_named(self, address: int) -> Place | None:
        """As :meth:`find`, by the names alone."""
        matches = tuple(self._named(address))
        return Place(matches, None, matches[0][1]) if matches else None

    def _named(self, address: int) -> list[tuple[str, int]]:
        found = []
        index = bisect_right(self._starts, address) - 1
        while index >= 0 and self._ends[index] > address:
            start, size, name = self._ranges[index]
            if address < start + size:
                found.append((name, address - start))
            index -= 1
        return found[::-1]

    def _allocation(self, address: int) -> Allocation | None:
        index = bisect_right(self._bases, address) - 1
        if index >= 0:
            known = self._allocations[self._bases[index]]
            if address < known.base + known.size:
                return known
        if self._driver is None or address in self._asked:
            return None
        found = self._asked[address] = self._driver.allocation_of(address)
        if found is not None:
            self._bases.insert(bisect_right(self._bases, found.base), found.base)
            self._allocations[found.base] = found
        return found


def words(data: bytes, offset: int = 0) -> Iterable[tuple[int, int]]:
    """(byte offset in ``data``, value) of every 8-byte word aligned in the parameter block.

    ``offset`` is where ``data`` begins in that block.
    """
    for at in range(-offset % 8, len(data) - 7, 8):
        yield at, int.from_bytes(data[at : at + 8], "little")


def extent(name: str, item: Any) -> tuple[int, int]:
    """(lowest address, bytes to its end) of anything a name may stand for.

    Raises:
        CacheTypeError: ``item`` is no tensor, no buffer and no (address, bytes).
        ConfigurationError: A negative address or size.
    """
    if isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, int) for part in item):
        if min(item) < 0:
            raise ConfigurationError(
                f"names[{name!r}]: expected (address, bytes) of 0 or more, got {item}"
            )
        return item
    tensor = describe(item, name=f"names[{name!r}]")
    if not tensor.size:
        return tensor.address, 0
    # strides count elements; a view reaches further than its number of bytes says
    steps = [(count - 1) * step for count, step in zip(tensor.shape, tensor.strides, strict=True)]
    low, high = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    return tensor.address + low * tensor.itemsize, (high - low + 1) * tensor.itemsize
