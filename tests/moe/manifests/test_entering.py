"""A lease and exclusive use at once, waiting for groups that are free, and looks under the lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from helpers.threads import SOON, in_thread, until

from graphcore.moe.manifests.ownership import (
    MOST_TOKENS,
    Admission,
    Lease,
    Ownership,
    Passage,
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


# ---- again and again ----------------------------------------------------------------------------


def passed(ownership: Ownership, *groups: str) -> Passage:
    """The way in again of a dispatch that has left."""
    transaction = entered(ownership, *groups)
    found = ownership.passage(transaction)
    assert isinstance(found, Passage)
    ownership.leave(transaction)
    return found


def test_who_enters_again_has_what_it_had_and_others_see_it() -> None:
    ownership = Ownership(GROUPS)
    passage = passed(ownership)
    for _ in range(2):
        assert ownership.enter_again(passage)
        assert ownership.users() == {"first": 1, "second": 1}
        assert ownership.check(passage.lease) is None
        assert refused(ownership, "second") is RefusalReason.BUSY
        assert not ownership.enter_again(passage), "it is in already"
        ownership.leave(passage.transaction)
        ownership.leave(passage.transaction)
        assert (ownership.users(), ownership.is_busy("first")) == ({}, False)


def test_dispatches_of_other_groups_pass_each_other() -> None:
    ownership = Ownership(GROUPS)
    first, second = passed(ownership, "first"), passed(ownership, "second")
    both = passed(ownership)
    assert ownership.enter_again(first)
    assert ownership.enter_again(second)
    assert not ownership.enter_again(both)
    ownership.leave(first.transaction)
    assert (ownership.is_busy("first"), ownership.is_busy("second")) == (False, True)
    assert ownership.enter_again(first)
    assert set(first.claims) == {"first"}, "what is shared between entries is never changed"
    ownership.leave(second.transaction)
    ownership.leave(first.transaction)
    assert ownership.enter_again(both)
    ownership.leave(both.transaction)


def test_a_lease_that_others_hold_stays_theirs() -> None:
    ownership = Ownership(GROUPS)
    passage, lease = passed(ownership), ownership.lease("other")
    assert isinstance(lease, Lease)
    assert ownership.enter_again(passage)
    found = ownership.begin(lease)
    assert isinstance(found, Refusal)
    ownership.leave(passage.transaction)
    assert ownership.users() == {"first": 1, "second": 1}
    assert isinstance(ownership.begin(lease), Transaction)
    assert not ownership.enter_again(passage)


def a_change(ownership: Ownership) -> None:
    with ownership.changing(["second"]):
        pass


def a_manifest(ownership: Ownership) -> None:
    ownership.succeed(GROUPS, 2)


def a_shut_down(ownership: Ownership) -> None:
    ownership.set_admission(Admission.CLOSED)


def an_admission_that_opens_again(ownership: Ownership) -> None:
    ownership.set_admission(Admission.REPLACING)
    ownership.set_admission(Admission.OPEN)


CHANGES = [a_change, a_manifest, a_shut_down, an_admission_that_opens_again]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_who_may_enter_ends_a_passage(
    change: Callable[[Ownership], None],
) -> None:
    ownership = Ownership(GROUPS)
    passage = passed(ownership)
    change(ownership)
    assert not ownership.enter_again(passage)
    assert ownership.users() == {}


def test_nobody_is_let_in_again_past_a_change_that_waits() -> None:
    ownership = Ownership(GROUPS)
    transaction = entered(ownership)
    before = ownership.passage(transaction)
    assert before is not None
    with in_thread(lambda: ownership.changing(["first"], timeout=SOON).__enter__()) as waits:
        until(ownership.is_changing)
        assert ownership.passage(transaction) is None
        assert not ownership.enter_again(before)
        ownership.leave(transaction)
        until(lambda: bool(waits))
    assert waits == [None]
    assert not ownership.enter_again(before)


def test_another_thread_enters_again_under_its_own_name() -> None:
    ownership = Ownership(GROUPS)
    passage = passed(ownership)
    with in_thread(lambda: ownership.enter_again(passage)) as found:
        pass
    assert found == [True]
    assert passage.lease.thread != threading.get_ident()
    ownership.abandon("me")
    assert ownership.users() == {"first": 1, "second": 1}, "it is not this thread's"
    ownership.leave(passage.transaction)
    assert ownership.enter_again(passage)
    assert passage.lease.thread == threading.get_ident()
    ownership.abandon("me")
    assert (ownership.users(), ownership.is_busy("first")) == ({}, False)


def test_whoever_waits_is_told_when_one_leaves_that_entered_again() -> None:
    ownership = Ownership(GROUPS)
    passage = passed(ownership)
    assert ownership.enter_again(passage)
    with in_thread(lambda: ownership.wait_until_free(GROUPS, SOON)) as waited:
        until(lambda: ownership._changed.waiting == 1)
        ownership.leave(passage.transaction)
    assert waited == [True]
