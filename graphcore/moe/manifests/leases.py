"""Leases and transactions as values, and why none is given. Frozen data.

A *lease* is the right to use groups of one generation; a *transaction* is exclusive use of groups
by one dispatch under a lease. :class:`graphcore.moe.Ownership` gives both.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Admission(Enum):
    """Whether leases are given out."""

    OPEN = "open"
    REPLACING = "the manifest is being replaced"
    DRAINING = "expert caching is shutting down"
    CLOSED = "expert caching was shut down"


class RefusalReason(Enum):
    """Why no lease or no transaction is given, or why one does not hold any more."""

    REPLACING = "the manifest is being replaced"
    DRAINING = "expert caching is shutting down"
    CLOSED = "expert caching was shut down"
    MAINTENANCE = "the group is being changed"
    UNKNOWN_GROUP = "no such group"
    GENERATION = "another generation"
    EPOCH = "the group was changed since"
    RELEASED = "the lease was given back"
    BUSY = "another dispatch uses the group"
    EXHAUSTED = "no transaction number is left"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is not given, with what it is about."""

    reason: RefusalReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


class Lease(NamedTuple):
    """The right to use groups: of one owner, in one generation, at one epoch of each group.

    Args:
        number: Unique among those that were ever given.
        owner: Whoever asked.
        generation: Of the manifest.
        epochs: (group, epoch) of each.
        thread: That it was given to.
    """

    number: int
    owner: Hashable
    generation: int
    epochs: tuple[tuple[Hashable, int], ...]
    thread: int

    @property
    def groups(self) -> tuple[Hashable, ...]:
        """The groups that may be used."""
        return tuple(group for group, _ in self.epochs)


class Transaction(NamedTuple):
    """Exclusive use of the groups of ``lease`` by one dispatch."""

    token: int
    lease: Lease


PASSING = frozenset({RefusalReason.REPLACING, RefusalReason.MAINTENANCE})
"""Refusals that waiting may end."""
