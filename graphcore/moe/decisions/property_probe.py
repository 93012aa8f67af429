"""The property probe: whether the nodes of a graph are what they were at the last call.

An equal uid says so at once; else every node is compared, so that a pointer, a shape or a parameter
that changed anywhere is found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum

Records = tuple[Hashable, ...]
"""All that a graph says of each node: operation, addresses, types, extents, strides, parameters."""


class Probe(Enum):
    """What a look at the nodes found."""

    FIRST = "nothing to compare with"
    SAME_UID = "the same graph"
    SAME = "the same nodes"
    SEMANTICS = "another meaning"
    COUNT = "another number of nodes"
    CHANGED = "a node changed"

    @property
    def is_same(self) -> bool:
        """Whether what was captured of the graph still is the graph."""
        return self in (Probe.SAME, Probe.SAME_UID)


@dataclass(frozen=True, slots=True)
class Properties:
    """What an entry knows of the graph that it last saw.

    Args:
        uid: Of the graph; 0: look at the nodes.
        semantic_key: Of its certificate; 0 without a valid one.
        records: Of its nodes, in order.
    """

    uid: int
    semantic_key: int
    records: Records

    def without_uid(self) -> Properties:
        """The same, to be looked at the next time."""
        return Properties(0, self.semantic_key, self.records)


@dataclass(frozen=True, slots=True)
class Probed:
    """What a look found; ``properties`` are those of now, for the next one."""

    probe: Probe
    properties: Properties
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.probe.value}: {self.detail}" if self.detail else self.probe.value


def probe(
    before: Properties | None, uid: int, semantic_key: int, read: Callable[[], Records]
) -> Probed:
    """Compares a graph with what an entry knows.

    Args:
        before: What the entry knows; None: nothing.
        uid: Of the graph that is about to run; 0: none, so its nodes are compared.
        semantic_key: Of its certificate; 0 without a valid one.
        read: Reads the records of its nodes; not called where the uid tells.
    """
    if before is None:
        return Probed(Probe.FIRST, Properties(uid, semantic_key, read()))
    is_same_meaning = before.semantic_key == semantic_key
    if uid and uid == before.uid and is_same_meaning:
        return Probed(Probe.SAME_UID, before)
    now = Properties(uid, semantic_key, read())
    if not is_same_meaning:
        detail = f"expected semantic key {before.semantic_key:#x}, got {semantic_key:#x}"
        return Probed(Probe.SEMANTICS, now, detail)
    if len(before.records) != len(now.records):
        detail = f"expected {len(before.records)} nodes, got {len(now.records)}"
        return Probed(Probe.COUNT, now, detail)
    pairs = enumerate(zip(before.records, now.records, strict=True))
    changed = next((at for at, (old, new) in pairs if old != new), None)
    if changed is None:
        return Probed(Probe.SAME, now)
    detail = f"node {changed}: expected {before.records[changed]!r}, got {now.records[changed]!r}"
    return Probed(Probe.CHANGED, now, detail)
