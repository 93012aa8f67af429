"""RouteWitness: where the expert ids of a group come from, so that tampering is seen."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteWitness:
    """The expert ids that a group's products read, back to what chose them.

    Args:
        chain: Identities of the nodes from the router's choice to the ids, in order.
        ids: Identity of the tensor of ids.
        source: Identity of the tensor that it is a view of; the ids themselves where it is none.
        address: Of the first id.
        buffer: Identity of the memory that it lies in.
        view_offset: Bytes from the start of the source, where a torch tensor is a view of it.
        dtype: Element type.
        extents: Elements.
        strides: Bytes.
        uses: How many nodes read the ids.
    """

    chain: tuple[Hashable, ...]
    ids: Hashable
    source: Hashable
    address: int
    buffer: Hashable
    view_offset: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    uses: int

    @property
    def is_proven(self) -> bool:
        """Whether something chose the ids, and nothing else can have written them."""
        return bool(self.chain) and self.uses > 0

    def differences(self, other: RouteWitness) -> tuple[str, ...]:
        """What of ``other`` is not as here, field by field; empty for equal ones."""
        return tuple(
            f"{name}: expected {mine!r}, got {theirs!r}"
            for name in self.__slots__
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        )


@dataclass(frozen=True, slots=True)
class Reader:
    """One product of a group and who reads what it writes.

    Args:
        index: Of its node.
        node: Identity of its node.
        bank: Name of the bank that it multiplies by.
        ids: Identity of the ids that it reads.
        consumers: (identity of a node, how often it reads the product), in order.
        is_observed: Whether every reader of the product was seen.
    """

    index: int
    node: Hashable
    bank: str
    ids: Hashable
    consumers: tuple[tuple[Hashable, int], ...] = ()
    is_observed: bool = True
