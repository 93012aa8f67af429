"""The table of declines and failures, row by row: what each shortfall means for which work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.moe_calls import CAPTURED, PLAN, REQUIRED, call, required_entry
from helpers.moe_cases import CERTIFICATE, fingerprint
from helpers.moe_manifests import manifest
from helpers.moe_plans import MANIFEST, plan, prompt_rows, seen, subject

from graphcore import LifecycleError
from graphcore.moe.decisions.activation import ActivationFacts, activate
from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.coverage import Uncertified, UncertifiedReason
from graphcore.moe.decisions.decision import Decision, refuse
from graphcore.moe.decisions.decline_table import DECLINE_TABLE, INVALIDATIONS, ruling
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.decisions.resource_fingerprint import FingerprintReason, FingerprintRefusal
from graphcore.moe.decisions.settling import Failure, fail
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import Kind, Location, Way
from graphcore.moe.manifests.ownership import Refusal, RefusalReason

KEEP, RETAIN, DROP, RESET = Retention
DIRECT, STAGED, NOTHING = Way.DIRECT, Way.STAGED, Way.NOTHING
D, F = Kind.DECLINED, Kind.FAILED

# written down once more, from the rows of the behaviour wanted: (kind, way of a plan whose slots
# serve it, retention) of ordinary and of required work
TABLE: dict[Reason, tuple[tuple[Kind, Way, Retention], tuple[Kind, Way, Retention]]] = {
    Reason.DISABLED: ((D, DIRECT, KEEP), (D, DIRECT, KEEP)),
    Reason.BACKEND: ((D, DIRECT, KEEP), (D, DIRECT, KEEP)),
    Reason.PHASE: ((D, DIRECT, RETAIN), (D, DIRECT, RETAIN)),
    Reason.SEMANTICS: ((D, DIRECT, KEEP), (D, DIRECT, KEEP)),
    Reason.RANKS: ((D, DIRECT, RETAIN), (D, DIRECT, RETAIN)),
    Reason.HOST_STAGED: ((Kind.STAGED, STAGED, KEEP), (Kind.STAGED, STAGED, KEEP)),
    Reason.CERTIFICATE: ((D, DIRECT, KEEP), (F, NOTHING, KEEP)),
    Reason.NO_CONTEXT: ((D, STAGED, DROP), (F, NOTHING, DROP)),
    Reason.UNAVAILABLE: ((D, STAGED, DROP), (F, NOTHING, DROP)),
    Reason.NOT_READY: ((D, DIRECT, DROP), (F, NOTHING, KEEP)),
    Reason.PLAN_ERROR: ((F, NOTHING, DROP), (F, NOTHING, DROP)),
    Reason.COVERAGE: ((D, DIRECT, DROP), (F, NOTHING, DROP)),
    Reason.NOT_NEEDED: ((D, DIRECT, DROP), (D, DIRECT, DROP)),
    Reason.NOT_RETAINED: ((D, DIRECT, DROP), (D, DIRECT, DROP)),
    Reason.NOT_CAPTURABLE: ((D, DIRECT, DROP), (D, DIRECT, DROP)),
    Reason.PROPERTIES: ((D, DIRECT, DROP), (D, DIRECT, DROP)),
    Reason.CAPTURE_INCOMPLETE: ((D, DIRECT, DROP), (D, DIRECT, DROP)),
    Reason.STREAMS_UNRESOLVED: ((D, STAGED, DROP), (F, NOTHING, KEEP)),
    Reason.STREAMS_INCOHERENT: ((D, STAGED, DROP), (F, NOTHING, DROP)),
    Reason.NO_FINGERPRINT: ((D, DIRECT, DROP), (F, NOTHING, KEEP)),
    Reason.FINGERPRINT: ((D, DIRECT, DROP), (F, NOTHING, DROP)),
    Reason.OWNERS: ((D, DIRECT, DROP), (F, NOTHING, DROP)),
    Reason.NO_WITNESSES: ((D, DIRECT, DROP), (D, DIRECT, DROP)),
    Reason.DISPATCH: ((D, STAGED, DROP), (F, NOTHING, DROP)),
    Reason.ACTIVATION: ((D, DIRECT, DROP), (F, NOTHING, DROP)),
    Reason.DRIVER: ((F, NOTHING, KEEP), (F, NOTHING, KEEP)),
    Reason.EVALUATOR: ((F, NOTHING, RESET), (F, NOTHING, RESET)),
    Reason.FINISH: ((F, NOTHING, RESET), (F, NOTHING, RESET)),
}


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
@pytest.mark.parametrize("reason", TABLE, ids=lambda reason: reason.name)
def test_a_row_rules(reason: Reason, required: bool) -> None:
    kind, way, retention = TABLE[reason][required]
    found = refuse(reason, "detail", PLAN, is_required=required)
    assert (found.kind, found.way, found.retention) == (kind, way, retention)
    assert (found.reason, found.detail, found.is_required) == (reason, "detail", required)
    assert ruling(reason, is_required=required).retention is retention


def test_every_reason_is_in_the_table_or_no_obstacle() -> None:
    fine = {
        Reason.FIRST, Reason.CHANGED, Reason.WARM, Reason.UNCHANGED, Reason.BOUNDARY,
        Reason.UPDATE_REFUSED,
    }  # fmt: skip
    events = {each.reason for each in INVALIDATIONS}
    assert set(DECLINE_TABLE) == set(TABLE)
    assert set(TABLE) | fine | events == set(Reason)
    assert not set(TABLE) & fine


SOFT = plan(sightings=seen(1, equivalence="other bits"))
NO_SLOTS = plan(manifest(slots=4))
PAGEABLE_MANIFEST = MANIFEST.with_banks(
    {bank.name: replace(bank, location=Location.PAGEABLE) for _, bank in list(MANIFEST.banks())[:1]}
)
PAGEABLE = plan(PAGEABLE_MANIFEST)
WRONG = plan(sightings=seen(1, route=None))
UNCOVERED = plan(coverage=replace(subject().coverage, record=Uncertified(UncertifiedReason.MOVED)))
GONE = FingerprintRefusal(FingerprintReason.TRANSACTION, "in use")
OVERLAP = MoEOptions(decode_boundary_overlap=True)
CHANGED = {"probe": Probe.CHANGED, "options": OVERLAP}

# what has to happen for each row that a decision can come to: (what is otherwise, way of ordinary)
SITUATIONS: dict[str, tuple[dict[str, Any], Reason, Way]] = {
    "no slots to run from": ({"has_context": False}, Reason.NO_CONTEXT, STAGED),
    "plan unavailable": ({"made": None}, Reason.UNAVAILABLE, STAGED),
    "outcome staged, softly": ({"made": SOFT}, Reason.NOT_READY, DIRECT),
    "outcome staged, more routes than slots": ({"made": NO_SLOTS}, Reason.NOT_READY, STAGED),
    "outcome staged, pageable experts": ({"made": PAGEABLE}, Reason.NOT_READY, STAGED),
    "outcome error": ({"made": WRONG}, Reason.PLAN_ERROR, NOTHING),
    "coverage incomplete": ({"made": UNCOVERED}, Reason.COVERAGE, DIRECT),
    "streams not resolvable": (
        {"streams": Streams.UNRESOLVED}, Reason.STREAMS_UNRESOLVED, STAGED,
    ),
    "streams not coherent": ({"streams": Streams.INCOHERENT}, Reason.STREAMS_INCOHERENT, STAGED),
    "fingerprint cannot be computed": (
        {**CHANGED, "fingerprint": GONE}, Reason.NO_FINGERPRINT, DIRECT,
    ),
    "fingerprint differs": (
        {**CHANGED, "fingerprint": fingerprint(transfer_counter=64)}, Reason.FINGERPRINT, DIRECT,
    ),
    "owners differ": ({**CHANGED, "owners": OwnersMatch.DIFFERENT}, Reason.OWNERS, DIRECT),
}  # fmt: skip


def decided(required: bool, situation: dict[str, Any]) -> Decision:
    entry = required_entry() if required else CAPTURED
    return decide(entry, call(**situation, required=required))


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
@pytest.mark.parametrize(("situation", "reason", "way"), SITUATIONS.values(), ids=SITUATIONS)
def test_a_call_comes_to_its_row(
    situation: dict[str, Any], reason: Reason, way: Way, required: bool
) -> None:
    found = decided(required, situation)
    kind, _, retention = TABLE[reason][required]
    assert (found.reason, found.kind, found.retention) == (reason, kind, retention)
    assert found.way is (NOTHING if kind is F else way)
    assert not found.uses_graph


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
def test_a_prompt_that_does_not_fit_the_slots_is_staged_and_fails_required_work(
    required: bool,
) -> None:
    few = manifest(slots=4)
    made = plan(few, sightings=prompt_rows(4, few))
    for entry in (EntryState(), replace(CAPTURED, capture=None)):
        found = decide(entry, call(made=made, required=required))
        assert found.reason is Reason.NOT_READY
        assert (found.kind, found.way) == ((F, NOTHING) if required else (Kind.STAGED, STAGED))


CERTIFICATES = {
    "reserved": {"reserved": 1},
    "rows": {"rows": 0},
    "another graph": {"graph_uid": 99},
}


@pytest.mark.parametrize("change", CERTIFICATES.values(), ids=CERTIFICATES)
def test_malformed_certificates_fail_required_work_before_anything_else_is_looked_at(
    change: dict[str, int],
) -> None:
    found = decide(
        required_entry(),
        call(certificate=replace(REQUIRED, **change), made=None, has_context=False),
    )
    assert (found.kind, found.reason, found.retention) == (F, Reason.CERTIFICATE, KEEP)
    assert "expected" in found.detail


def test_ordinary_work_with_a_malformed_certificate_runs_without_a_graph() -> None:
    found = decide(CAPTURED, call(certificate=replace(CERTIFICATE, reserved=1)))
    assert (found.kind, found.reason, found.way) == (D, Reason.CERTIFICATE, DIRECT)
    assert found.retention is KEEP


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
def test_owners_that_cannot_be_watched_leave_both_without_a_graph(required: bool) -> None:
    entry = replace(CAPTURED, capture=None, is_warm=False)
    found = decide(
        required_entry(entry) if required else entry,
        call(required=required, can_watch_owners=False),
    )
    assert (found.kind, found.reason, found.way) == (D, Reason.NO_WITNESSES, DIRECT)


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
def test_a_refused_activation(required: bool) -> None:
    entry = required_entry() if required else CAPTURED
    replay = decide(entry, call(required=required))
    assert replay.kind is Kind.REPLAY
    found = activate(entry, replay, ActivationFacts(fingerprint=GONE))
    assert (found.kind, found.way, found.retention) == TABLE[Reason.ACTIVATION][required]
    refused = activate(entry, replay, ActivationFacts(Refusal(RefusalReason.REPLACING)))
    assert (refused.kind, refused.way, refused.retention) == TABLE[Reason.DISPATCH][required]
    assert refused.detail == RefusalReason.REPLACING.value


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (Failure.DRIVER, Reason.DRIVER),
        (Failure.EVALUATOR, Reason.EVALUATOR),
        (Failure.FINISH, Reason.FINISH),
    ],
    ids=["driver", "evaluator", "finish"],
)
def test_a_failure_after_the_dispatch_began(
    failure: Failure, reason: Reason, required: bool
) -> None:
    entry = required_entry() if required else CAPTURED
    found, _ = fail(entry, decide(entry, call(required=required)), failure, "it broke")
    assert (found.kind, found.way, found.retention) == TABLE[reason][required]


# ---- what a decision says -----------------------------------------------------------------------


def test_required_work_says_that_nothing_was_launched_and_is_counted() -> None:
    found = decided(True, {"made": SOFT})
    error = found.error()
    assert isinstance(error, LifecycleError)
    assert str(error).startswith("required work failed: the plan is not grouped: decoding, a group")
    assert str(error).endswith("; nothing was launched")
    assert found.counters() == ("calls", "failed", "required_unsupported")


def test_what_failed_on_its_way_does_not_say_that_nothing_was_launched() -> None:
    found, _ = fail(CAPTURED, decide(CAPTURED, call()), Failure.FINISH, "it broke")
    assert str(found.error()) == "the step failed: its end failed: it broke"
    assert found.counters() == ("calls", "failed", "finish_error")


COUNTED: dict[str, tuple[CallFacts, tuple[str, ...]]] = {
    "replay": (call(), ("calls", "replays")),
    "update": (call(**CHANGED), ("calls", "updates")),
    "declined": (call(made=SOFT), ("calls", "declined")),
    "declined and staged": (call(made=NO_SLOTS), ("calls", "declined", "fallback")),
    "failed, ordinary": (call(made=WRONG), ("calls", "failed")),
    "a prompt that is staged": (
        call(made=plan(manifest(slots=4), sightings=prompt_rows(4, manifest(slots=4)))),
        ("calls", "declined", "fallback"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "names"), COUNTED.values(), ids=COUNTED)
def test_a_decision_counts(given: CallFacts, names: tuple[str, ...]) -> None:
    assert decide(CAPTURED, given).counters() == names


def test_a_decision_reads_as_a_sentence() -> None:
    assert str(decide(CAPTURED, call())) == (
        "replay: unchanged since its capture (through a graph)"
    )
    assert str(decided(False, {"made": None})) == (
        "declined: no plan is to be had: the manifest is being replaced (chunks through scratch "
        "memory, slots untouched)"
    )


def test_what_went_already_does_not_come_back_when_something_comes_between() -> None:
    direct = decide(CAPTURED, call(generation=6))
    assert direct.retention is RESET
    assert direct.turned(Reason.DISABLED).retention is RESET
    assert decide(CAPTURED, call()).turned(Reason.DISABLED).retention is KEEP
