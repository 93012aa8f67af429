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
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, Protocol

from graphcore.driver.api import Driver
from graphcore.graph.snapshot import GraphSnapshot, snapshot_of
from graphcore.resources.dependencies import Field, dependencies, words_of
from graphcore.resources.driver_argument import checked_driver


class ReadableGraph(Protocol):
    """A graph that can be read: :class:`graphcore.Graph`."""

    @property
    def driver(self) -> Driver: ...

    def snapshot(self) -> GraphSnapshot: ...

    def private_memory(self) -> list[tuple[int, int]]: ...


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fields in order, and their digest (32 hex digits)."""

    fields: tuple[Field, ...]
    digest: str

    def compare(self, other: Fingerprint) -> list[str]:
        """What differs, one sentence a field; empty exactly where the digests are equal."""
        if self.digest == other.digest:
            return []
        mine, theirs = _by_node(self.fields), _by_node(other.fields)
        lines = []
        for before, after in zip_longest(mine.values(), theirs.values()):
            if before is None:
                lines.append(f"{after[0].where}: only the second graph has it")
            elif after is None:
                lines.append(f"{before[0].where}: only the first graph has it")
            else:
                lines.extend(_compare_node(before, after))
        return lines

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
    if not isinstance(graph, GraphSnapshot):
        driver = graph.driver
        private = graph.private_memory() if private is None else private
    elif driver is not None:
        checked_driver(driver)
    named = {} if names is None else names
    fields = tuple(dependencies(snapshot, named, driver, () if private is None else private))
    digest = blake2b(digest_size=16)
    for field in fields:
        digest.update(repr((field.where, field.field, field.value)).encode() + b"\n")
    return Fingerprint(fields, digest.hexdigest())


def _by_node(fields: tuple[Field, ...]) -> dict[str, list[Field]]:
    """Fields by node; the key leaves out the name, so that another kernel is a change, not two."""
    result: dict[str, list[Field]] = {}
    for field in fields:
        result.setdefault(field.where.partition(" (")[0], []).append(field)
    return result


def _compare_node(before: list[Field], after: list[Field]) -> Iterator[str]:
    old = {field.field: field.value for field in before}
    new = {field.field: field.value for field in after}
    for name in {**old, **new}:
        if name not in new:
            yield f"{before[0].where}: {name} was {words_of(old[name])}, is gone"
        elif name not in old:
            yield f"{before[0].where}: {name} is new: {words_of(new[name])}"
        elif old[name] != new[name]:
            yield f"{before[0].where}: {name} was {words_of(old[name])}, is {words_of(new[name])}"
