"""Fingerprint: what a graph depends on, as ordered typed fields and one digest.

Pointers and launch shapes, kernel identities, operands and edges count. Contents of memory and the
driver's handles never do, so the same capture made twice has the same fingerprint as long as it
touches the same memory; any single change makes another one, and :meth:`Fingerprint.compare` says
in words which. Memory that the capture made for itself counts by order. A constant that the
emulated driver records (``torch.tensor([...])`` in a step) is part of the graph, so its values do.

What cannot be seen is not in it: a foreign host callback's user data, a tensor freed and allocated
again inside a segment that another library's allocator keeps (owners cover that), and, on a device,
the values other than pointers inside structures that other libraries' kernels take, because their
padding is never initialised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from graphcore.driver.api import Driver
from graphcore.graph.snapshot import GraphSnapshot, snapshot_of
from graphcore.resources.comparison import compare_groups
from graphcore.resources.dependencies import Owned, Surroundings, dependencies
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.fields import Field, Group
from graphcore.resources.lifetime import Owner


class ReadableGraph(Protocol):
    """A graph that can be read: :class:`graphcore.Graph`."""

    @property
    def driver(self) -> Driver: ...

    def snapshot(self) -> GraphSnapshot: ...

    def private_memory(self) -> list[tuple[int, int]]: ...


@dataclass(frozen=True, slots=True, repr=False)
class Fingerprint:
    """The fields in order, node by node, and their digest (32 hex digits)."""

    groups: tuple[Group, ...]
    digest: str

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every field, with the node it belongs to in words."""
        return tuple(
            Field(group.where, name, value) for group in self.groups for name, value in group.values
        )

    def __repr__(self) -> str:
        return f"<Fingerprint {self.digest}, {len(self.groups)} parts>"

    def compare(self, other: Fingerprint) -> list[str]:
        """What differs, one sentence a field; empty exactly where the digests are equal.

        Nodes are aligned by likeness, in order: a node that only one graph has is told as one.
        """
        if self.digest == other.digest:
            return []
        return list(compare_groups(self.groups, other.groups))

    def __str__(self) -> str:
        return self.digest


def fingerprint(
    graph: ReadableGraph | GraphSnapshot,
    names: Mapping[str, Any] | None = None,
    *,
    driver: Driver | None = None,
    private: Iterable[tuple[int, int]] | None = None,
) -> Fingerprint:
    """The fingerprint of a graph.

    Args:
        graph: A graph, or the snapshot of one.
        names: Name -> tensor, buffer or (address, bytes): pointers into these count as name and
            offset, so that a graph over other memory of the same names is the same.
        driver: Where ``graph`` is a snapshot: whom to ask for the allocation of other pointers;
            None lets their bare addresses count.
        private: (address, bytes) of memory that belongs to the graph alone, such as its pool:
            counts by order, not by address, where no name holds it. None: what the graph itself
            knows of; a snapshot knows of none.

    Raises:
        CacheTypeError: ``graph`` is neither, or a named object is no tensor, no buffer and no
            (address, bytes).
        ConfigurationError: ``names`` is no mapping, or ``driver`` no driver.
    """
    snapshot = snapshot_of(graph)
    owned: tuple[Owned, ...] = ()
    blocks = None
    if not isinstance(graph, GraphSnapshot):
        driver = graph.driver
        private = graph.private_memory() if private is None else private
        owned = tuple(_owned(getattr(graph, "owners", ())))
        blocks = getattr(graph, "pool_blocks", lambda: None)()
    elif driver is not None:
        checked_driver(driver)
    around = Surroundings(
        names={} if names is None else names,
        driver=driver,
        private=() if private is None else private,
        owned=owned,
        blocks=blocks,
    )
    return Fingerprint(*dependencies(snapshot, around))


def _owned(owners: Iterable[Owner]) -> Iterator[Owned]:
    for owner in owners:
        if owner.record is not None and owner.label:
            tensor = owner.record.tensor
            yield Owned(owner.label, tensor.address, tensor.nbytes, tensor.dtype)
