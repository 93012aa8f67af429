"""The last look before a call begins, and what is known after it went well or failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.moe_calls import (
    BOTH,
    CAPTURE,
    CAPTURED,
    FINGERPRINT,
    NEW_PROPERTIES,
    PLAIN,
    PLAN,
    PROPERTIES,
    SEEN_ONCE,
    call,
)
from helpers.moe_cases import fingerprint
from helpers.moe_manifests import manifest
from helpers.moe_plans import plan

from graphcore import ConfigurationError
from graphcore.moe.decisions.activation import ActivationFacts, activate
from graphcore.moe.decisions.call_facts import CallFacts
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.decisions.resource_fingerprint import FingerprintReason, FingerprintRefusal
from graphcore.moe.decisions.settling import Failure, fail, settle
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import Kind, Way
from graphcore.moe.manifests.ownership import Refusal, RefusalReason

CAPTURING = decide(SEEN_ONCE, call())
REPLAYING = decide(CAPTURED, call())
CHANGED = call(Probe.CHANGED, options=BOTH)
UPDATING = decide(CAPTURED, CHANGED)
ORDINARY = plan(products=(), sightings=())
NEWER = replace(CAPTURE, generation=5)

# ---- activation ---------------------------------------------------------------------------------

FINE = ActivationFacts(fingerprint=FINGERPRINT, owners=OwnersMatch.SAME)
OTHER = fingerprint(rank=1)
REFUSED = FingerprintRefusal(FingerprintReason.TRANSACTION, "in use")
GRAPHS: dict[str, tuple[EntryState, Decision]] = {
    "capture": (SEEN_ONCE, CAPTURING),
    "update": (CAPTURED, UPDATING),
    "replay": (CAPTURED, REPLAYING),
}


@pytest.mark.parametrize(("entry", "decision"), GRAPHS.values(), ids=GRAPHS)
def test_a_decision_holds_where_nothing_changed_meanwhile(
    entry: EntryState, decision: Decision
) -> None:
    assert activate(entry, decision, FINE, FINGERPRINT) is decision


def test_a_capture_needs_no_owners_of_before() -> None:
    facts = replace(FINE, owners=OwnersMatch.NONE)
    assert activate(SEEN_ONCE, CAPTURING, facts, FINGERPRINT) is CAPTURING


# (what is there now, detail, kinds that it stops)
ALL = ("capture", "update", "replay")
STOPS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "other resources": ({"fingerprint": OTHER}, "graph: rank: expected 0, got 1", ALL),
    "resources cannot be asked": (
        {"fingerprint": REFUSED}, "no fingerprint: another dispatch uses a group: in use", ALL,
    ),
    "nobody asked for resources": ({"fingerprint": None}, "no fingerprint: None", ALL),
    "other owners": (
        {"owners": OwnersMatch.DIFFERENT}, OwnersMatch.DIFFERENT.value, ("update", "replay"),
    ),
    "an owner is gone": (
        {"owners": OwnersMatch.EXPIRED}, OwnersMatch.EXPIRED.value, ("update", "replay"),
    ),
    "the clock does not count": (
        {"is_clock_active": False}, "the device clock does not count", ("replay",),
    ),
    "the clock has no step left": (
        {"is_clock_exhausted": True}, "the device clock has no step left", ALL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("now", "detail", "stopped"), STOPS.values(), ids=STOPS)
def test_a_decision_is_turned_where(
    now: dict[str, Any], detail: str, stopped: tuple[str, ...], kind: str
) -> None:
    entry, decision = GRAPHS[kind]
    found = activate(entry, decision, replace(FINE, **now), FINGERPRINT)
    if kind not in stopped:
        assert found is decision
        return
    assert (found.kind, found.reason, found.way) == (
        Kind.DECLINED, Reason.ACTIVATION, Way.DIRECT,
    )  # fmt: skip
    assert (found.detail, found.retention) == (detail, Retention.DROP)


def test_a_replay_is_compared_with_its_capture_and_a_capture_with_its_decision() -> None:
    moved = replace(FINE, fingerprint=OTHER)
    assert activate(SEEN_ONCE, CAPTURING, moved, OTHER) is CAPTURING
    assert activate(CAPTURED, REPLAYING, moved, OTHER).reason is Reason.ACTIVATION
    assert activate(SEEN_ONCE, CAPTURING, FINE).detail == "no fingerprint to compare with"


DIRECT = decide(EntryState(), call(Probe.FIRST))
STAGED = decide(CAPTURED, call(made=plan(manifest(slots=4))))
FAILED = decide(CAPTURED, call(made=plan(sightings=())))
PLAIN_REPLAY = decide(PLAIN, call(made=ORDINARY, has_products=False))
BUSY = ActivationFacts(Refusal(RefusalReason.BUSY, "layers.0"))


@pytest.mark.parametrize("decision", [DIRECT, CAPTURING, UPDATING, REPLAYING], ids=str)
def test_whoever_uses_slots_or_a_graph_needs_a_lease(decision: Decision) -> None:
    found = activate(CAPTURED, decision, BUSY, FINGERPRINT)
    assert (found.kind, found.reason, found.way) == (Kind.DECLINED, Reason.DISPATCH, Way.STAGED)


@pytest.mark.parametrize(
    "decision", [STAGED, FAILED, PLAIN_REPLAY], ids=["staged", "failed", "plain"]
)
def test_whoever_uses_neither_needs_none(decision: Decision) -> None:
    assert activate(CAPTURED, decision, BUSY) is decision


@pytest.mark.parametrize("decision", [DIRECT, PLAIN_REPLAY], ids=["direct", "plain"])
def test_without_experts_in_a_graph_no_resources_are_asked_for(decision: Decision) -> None:
    assert activate(PLAIN, decision, ActivationFacts()) is decision


# ---- after it went well -------------------------------------------------------------------------

SETTLED: dict[str, tuple[EntryState, CallFacts, CaptureState | None, EntryState]] = {
    "first": (
        EntryState(), call(Probe.FIRST), None, EntryState(NEW_PROPERTIES, plan=PLAN),
    ),
    "changed before it was captured": (
        SEEN_ONCE, call(Probe.CHANGED), None, EntryState(NEW_PROPERTIES, plan=PLAN),
    ),
    "captured": (SEEN_ONCE, call(), CAPTURE, CAPTURED),
    "replayed": (CAPTURED, call(), None, CAPTURED),
    "updated": (
        CAPTURED, CHANGED, NEWER,
        EntryState(NEW_PROPERTIES, is_warm=True, plan=PLAN, capture=NEWER),
    ),
    "declined, kept": (CAPTURED, call(is_disabled=True), None, CAPTURED),
    "declined, dropped": (
        CAPTURED, call(Probe.CHANGED), None, EntryState(NEW_PROPERTIES, plan=PLAN),
    ),
    "another generation": (
        CAPTURED, call(generation=6), None, EntryState(PROPERTIES, plan=PLAN),
    ),
    "failed, dropped": (
        CAPTURED, call(made=plan(sightings=())), None, EntryState(PROPERTIES, plan=PLAN),
    ),
    "plain, changed": (
        PLAIN, call(Probe.CHANGED, ORDINARY, has_products=False), None,
        EntryState(NEW_PROPERTIES, is_warm=False, plan=ORDINARY, capture=PLAIN.capture),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "given", "captured", "left"), SETTLED.values(), ids=SETTLED)
def test_what_is_known_after_a_call_that_was(
    entry: EntryState, given: CallFacts, captured: CaptureState | None, left: EntryState
) -> None:
    assert settle(entry, decide(entry, given), given, captured) == left


@pytest.mark.parametrize(
    ("entry", "given", "captured"),
    [(SEEN_ONCE, call(), None), (CAPTURED, call(), CAPTURE), (CAPTURED, CHANGED, None)],
    ids=["capture", "replay", "update"],
)
def test_what_was_captured_is_handed_over_with_captures_alone(
    entry: EntryState, given: CallFacts, captured: CaptureState | None
) -> None:
    with pytest.raises(ConfigurationError, match="captured: expected"):
        settle(entry, decide(entry, given), given, captured)


# ---- after it failed ----------------------------------------------------------------------------


def test_a_refused_update_is_made_good_by_a_new_executable() -> None:
    found, left = fail(CAPTURED, UPDATING, Failure.UPDATE_REFUSED, "a node more")
    assert (found.kind, found.reason, found.detail) == (
        Kind.REINSTANTIATE, Reason.UPDATE_REFUSED, "a node more",
    )  # fmt: skip
    assert found.uses_graph
    assert left is CAPTURED
    assert settle(left, found, CHANGED, NEWER).capture is NEWER
    assert found.counters() == ("calls", "reinstantiations")


@pytest.mark.parametrize("decision", [CAPTURING, REPLAYING, DIRECT], ids=str)
def test_only_an_update_is_refused(decision: Decision) -> None:
    with pytest.raises(ConfigurationError, match="UPDATE_REFUSED"):
        fail(CAPTURED, decision, Failure.UPDATE_REFUSED)


def test_after_another_error_of_the_driver_the_executable_of_before_is_what_it_was() -> None:
    found, left = fail(CAPTURED, UPDATING, Failure.DRIVER, "out of memory")
    assert (found.kind, found.reason) == (Kind.FAILED, Reason.DRIVER)
    assert left is CAPTURED
    # the same boundary again, and back
    assert decide(left, CHANGED).kind is Kind.UPDATE
    assert decide(left, call()).kind is Kind.REPLAY


def test_an_executable_that_was_given_up_first_is_lost_with_the_new_one() -> None:
    turned, entry = fail(CAPTURED, UPDATING, Failure.UPDATE_REFUSED)
    found, left = fail(entry, turned, Failure.DRIVER, "out of memory", lost=True)
    assert (found.kind, found.retention) == (Kind.FAILED, Retention.DROP)
    assert left.capture is None
    assert decide(left, call()).kind is Kind.CAPTURE
    plain = decide(replace(PLAIN, is_warm=False), call(made=ORDINARY, has_products=False))
    assert plain.kind is Kind.UPDATE
    assert fail(PLAIN, plain, Failure.DRIVER, lost=True)[1].capture is None


@pytest.mark.parametrize("failure", [Failure.EVALUATOR, Failure.FINISH])
@pytest.mark.parametrize("kind", [*ALL, "direct"])
def test_after_a_broken_step_nothing_is_taken_for_known(kind: str, failure: Failure) -> None:
    entry, decision = GRAPHS.get(kind, (SEEN_ONCE, DIRECT))
    found, left = fail(entry, decision, failure)
    assert (found.kind, found.retention) == (Kind.FAILED, Retention.RESET)
    assert left == EntryState()
    # and the next steps are right: warm up again
    again = call(Probe.FIRST)
    assert decide(left, again).kind is Kind.DIRECT


def test_what_a_call_gave_up_before_it_failed_stays_given_up() -> None:
    direct = decide(CAPTURED, call(generation=6))
    found, left = fail(CAPTURED, direct, Failure.DRIVER)
    assert found.retention is Retention.RESET
    assert left == EntryState()
