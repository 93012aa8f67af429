"""Why a cache captures, what it evicts, when it warns: decided from values alone, no driver."""

from __future__ import annotations

from typing import Any

import pytest

from graphcore import ConfigurationError
from graphcore.reuse.budget import EntryFacts, Incoming, Limits, Room, idle_keys, make_room
from graphcore.reuse.decisions import (
    CaptureDecision,
    CaptureReason,
    Cause,
    Departure,
    Eviction,
    History,
    Outcome,
)
from graphcore.reuse.thrash import NEW_KEYS, Churn, Thrash, Watch, what_varies

MIB = 1 << 20

# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": 1.5}, "max_bytes"),
        ({"max_bytes": True}, "max_bytes"),
        ({"max_entries": 0}, "max_entries"),
        ({"max_entries": "4"}, "max_entries"),
        ({"idle_seconds": 0}, "idle_seconds"),
        ({"idle_seconds": "1"}, "idle_seconds"),
        ({"idle_seconds": float("nan")}, "idle_seconds"),
    ],
    ids=repr,
)
def test_a_limit_that_cannot_work_is_refused_by_name(limits: Any, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}: expected"):
        Limits(**limits)


# ---- what has to go -----------------------------------------------------------------------------


def facts(key: str, size: int, **more: Any) -> EntryFacts:
    return EntryFacts(key, size, **more)


A, B, C = facts("a", 10), facts("b", 20), facts("c", 30)
BYTES, COUNT = Cause.BYTES, Cause.COUNT
PINNED_A = facts("a", 10, is_pinned=True)
FLYING_A = facts("a", 10, is_in_flight=True)
POOLED = [facts("a", 1, pool="p"), facts("b", 1, pool="p"), facts("c", 5)]

