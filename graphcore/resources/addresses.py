"""AddressBook: which buffer an address lies in, by names, else by allocation.

Ranges are read once and searched; the driver is asked once per unknown word (a query costs about
1.5 us on a device), and never again for words inside an allocation it has already told of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.records import Allocation
from graphcore.errors import ConfigurationError
from graphcore.resources.divisor_tables import divisor_tables, outside
from graphcore.resources.pools import Blocks
from graphcore.resources.spans import Span

# what can be an address at all: above the first page, below the end of user space
_LOWEST, _HIGHEST = 1 << 12, 1 << 57


@dataclass(frozen=True, slots=True)
class Place:
    """Where an address lies.

    Args:
        matches: (name, offset in bytes) for every named range that holds it; more than one means
            that the names overlap and none of them can be preferred.
        allocation: The allocation, where no name holds it.
        offset: Bytes from the start of the first named range, or of the allocation; the address
            itself where nothing is known.
        source: Who knows: "name" (given by the user), "owner" (kept by the graph), "graph" (its own
            memory), "torch" (its allocator), "driver", or "nobody".
    """

    matches: tuple[tuple[str, int], ...]
    allocation: Allocation | None
    offset: int
    source: str = field(default="name", repr=False, compare=False)

    @property
    def is_ambiguous(self) -> bool:
        return len(self.matches) > 1

    def __str__(self) -> str:
        if self.is_ambiguous:
            return "ambiguous: " + " or ".join(_sum(*match) for match in self.matches)
        if self.matches:
            return _sum(*self.matches[0])
        known = self.allocation
        if known is None:
            return f"{self.offset:#x}, in no memory that is known"
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
        spans = [Span.of(str(name), item) for name, item in names.items()]
        self._spans = sorted(spans, key=lambda span: (span.start, span.size, span.name))
        self._starts = [span.start for span in self._spans]
        # the furthest end of all spans up to each: tells when looking further back is useless
        self._ends = list(accumulate((span.end for span in self._spans), max))
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
        return Place((), allocation, address - allocation.base, "driver")

    def find_named(self, address: int) -> Place | None:
        """As :meth:`find`, by the names alone."""
        matches = tuple(self._named(address))
        return Place(matches, None, matches[0][1]) if matches else None

    def _named(self, address: int) -> list[tuple[str, int]]:
        around = []
        index = bisect_right(self._starts, address) - 1
        while index >= 0 and self._ends[index] > address:
            span = self._spans[index]
            if address < span.end:
                around.append(span)
            index -= 1
        if len(around) > 1:  # interleaved views reach over each other: whose element is it?
            around = [span for span in around if span.holds(address)] or around
        return [(span.name, address - span.start) for span in reversed(around)]

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


class KnownMemory:
    """Several address books, one after the other: what the first one knows, the others do not say.

    Args:
        books: (source, book), the most telling first.
        blocks: The pieces of torch's allocator: between the books and the driver.
        driver: Whom to ask last; None asks nobody.
    """

    def __init__(
        self,
        books: Iterable[tuple[str, AddressBook]],
        blocks: Blocks | None = None,
        driver: Driver | None = None,
    ) -> None:
        self._books = tuple(books)
        self._blocks = blocks
        self._driver = AddressBook({}, driver)

    def find(self, address: int) -> Place | None:
        """Where ``address`` lies, or None for a number that is in no known memory."""
        if not _LOWEST <= address < _HIGHEST:
            return None
        for source, book in self._books:
            place = book.find_named(address)
            if place is not None:
                return replace(place, source=source)
        block = None if self._blocks is None else self._blocks.find(address)
        if block is None:
            return self._driver.find(address)
        state = "" if block.is_live else "freed "
        name = f"{state}{block.library} block {block.address:#x} of {block.requested} bytes"
        offset = address - block.address
        return Place(((name, offset),), None, offset, block.library)


def nowhere(address: int) -> Place:
    """The place of a pointer that lies in no known memory: freed, or never the device's."""
    return Place((), None, address, "nobody")


def words(data: bytes, offset: int = 0) -> Iterable[tuple[int, int]]:
    """(byte offset in ``data``, value) of every 8-byte word aligned in the parameter block.

    ``offset`` is where ``data`` begins in that block. Tables of torch's that hold no address are
    left out.
    """
    aligned = range(-offset % 8, len(data) - 7, 8)
    found = ((at, int.from_bytes(data[at : at + 8], "little")) for at in aligned)
    tables = divisor_tables(data)
    return outside(found, tables) if tables else found
