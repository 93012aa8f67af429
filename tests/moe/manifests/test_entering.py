"""A lease and exclusive use at once, waiting for groups that are free, and looks under the lock."""

from __future__ import annotations

import threading
import time

from helpers.threads import SOON, in_thread, until

from graphcore.moe.manifests.ownership import (
    MOST_TOKENS,
    Admission,
    Lease,
    Ownership,
    Refusal,
    RefusalReason,
    Transaction,
)

GROUPS = ("first", "second")


def entered(ownership: Ownership, *groups: str) -> Transaction:
    found = ownership.enter("me", groups or GROUPS, ownership.generation)
    assert isinstance(found, Transaction)
    return found


def refused(ownership: Ownership, *groups: str, generation: int = 1) -> RefusalReason:
    found = ownership.enter("other", groups or GROUPS, generation)
    assert isinstance(found, Refusal)
    return found.reason


def test_who_enters_has_a_lease_and_exclusive_use_until_it_leaves() -> None:
    ownership = Ownership(GROUPS)
    transaction = entered(ownership)
    assert ownership.users() == {"first": 1, "second": 1}
    assert ownership.check(transaction.lease) is None
    assert transaction.lease.epochs == (("first", 1), ("second", 1))
    assert refused(ownership, "second") is RefusalReason.BUSY
    assert ownership.users() == {"first": 1, "second": 1}
    ownership.leave(transaction)
    ownership.leave(transaction)
    assert ownership.users() == {}
    ownership.leave(entered(ownership, "second"))


def test_entering_is_refused_as_a_lease_is() -> None:
    ownership = Ownership(GROUPS)
    assert refused(ownership, "third") is RefusalReason.UNKNOWN_GROUP
    assert refused(ownership, generation=2) is RefusalReason.GENERATION
    for admission in (Admission.REPLACING, Admission.DRAINING, Admission.CLOSED):
        ownership.set_admission(admission)
        assert refused(ownership).name == admission.name
    ownership.set_admission(Admission.OPEN)
    with ownership.changing(["first"]):
        assert refused(ownership) is RefusalReason.MAINTENANCE
        ownership.leave(entered(ownership, "second"))
    assert ownership.users() == {}


def test_a_token_is_never_given_twice() -> None:
    ownership = Ownership(GROUPS, first_token=MOST_TOKENS)
    ownership.leave(entered(ownership))
    assert refused(ownership) is RefusalReason.EXHAUSTED


def test_what_enters_and_what_begins_exclude_each_other() -> None:
    ownership = Ownership(GROUPS)
    lease = ownership.lease("other")
    assert isinstance(lease, Lease)
    transaction = ownership.begin(lease)
    assert isinstance(transaction, Transaction)
    assert refused(ownership) is RefusalReason.BUSY
    ownership.finish(transaction)
    mine = entered(ownership)
    found = ownership.begin(lease)
    assert isinstance(found, Refusal)
    assert found.reason is RefusalReason.BUSY
    ownership.leave(mine)


def test_groups_are_waited_for_until_their_dispatch_leaves() -> None:
    ownership = Ownership(GROUPS)
    transaction = entered(ownership)
    with in_thread(lambda: ownership.wait_until_free(GROUPS, 0.01)) as waited:
        until(lambda: bool(waited))
    assert waited == [False]
    with in_thread(lambda: ownership.wait_until_free(GROUPS, SOON)) as waited:
        ownership.leave(transaction)
    assert waited == [True]


def test_a_dispatch_of_this_very_thread_is_not_waited_for() -> None:
    ownership = Ownership(GROUPS)
    transaction = entered(ownership)
    assert not ownership.wait_until_free(["first"], SOON)
    ownership.leave(transaction)
    assert ownership.wait_until_free(["first"], 0)


def test_nothing_changes_while_somebody_looks() -> None:
    ownership, looking = Ownership(GROUPS), threading.Event()

    def change() -> None:
        looking.wait(SOON)
        ownership.set_admission(Admission.REPLACING)

    with in_thread(change):
        with ownership.locked():
            looking.set()
            time.sleep(0.02)
            assert ownership.admission is Admission.OPEN
            # whoever holds the lock may go on with it
            ownership.leave(entered(ownership))
        until(lambda: ownership.admission is Admission.REPLACING)


def test_what_an_interrupt_left_is_given_back_by_its_owner_and_thread_alone() -> None:
    ownership = Ownership(GROUPS)
    entered(ownership, "first")
    other = ownership.lease("other", ["second"])
    assert isinstance(other, Lease)
    with in_thread(lambda: ownership.abandon("me")):
        pass
    assert ownership.users() == {"first": 1, "second": 1}
    ownership.abandon("me")
    assert ownership.users() == {"second": 1}
    assert not ownership.is_busy("first")
