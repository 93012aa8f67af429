"""Handles of the emulated driver: numbers never used twice in a process, and tables that find them.

One sequence for all kinds and drivers, so that a handle of another kind, another driver, or of
something destroyed is never mistaken for a live one.
"""

from __future__ import annotations

import itertools
from typing import Generic, Protocol, TypeVar

from graphcore.driver.emulated.calls import Refused

_numbers = itertools.count(0x4000_0000_0000, 0x40)


def draw_handle() -> int:
    """The next handle."""
    return next(_numbers)


class Handled(Protocol):
    """An object with a handle of its own."""

    @property
    def handle(self) -> int: ...


Item = TypeVar("Item", bound=Handled)


class Table(Generic[Item]):
    """The live objects of one kind; an unknown handle answers ``code``."""

    def __init__(self, noun: str, code: str = "CUDA_ERROR_INVALID_HANDLE") -> None:
        self._noun = noun
        self._code = code
        self._items: dict[int, Item] = {}

    def add(self, item: Item) -> None:
        self._items[item.handle] = item

    def find(self, handle: int) -> Item:
        item = self._items.get(handle)
        if item is None:
            raise Refused(self._code, f"no {self._noun} has handle {handle:#x}")
        return item

    def remove(self, handle: int) -> Item:
        item = self.find(handle)
        del self._items[handle]
        return item
