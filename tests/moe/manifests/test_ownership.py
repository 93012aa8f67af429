"""Who may use groups of experts when: leases, exclusive dispatches, changes that wait; threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.threads import SOON, in_thread, until

from graphcore import ConfigurationError, LifecycleError
from graphcore.moe.manifests.ownership import (
    MOST_TOKENS,
    Admission,
    Lease,
    Ownership,
    Refusal,
    RefusalReason,
    Transaction,
)

R = RefusalReason


def three() -> Ownership:
    return Ownership(["a", "b", "c"], generation=5)


def leased(ownership: Ownership, *groups: str, owner: str = "step") -> Lease:
    lease = ownership.lease(owner, groups or None)
    assert isinstance(lease, Lease)
    return lease


def test_a_lease_says_of_which_groups_generation_and_epochs_it_is() -> None:
    ownership = three()
    lease = leased(ownership, "a", "b")
    assert (lease.owner, lease.groups, lease.generation) == ("step", ("a", "b"), 5)
    assert lease.epochs == (("a", 1), ("b", 1))
    assert ownership.check(lease) is None
    assert ownership.users() == {"a": 1, "b": 1}
    ownership.release(lease)
    assert ownership.users() == {}
    assert ownership.check(lease) == Refusal(R.RELEASED)
    ownership.release(lease)
    assert ownership.users() == {}


def test_several_owners_share_a_group_and_no_two_leases_are_equal() -> None:
    ownership = three()
    leases = {leased(ownership), leased(ownership), leased(ownership, "a")}
    assert len(leases) == 3
    assert ownership.users() == {"a": 3, "b": 2, "c": 2}


@contextmanager
def being_changed(ownership: Ownership):
    with ownership.changing(["a"]):
        yield


@contextmanager
def with_admission(ownership: Ownership, admission: Admission):
    ownership.set_admission(admission)
    yield


REFUSED: dict[str, tuple[Callable[[Ownership], Any], dict[str, Any], Refusal]] = {
    **{
        admission.name: (
            lambda ownership, admission=admission: with_admission(ownership, admission),
            {},
            Refusal(RefusalReason[admission.name]),
        )
        for admission in (Admission.REPLACING, Admission.DRAINING, Admission.CLOSED)
    },
    "a group being changed": (being_changed, {"groups": ["b", "a"]}, Refusal(R.MAINTENANCE, "a")),
    "every group, one of them being changed": (being_changed, {}, Refusal(R.MAINTENANCE, "a")),
    "a group that is not there": (
        lambda ownership: with_admission(ownership, Admission.OPEN),
        {"groups": ["d"]},
        Refusal(R.UNKNOWN_GROUP, "d"),
    ),
    "another generation": (
        lambda ownership: with_admission(ownership, Admission.OPEN),
        {"generation": 4},
        Refusal(R.GENERATION, "expected 5, got 4"),
    ),
}


@pytest.mark.parametrize(("around", "arguments", "refusal"), REFUSED.values(), ids=REFUSED)
def test_a_lease_is_refused_with_its_reason(
    around: Callable[[Ownership], Any], arguments: dict[str, Any], refusal: Refusal
) -> None:
    ownership = three()
    with around(ownership):
        assert ownership.lease("late", **arguments) == refusal
        with (
            pytest.raises(LifecycleError, match=f"lease: {refusal}"),
            ownership.held("late", **arguments),
        ):
            pytest.fail("not reached")
    assert ownership.users() == {}


def test_a_group_that_is_not_being_changed_may_be_used_meanwhile() -> None:
    ownership = three()
    with being_changed(ownership):
        assert ownership.users() == {}
        assert ownership.check(leased(ownership, "b")) is None


def test_a_held_lease_is_given_back_when_the_block_fails() -> None:
    ownership = three()

    def block() -> None:
        with ownership.held("step"):
            assert ownership.users() == {"a": 1, "b": 1, "c": 1}
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert ownership.users() == {}


# ---- changes ------------------------------------------------------------------------------------


def test_a_lease_from_before_a_change_is_known_by_its_epoch() -> None:
    ownership = three()
    old = leased(ownership, "a")
    ownership.release(old)
    with ownership.changing(["a"]):
        pass
    assert ownership.check(old) == Refusal(R.EPOCH, "a: expected 2, got 1")
    assert ownership.begin(old) == Refusal(R.EPOCH, "a: expected 2, got 1")
    assert (ownership.epoch("a"), ownership.epoch("b")) == (2, 1)
    assert leased(ownership, "a").epochs == (("a", 2),)


def test_a_change_that_failed_advances_the_epoch_too() -> None:
    ownership = three()

    def change() -> None:
        with ownership.changing(["a"]):
            raise MemoryError

    with pytest.raises(MemoryError):
        change()
    assert ownership.epoch("a") == 2
    assert leased(ownership, "a")


def test_a_change_waits_for_users_and_newcomers_are_refused_meanwhile() -> None:
    ownership = three()
    lease = leased(ownership, "a")

    def change() -> str:
        with ownership.changing(["a"], timeout=SOON):
            return f"users {ownership.users()}"

    with in_thread(change) as result:
        until(lambda: ownership.lease("new", ["a"]) == Refusal(R.MAINTENANCE, "a"))
        assert result == []
        assert isinstance(ownership.begin(lease), Transaction)  # who has a lease may finish
        ownership.release(lease)
    assert result == ["users {}"]


def test_a_newcomer_may_wait_for_the_end_of_a_change() -> None:
    ownership = three()
    begun, end = threading.Event(), threading.Event()

    def change() -> None:
        with ownership.changing(["a"]):
            begun.set()
            end.wait(SOON)

    with in_thread(change):
        begun.wait(SOON)
        with in_thread(lambda: ownership.lease("new", ["a"], wait_seconds=SOON)) as result:
            time.sleep(0.02)
            assert result == []
            end.set()
    assert isinstance(result[0], Lease)
    assert result[0].epochs == (("a", 2),)


def test_a_newcomer_stops_waiting_when_its_time_is_over() -> None:
    ownership = three()
    ownership.set_admission(Admission.REPLACING)
    begin = time.monotonic()
    assert ownership.lease("new", wait_seconds=0.05) == Refusal(R.REPLACING)
    assert time.monotonic() - begin >= 0.05


def test_a_newcomer_does_not_wait_for_what_time_cannot_end() -> None:
    ownership = three()
    begin = time.monotonic()
    assert ownership.lease("new", ["d"], wait_seconds=SOON) == Refusal(R.UNKNOWN_GROUP, "d")
    assert time.monotonic() - begin < SOON / 2


def test_a_change_gives_up_when_users_stay_and_has_changed_nothing() -> None:
    ownership = three()
    with in_thread(lambda: leased(ownership, "a")) as lease:
        pass
    with (
        pytest.raises(LifecycleError, match=r"still in use after 0\.01 s"),
        ownership.changing(["a"], timeout=0.01),
    ):
        pytest.fail("not reached")
    assert ownership.epoch("a") == 1
    assert ownership.check(lease[0]) is None
    assert leased(ownership, "a")


def test_a_thread_that_would_wait_for_itself_is_told() -> None:
    ownership = three()
    leased(ownership, "a", owner="me")
    with (
        pytest.raises(LifecycleError, match=r"lease.*'me'.*wait for itself"),
        ownership.changing("a"),
    ):
        pytest.fail("not reached")
    with ownership.changing("b"):  # that one it does not use
        pass
    assert ownership.epoch("a") == 1


def test_a_group_is_changed_by_one_at_a_time() -> None:
    ownership = three()
    with ownership.changing(["a"]):
        with (
            pytest.raises(LifecycleError, match="changed already"),
            ownership.changing(["a", "b"]),
        ):
            pytest.fail("not reached")
        with ownership.changing(["b"]):
            pass
    assert [ownership.epoch(name) for name in "abc"] == [2, 2, 1]


@pytest.mark.parametrize("ask", [lambda o: o.epoch("d"), lambda o: o.changing(["d"]).__enter__()])
def test_an_unknown_group_is_refused_by_name(ask: Callable[[Ownership], Any]) -> None:
    with pytest.raises(ConfigurationError, match="'d'"):
        ask(three())


# ---- transactions -------------------------------------------------------------------------------


def test_a_dispatch_uses_its_groups_alone() -> None:
    ownership = three()
    one, other = leased(ownership, "a", "b"), leased(ownership, "b", "c")
    first = ownership.begin(one)
    assert isinstance(first, Transaction)
    assert ownership.begin(other) == Refusal(R.BUSY, "b")
    assert not ownership.is_busy("c")  # all groups or none
    ownership.finish(first)
    second = ownership.begin(other)
    assert isinstance(second, Transaction)
    assert second.token > first.token
    ownership.finish(first)  # an old one ends nothing
    assert ownership.is_busy("b")


def test_a_lease_that_is_given_back_ends_its_dispatch() -> None:
    ownership = three()
    lease = leased(ownership, "a")
    ownership.begin(lease)
    assert ownership.begin(lease) == Refusal(R.BUSY, "a")
    ownership.release(lease)
    assert not ownership.is_busy("a")
    assert ownership.begin(lease) == Refusal(R.RELEASED)


def test_a_token_is_never_given_twice() -> None:
    ownership = Ownership(["a"], first_token=MOST_TOKENS)
    lease = leased(ownership)
    last = ownership.begin(lease)
    assert isinstance(last, Transaction)
    assert last.token == MOST_TOKENS
    ownership.finish(last)
    assert ownership.begin(lease) == Refusal(R.EXHAUSTED)
    assert not ownership.is_busy("a")


def test_many_threads_never_share_a_dispatch_nor_see_a_change() -> None:
    ownership = Ownership(["a", "b"])
    inside: list[str] = []
    wrong: list[str] = []
    done = threading.Event()

    def steps() -> int:
        count = 0
        while not done.is_set():
            lease = ownership.lease("step", wait_seconds=SOON)
            if isinstance(lease, Refusal):
                wrong.append(str(lease))
                continue
            transaction = ownership.begin(lease)
            if isinstance(transaction, Transaction):
                inside.append("step")
                if inside != ["step"]:
                    wrong.append(str(inside))
                inside.remove("step")
                count += 1
            elif transaction.reason is not R.BUSY:
                wrong.append(str(transaction))
            ownership.release(lease)
        return count

    with in_thread(steps) as one, in_thread(steps) as two:
        for _ in range(50):
            with ownership.changing(["a"], timeout=SOON):
                if inside or ownership.users().get("a"):
                    wrong.append("changed in use")
        until(lambda: ownership.epoch("a") == 51)
        done.set()
    assert wrong == []
    assert one[0] + two[0] > 0


# ---- another manifest ---------------------------------------------------------------------------


def test_groups_that_stay_go_on_counting_and_leases_of_before_are_refused() -> None:
    ownership = three()
    old = leased(ownership, "a")
    with pytest.raises(LifecycleError, match="still out"):
        ownership.succeed(["a"], 6)
    ownership.release(old)
    ownership.succeed(["a", "d"], 6)
    assert ownership.generation == 6
    assert (ownership.epoch("a"), ownership.epoch("d")) == (2, 1)
    assert ownership.check(old) == Refusal(R.GENERATION, "expected 6, got 5")
    assert ownership.lease("late", ["b"]) == Refusal(R.UNKNOWN_GROUP, "b")
