"""The fields that a fingerprint is made of: plain data with one text each.

Handles are left out or counted by first appearance; pointers become the place they point into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from graphcore.resources.addresses import Place


@dataclass(frozen=True, slots=True)
class StructValue:
    """An argument with pointers inside: its other bytes, and (byte offset, place) of each.

    ``rest`` is empty where the other bytes do not count.
    """

    rest: bytes
    places: tuple[tuple[int, Place], ...]

    def __str__(self) -> str:
        pieces = [f"at byte {offset} {place}" for offset, place in self.places]
        if any(self.rest):
            pieces.insert(0, words_of(self.rest))
        return ", ".join(pieces)


Value = None | bool | int | str | bytes | Place | StructValue | tuple["Value", ...]
Named = tuple[str, Value]


@dataclass(frozen=True, slots=True)
class Field:
    """One thing a graph depends on: ``where`` names the node (or the graph) in words."""

    where: str
    field: str
    value: Value

    def __str__(self) -> str:
        return f"{self.where}: {self.field} = {words_of(self.value)}"


class Group(NamedTuple):
    """The fields of one node, or of a graph itself; light, because there is one for each node.

    Args:
        level: The graph it lies in: "" for the whole, "10.0." for the first one inside node 10.
        position: Of the node; None for the graph itself.
        name: What the node is called.
        own: (field, value) that it does not share.
        shared: Those it has in common with others, of the same function or launch shape.
    """

    level: str
    position: int | None
    name: str
    own: tuple[Named, ...]
    shared: tuple[tuple[Named, ...], ...] = ()

    @property
    def values(self) -> tuple[Named, ...]:
        """(field, value) of all, those that tell most first."""
        head, rest = self.own[:2], self.own[2:]
        return (*head, *(pair for pairs in self.shared for pair in pairs), *rest)

    @property
    def where(self) -> str:
        """In words: "node 5 (kernel add)", or "graph"."""
        if self.position is None:
            return f"graph {self.level}".strip()
        return f"node {self.level}{self.position} ({words_of(self.own[0][1])} {self.name})"


def words_of(value: Value) -> str:
    """A field's value as a person reads it."""
    if isinstance(value, tuple) and any(isinstance(part, Place) for part in value):
        return f"({', '.join(map(words_of, value))})"
    if not isinstance(value, bytes):
        return str(value)
    if len(value) in (1, 2, 4, 8):
        return f"{int.from_bytes(value, 'little'):#x}"
    return f"<{value.hex(' ', -8)}>"
