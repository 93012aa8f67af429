"""Leases and transactions as values, and why none is given. Frozen data.

A *lease* is the right to use groups of one generation; a *transaction* is exclusive use of groups
by one dispatch under a lease. :class:`graphcore.moe.Ownership` gives both.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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


class Passage:
    """How a dispatch that comes again and again enters: by the transaction that it had before.

    Made by :meth:`graphcore.moe.Ownership.passage`. Nobody else's, and for one thread at a time.

    Attributes:
        transaction: That is taken up again each time.
        lease: Of it.
        number: Of the lease.
        thread: That enters.
        claims: The transaction, by each of its groups; never changed in place.
        revision: Of the ownership, for as long as which it holds.
    """

    __slots__ = ("claims", "lease", "number", "revision", "thread", "transaction")

    def __init__(self, transaction: Transaction, revision: int) -> None:
        self.revision = revision
        self._take(transaction)

    def move_to(self, thread: int) -> None:
        """Another thread enters from now on."""
        lease = self.lease._replace(thread=thread)
        self._take(Transaction(self.transaction.token, lease))

    def _take(self, transaction: Transaction) -> None:
        lease = transaction.lease
        self.claims: Mapping[Hashable, Transaction] = dict.fromkeys(lease.groups, transaction)
        self.transaction, self.lease = transaction, lease
        self.number, self.thread = lease.number, lease.thread


PASSING = frozenset({RefusalReason.REPLACING, RefusalReason.MAINTENANCE})
"""Refusals that waiting may end."""
