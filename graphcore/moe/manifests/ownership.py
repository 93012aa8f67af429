"""Ownership: who uses which groups now, and when a group may be changed.

A *lease* is the right to use groups of one generation; a *transaction* is exclusive use of groups
by one dispatch under a lease. Changing groups closes admission to them, waits until nobody uses
them and advances their epoch, so that a lease from before is known to be one. Safe for threads; the
lock is that of the manifest, which is the one locked object.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.moe.manifests.changes import Changes
from graphcore.moe.manifests.leases import (
    PASSING,
    Admission,
    Lease,
    Passage,
    Refusal,
    RefusalReason,
    Transaction,
)

__all__ = [
    "MOST_TOKENS",
    "Admission",
    "Lease",
    "Ownership",
    "Passage",
    "Refusal",
    "RefusalReason",
    "Transaction",
]

MOST_TOKENS = 2**64 - 1

_NOBODY: Mapping[Hashable, Transaction] = {}
_thread = threading.get_ident  # for what every step of a model does


class Ownership:
    """Leases, transactions and epochs of groups.

    Args:
        groups: Their names.
        generation: Of the manifest that they are of.
        changes: The lock to use, and what is told of every change; None makes one.
        first_token: Of transactions; none is given twice.

    Attributes:
        revision: Another number after everything that decides who may enter: a change of groups
            that begins, another manifest, admission that opens or closes.
    """

    def __init__(
        self,
        groups: Iterable[Hashable] = (),
        *,
        generation: int = 1,
        changes: Changes | None = None,
        first_token: int = 1,
    ) -> None:
        self._changed = Changes() if changes is None else changes
        self._lock = self._changed.lock
        self._epochs: dict[Hashable, int] = dict.fromkeys(groups, 1)
        self._generation = generation
        self._admission = Admission.OPEN
        self._changing: dict[Hashable, int] = {}  # group -> thread that changes it
        self._leases: dict[int, Lease] = {}
        # made anew at each change, so that those of a passage are put there as they are
        self._transactions: Mapping[Hashable, Transaction] = _NOBODY
        self.revision = 0
        self._next_lease = 1
        self._next_token = first_token

    @property
    def admission(self) -> Admission:
        """Whether leases are given out."""
        return self._admission

    @property
    def generation(self) -> int:
        """Of the manifest that the groups are of."""
        return self._generation

    def epoch(self, group: Hashable) -> int:
        """How often ``group`` was changed, from 1.

        Raises:
            ConfigurationError: There is no such group.
        """
        with self._changed:
            if group not in self._epochs:
                raise ConfigurationError(
                    f"group: expected one of {list(self._epochs)}, got {group!r}"
                )
            return self._epochs[group]

    def users(self) -> dict[Hashable, int]:
        """How many leases of each group are out; groups that nobody uses are left out."""
        with self._changed:
            return dict(self._count_users())

    def _count_users(self) -> Counter[Hashable]:
        return Counter(group for lease in self._leases.values() for group in lease.groups)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A block in which nothing changes here, and no manifest is published.

        For a last look between what was decided and what begins; keep it short.
        """
        with self._changed:
            yield

    # ---- leases ---------------------------------------------------------------------------------

    def lease(
        self,
        owner: Hashable,
        groups: Iterable[Hashable] | None = None,
        *,
        generation: int | None = None,
        wait_seconds: float = 0.0,
    ) -> Lease | Refusal:
        """The right to use ``groups``, or why not.

        Args:
            owner: Whoever asks.
            groups: None: all.
            generation: That the owner works with; None: whichever is current.
            wait_seconds: How long to wait while admission is closed for a change; 0: not at all.
        """
        wanted = None if groups is None else tuple(groups)
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while True:
                names = tuple(self._epochs) if wanted is None else wanted
                refusal = self._refusal(names, generation)
                left = deadline - time.monotonic()
                if refusal is None or refusal.reason not in PASSING or left <= 0:
                    break
                self._changed.wait(left)
            if refusal is not None:
                return refusal
            lease = Lease(
                self._next_lease,
                owner,
                self._generation,
                tuple((group, self._epochs[group]) for group in names),
                threading.get_ident(),
            )
            self._next_lease += 1
            self._leases[lease.number] = lease
            return lease

    def _refusal(self, groups: tuple[Hashable, ...], generation: int | None) -> Refusal | None:
        if self._admission is not Admission.OPEN:
            return Refusal(RefusalReason[self._admission.name])
        if generation is not None and generation != self._generation:
            return Refusal(
                RefusalReason.GENERATION, f"expected {self._generation}, got {generation}"
            )
        for group in groups:
            if group not in self._epochs:
                return Refusal(RefusalReason.UNKNOWN_GROUP, str(group))
            if group in self._changing:
                return Refusal(RefusalReason.MAINTENANCE, str(group))
        return None

    def release(self, lease: Lease) -> None:
        """Gives ``lease`` back, and the transaction under it; a second time does nothing."""
        with self._changed:
            self._changed.tell()
            self._drop_transactions(lease)
            self._leases.pop(lease.number, None)  # at last: what Ctrl-C left is found by its lease

    @contextmanager
    def held(
        self,
        owner: Hashable,
        groups: Iterable[Hashable] | None = None,
        *,
        generation: int | None = None,
        wait_seconds: float = 0.0,
    ) -> Iterator[Lease]:
        """A lease for a block; arguments as of :meth:`lease`.

        Raises:
            LifecycleError: It is refused.
        """
        lease = self.lease(owner, groups, generation=generation, wait_seconds=wait_seconds)
        if isinstance(lease, Refusal):
            raise LifecycleError(f"lease: {lease}")
        try:
            yield lease
        finally:
            self.release(lease)

    def check(self, lease: Lease) -> Refusal | None:
        """Why ``lease`` does not hold any more; None where it does."""
        with self._changed:
            return self._check(lease)

    def _check(self, lease: Lease) -> Refusal | None:
        if lease.generation != self._generation:
            detail = f"expected {self._generation}, got {lease.generation}"
            return Refusal(RefusalReason.GENERATION, detail)
        for group, epoch in lease.epochs:
            now = self._epochs.get(group)
            if now != epoch:
                return Refusal(RefusalReason.EPOCH, f"{group}: expected {now}, got {epoch}")
        if self._leases.get(lease.number) != lease:
            return Refusal(RefusalReason.RELEASED)
        return None

    # ---- transactions ---------------------------------------------------------------------------

    def begin(self, lease: Lease) -> Transaction | Refusal:
        """Exclusive use of all groups of ``lease``, or of none and why.

        It may begin while a change waits: who has a lease may finish.
        """
        with self._changed:
            refusal = self._check(lease)
            if refusal is not None:
                return refusal
            taken = [group for group in lease.groups if group in self._transactions]
            if taken:
                return Refusal(RefusalReason.BUSY, str(taken[0]))
            if self._next_token > MOST_TOKENS:
                return Refusal(RefusalReason.EXHAUSTED)
            transaction = Transaction(self._next_token, lease)
            self._next_token += 1
            claims = dict.fromkeys(lease.groups, transaction)
            self._transactions = {**self._transactions, **claims}
            return transaction

    def finish(self, transaction: Transaction) -> None:
        """Ends ``transaction``; a second time does nothing."""
        with self._changed:
            self._drop_transactions(transaction.lease)
            self._changed.tell()

    def _drop_transactions(self, lease: Lease) -> None:
        self._transactions = {
            group: found
            for group, found in self._transactions.items()
            if found.lease.number != lease.number
        }

    def enter(
        self, owner: Hashable, groups: tuple[Hashable, ...], generation: int
    ) -> Transaction | Refusal:
        """A lease and exclusive use under it at once, or neither and why; :meth:`leave` ends both.

        Arguments as of :meth:`lease`, without waiting.
        """
        with self._changed:
            lease = self.lease(owner, groups, generation=generation)
            if isinstance(lease, Refusal):
                return lease
            transaction = self.begin(lease)
            if isinstance(transaction, Refusal):
                self.release(lease)
            return transaction

    def passage(self, transaction: Transaction) -> Passage | None:
        """How whoever is in by ``transaction``, of :meth:`enter`, enters again.

        None where a change waits for it to leave, so that it would not be let in now.
        """
        lease = transaction.lease
        with self._changed:
            refusal = self._check(lease) or self._refusal(lease.groups, lease.generation)
            return None if refusal else Passage(transaction, self.revision)

    def enter_again(self, passage: Passage) -> bool:
        """Takes the transaction of ``passage`` up once more; :meth:`leave` ends it.

        False where another dispatch uses its groups, or what decides who may enter has changed
        since it was made: then nothing was taken, and :meth:`enter` says what holds.
        """
        with self._lock:
            if passage.revision != self.revision:
                return False
            if passage.thread != _thread():
                passage.move_to(_thread())
            claims, others = passage.claims, self._transactions
            if others:
                if not others.keys().isdisjoint(claims):
                    return False
                claims = {**others, **claims}
            self._leases[passage.number] = passage.lease
            self._transactions = claims
            return True

    def leave(self, transaction: Transaction) -> None:
        """Ends what :meth:`enter` began; a second time does nothing."""
        lease, leases = transaction.lease, self._leases
        number = lease.number
        with self._lock:
            if number not in leases:
                return
            if self._changed.waiting:
                self._changed.notify_all()
            if len(leases) == 1:  # there is nobody else whose transactions could be
                self._transactions = _NOBODY
            else:
                self._drop_transactions(lease)
            del leases[number]  # at last: what Ctrl-C left is found by its lease

    def abandon(self, owner: Hashable) -> None:
        """Gives back all that ``owner`` has on this thread: for after an interrupt."""
        with self._changed:
            for lease in [*self._leases.values()]:
                if (lease.owner, lease.thread) == (owner, threading.get_ident()):
                    self.release(lease)

    def wait_until_free(self, groups: Iterable[Hashable], timeout: float) -> bool:
        """Waits until no dispatch uses ``groups`` and none is being changed; False in vain.

        Whether it stays so is what :meth:`enter` says. A dispatch of this thread is not waited for.
        """
        names, passing = set(groups), (Admission.REPLACING, Admission.DRAINING)

        def is_free() -> bool:
            used = names & {*self._changing, *self._transactions}
            return not used and self._admission not in passing

        with self._changed:
            held = [self._transactions[name] for name in names if name in self._transactions]
            if any(each.lease.thread == threading.get_ident() for each in held):
                return False
            return self._changed.wait_for(is_free, timeout)

    def is_busy(self, group: Hashable) -> bool:
        """Whether a dispatch uses ``group`` now."""
        with self._changed:
            return group in self._transactions

    # ---- changes --------------------------------------------------------------------------------

    @contextmanager
    def changing(
        self, groups: Iterable[Hashable], *, timeout: float | None = None
    ) -> Iterator[None]:
        """A block in which nobody uses ``groups``: admission is closed, users are waited for.

        Behind it their epoch is advanced, whether the block succeeded or not.

        Raises:
            LifecycleError: Still in use after ``timeout`` seconds, in use by this thread (which
                would wait for itself), or being changed already; nothing changed.
            ConfigurationError: There is no such group.
        """
        names = set(groups)
        with self._changed:
            unknown = sorted(str(name) for name in names - set(self._epochs))
            if unknown:
                raise ConfigurationError(f"groups: expected {list(self._epochs)}, got {unknown}")
            if names & set(self._changing) or self._admission is not Admission.OPEN:
                raise LifecycleError("changing: the groups are being changed already")
            self.revision += 1
            self._changing.update(dict.fromkeys(names, threading.get_ident()))
            try:
                if not self.wait_idle(timeout, names):
                    raise LifecycleError(f"changing: still in use after {timeout} s")
            except BaseException:
                self._reopen(names)
                raise
        try:
            yield
        finally:
            with self._changed:
                for name in names:
                    self._epochs[name] += 1
                self._reopen(names)

    def _reopen(self, names: set[Hashable]) -> None:
        for name in names:
            del self._changing[name]
        self._changed.tell()

    def is_changing(self) -> bool:
        """Whether any group is being changed.

        Raises:
            LifecycleError: By this thread, which is about to wait for the end of it.
        """
        with self._changed:
            if threading.get_ident() in self._changing.values():
                raise LifecycleError("this thread is changing a group and would wait for itself")
            return bool(self._changing)

    def set_admission(self, admission: Admission) -> None:
        """Opens or closes admission to all groups; leases that are out hold on."""
        with self._changed:
            self.revision += 1
            self._admission = admission
            self._changed.tell()

    def wait_idle(self, timeout: float | None, groups: set[Hashable] | None = None) -> bool:
        """Waits until nobody has a lease of ``groups`` (None: of any); False after ``timeout`` s.

        Raises:
            LifecycleError: This thread has one, and would wait for itself.
        """

        def using() -> list[Lease]:
            leases = self._leases.values()
            return [each for each in leases if groups is None or groups & set(each.groups)]

        with self._changed:
            mine = [lease for lease in using() if lease.thread == threading.get_ident()]
            if mine:
                raise LifecycleError(
                    f"this thread has a lease (of {mine[0].owner!r}) and would wait for itself; "
                    "release it first"
                )
            return self._changed.wait_for(lambda: not using(), timeout)

    def succeed(self, groups: Iterable[Hashable], generation: int) -> None:
        """Takes the groups of another manifest; epochs of groups that stay go on.

        Raises:
            LifecycleError: A lease is still out.
        """
        with self._changed:
            if self._leases:
                raise LifecycleError("succeed: leases of the old manifest are still out")
            self.revision += 1
            self._epochs = {name: self._epochs.get(name, 0) + 1 for name in groups}
            self._generation = generation
            self._changed.tell()