ROOM: dict[str, tuple[list[EntryFacts], Limits, Incoming, dict[Any, int], Room]] = {
    "no limit": ([A, B, C], Limits(), Incoming(10**9), {}, Room()),
    "it fits exactly": ([A, B, C], Limits(max_bytes=70), Incoming(10), {}, Room()),
    "a byte too many: the least recently used goes": (
        [A, B, C], Limits(max_bytes=70), Incoming(11), {}, Room((("a", BYTES),)),
    ),
    "as many as it takes": (
        [A, B, C], Limits(max_bytes=70), Incoming(21), {}, Room((("a", BYTES), ("b", BYTES))),
    ),
    "all of them": (
        [A, B], Limits(max_bytes=40), Incoming(40), {}, Room((("a", BYTES), ("b", BYTES))),
    ),
    "more than the budget alone: nothing goes": (
        [A, B], Limits(max_bytes=40), Incoming(41), {}, Room(fits=False),
    ),
    "one entry too many": (
        [A, B, C], Limits(max_entries=3), Incoming(0), {}, Room((("a", COUNT),)),
    ),
    "an update adds no entry": (
        [A, B, C], Limits(max_entries=3), Incoming(0, entries=0), {}, Room(),
    ),
    "one cap in total, whatever the keys are": (
        [A, B, C], Limits(max_entries=3, max_bytes=61), Incoming(30), {},
        Room((("a", COUNT), ("b", BYTES))),
    ),
    "what is pinned stays": (
        [PINNED_A, B, C], Limits(max_bytes=70), Incoming(11), {}, Room((("b", BYTES),)),
    ),
    "only pinned ones: nothing fits and nothing goes": (
        [PINNED_A], Limits(max_entries=1), Incoming(0), {}, Room(fits=False),
    ),
    "what is in flight goes last": (
        [FLYING_A, B, C], Limits(max_bytes=70), Incoming(11), {}, Room((("b", BYTES),)),
    ),
    "and is waited for where it must go": (
        [FLYING_A, B], Limits(max_bytes=40), Incoming(40), {},
        Room((("b", BYTES), ("a", BYTES)), frozenset({"a"})),
    ),
    "a shared pool goes with the last entry in it": (
        POOLED, Limits(max_bytes=50), Incoming(1), {"p": 48},
        Room((("a", BYTES), ("b", BYTES))),
    ),
    "a shared pool stays where the new one lies in it": (
        POOLED, Limits(max_bytes=52), Incoming(1, pool="p"), {"p": 48},
        Room((("a", BYTES), ("b", BYTES), ("c", BYTES))),
    ),
    "a shared pool that is too large by itself does not fit": (
        POOLED, Limits(max_bytes=48), Incoming(1, pool="p"), {"p": 48}, Room(fits=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "limits", "incoming", "pools", "room"), ROOM.values(), ids=ROOM
)
def test_what_has_to_go_for_what_is_to_come(
    entries: list[EntryFacts],
    limits: Limits,
    incoming: Incoming,
    pools: dict[Any, int],
    room: Room,
) -> None:
    assert make_room(entries, limits, incoming, pools) == room


def test_idle_entries_go_by_the_clock_but_not_where_they_are_needed() -> None:
    entries = [
        facts("old", 1, last_time=0.0),
        facts("pinned", 1, last_time=0.0, is_pinned=True),
        facts("running", 1, last_time=0.0, is_in_flight=True),
        facts("new", 1, last_time=5.0),
    ]
    assert idle_keys(entries, Limits(idle_seconds=10), 10.0) == []
    assert idle_keys(entries, Limits(idle_seconds=10), 10.5) == ["old"]
    assert idle_keys(entries, Limits(), 1e9) == []


# ---- reasons ------------------------------------------------------------------------------------

REASONS = {
    "miss: never captured": CaptureReason(),
    "re-capture: evicted 3 lookups ago for budget": CaptureReason(Departure(BYTES, 4, 10), 3),
    "re-capture: evicted 1 lookup ago for the number of entries": CaptureReason(
        Departure(COUNT, 4, 10), 1
    ),
    "re-capture: evicted 9 lookups ago for lying idle": CaptureReason(
        Departure(Cause.IDLE, 4, 1), 9
    ),
    "re-capture: stale: kv_k moved": CaptureReason(Departure(Cause.STALE, 4, 10, "kv_k moved")),
    "re-capture: its executable was closed by its user": CaptureReason(
        Departure(Cause.CLOSED, 4, 1), 2
    ),
    "re-capture: its executable was updated to another key: 5": CaptureReason(
        Departure(Cause.UPDATED, 4, 10, "5"), 2
    ),
}


@pytest.mark.parametrize(("text", "reason"), REASONS.items(), ids=REASONS)
def test_a_reason_reads_as_a_sentence(text: str, reason: CaptureReason) -> None:
    assert str(reason) == text
    assert reason.is_recapture is (text != "miss: never captured")
    assert reason.was_evicted is ("budget" in text or "number" in text)


def test_decisions_read_as_sentences() -> None:
    reason = CaptureReason(Departure(BYTES, 4, 10), 3)
    made = CaptureDecision(("decode", 8), reason, Outcome.UPDATED, 3 * MIB, "updated in place")
    assert str(made) == (
        "key ('decode', 8): re-capture: evicted 3 lookups ago for budget: update instead of an "
        "instantiation (updated in place), 3.0 MiB"
    )
    gone = Eviction(7, Departure(COUNT, 1, 2048), waited=True)
    assert str(gone) == (
        "key 7 left the cache: the number of entries, 2.0 KiB, after its running launch"
    )


def test_the_history_is_bounded_and_remembers_the_newest() -> None:
    history = History(limit=3)
    for lookup in range(10):
        history.note(lookup, Departure(BYTES, lookup, lookup * 100))
    assert len(history) == 3
    assert history.reason(5, 10) == CaptureReason()
    assert history.reason(8, 10) == CaptureReason(Departure(BYTES, 8, 800), 2)
    assert (history.bytes_of(9), history.bytes_of(1)) == (900, None)


# ---- warnings -----------------------------------------------------------------------------------


def run_lru(keys: list[int], cap: int) -> list[Thrash | Churn]:
    """What a cache of ``cap`` entries of 1 MiB would be warned of."""
    watch, history, held, found = Watch(), History(), dict[int, None](), []
    for lookup, key in enumerate(keys):
        if key in held:
            held[key] = held.pop(key)
            watch.hit(key, len(held))
            continue
        reason = history.reason(key, lookup)
        if len(held) == cap:
            oldest = next(iter(held))
            del held[oldest]
            history.note(oldest, Departure(COUNT, lookup, MIB))
        held[key] = None
        sign = watch.captured(key, reason, MIB, len(held))
        if sign is not None:
            found.append(sign)
    return found


def test_65_keys_in_a_cache_of_64_thrash_and_the_size_needed_is_told_once() -> None:
    found = [sign for sign in run_lru(list(range(65)) * 8, 64) if isinstance(sign, Thrash)]
    assert len(found) == 1
    [thrash] = found
    assert (thrash.keys, thrash.bytes) == (65, 65 * MIB)
    assert "max_entries=65 and max_bytes=68157440 (65.0 MiB)" in str(thrash)
    assert thrash.recaptures >= 8


@pytest.mark.parametrize(
    ("keys", "cap"),
    [
        (list(range(64)) * 8, 64),
        ([0, 1, 2, 3] * 5 + [9] + [0, 1, 2, 3] * 100, 4),
        ([key for block in range(20) for key in [block % 5] * 60], 4),
    ],
    ids=["they fit", "one stray key", "a slow change of what is used"],
)
def test_a_cache_that_helps_is_not_warned_of(keys: list[int], cap: int) -> None:
    assert [sign for sign in run_lru(keys, cap) if isinstance(sign, Thrash)] == []


def test_one_graph_for_each_length_is_told_with_what_varies() -> None:
    watch = Watch()
    found = [
        watch.captured(("decode", length, "fp16"), CaptureReason(), MIB, 1)
        for length in range(100, 100 + 2 * NEW_KEYS)
    ]
    [churn] = [sign for sign in found if sign is not None]
    assert churn == Churn(NEW_KEYS, "key[1] is 100, 101, 102, 103, ...")
    assert "Pad inputs to a few sizes" in str(churn)


def test_new_keys_between_hits_are_no_churn() -> None:
    watch = Watch()
    for key in range(4 * NEW_KEYS):
        assert watch.captured(key, CaptureReason(), MIB, 1) is None
        if key % (NEW_KEYS // 2) == 0:
            watch.hit(key, 1)


def test_after_forgetting_it_warns_anew() -> None:
    watch = Watch()
    for _ in range(2):
        found = [watch.captured(key, CaptureReason(), 1, 1) for key in range(NEW_KEYS)]
        assert isinstance(found[-1], Churn)
        watch.forget()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([1, 2], "the keys are 1, 2"),
        ([(1, "a"), (1, "b")], "key[1] is 'a', 'b'"),
        ([(1, 2), (3, 4)], "key[0] is 1, 3; key[1] is 2, 4"),
        ([(1,), (1, 2)], "the keys are (1,), (1, 2)"),
    ],
)
def test_what_varies_between_keys(keys: list[Any], words: str) -> None:
    assert what_varies(keys) == words
