"""The boundary update: nine preconditions, each of which alone forbids it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from helpers.moe_calls import CAPTURE, CAPTURED, REQUIRED, call, required_entry
from helpers.moe_cases import fingerprint
from helpers.moe_manifests import manifest
from helpers.moe_plans import plan, prompt_rows, seen, subject

from graphcore.moe.decisions.boundary_update import Precondition, boundary_obstacles
from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.coverage import Uncertified, UncertifiedReason
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.decisions.resource_fingerprint import FingerprintReason, FingerprintRefusal
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import Kind, Way

P = Precondition
ON = MoEOptions(decode_boundary_overlap=True)
BOUNDARY: dict[str, Any] = {"probe": Probe.CHANGED, "options": ON}
DEAD = replace(CAPTURED, capture=replace(CAPTURE, has_graph=False))
UNCERTIFIED = replace(subject().coverage, record=Uncertified(UncertifiedReason.MOVED))
FEW = plan(manifest(slots=4), certificate=REQUIRED)


def boundary(**more: Any) -> CallFacts:
    return call(**{**BOUNDARY, **more})


def test_a_changed_decode_graph_updates_its_executable_where_all_nine_hold() -> None:
    assert len(Precondition) == 9
    assert boundary_obstacles(CAPTURED, boundary()) == ()
    found = decide(CAPTURED, boundary())
    assert (found.kind, found.reason, found.way) == (Kind.UPDATE, Reason.BOUNDARY, Way.GRAPH)


# each toggled alone: (variant, call, what does not hold, what the call is declined for)
TOGGLED: dict[str, tuple[EntryState, CallFacts, Precondition, Reason]] = {
    "the option is off": (
        CAPTURED, boundary(options=MoEOptions()), P.OPTION, Reason.PROPERTIES,
    ),
    "only the other option is on": (
        CAPTURED, boundary(options=MoEOptions(decode_overlap=True)), P.OPTION, Reason.PROPERTIES,
    ),
    "a prompt": (
        CAPTURED, boundary(made=plan(sightings=prompt_rows(4))), P.OUTCOME, Reason.PHASE,
    ),
    "no complete capture": (DEAD, boundary(), P.CAPTURE, Reason.CAPTURE_INCOMPLETE),
    "it cannot be captured": (
        CAPTURED, boundary(obstacle="a copy to the host"), P.CAPTURABLE, Reason.NOT_CAPTURABLE,
    ),
    "streams differ": (
        CAPTURED, boundary(streams=Streams.INCOHERENT), P.STREAMS, Reason.STREAMS_INCOHERENT,
    ),
    "streams are unknown": (
        CAPTURED, boundary(streams=Streams.UNRESOLVED), P.STREAMS, Reason.STREAMS_UNRESOLVED,
    ),
    "other resources": (
        CAPTURED, boundary(fingerprint=fingerprint(transfer_counter=64)), P.FINGERPRINT,
        Reason.FINGERPRINT,
    ),
    "resources cannot be asked": (
        CAPTURED, boundary(fingerprint=FingerprintRefusal(FingerprintReason.SERIAL)),
        P.FINGERPRINT, Reason.NO_FINGERPRINT,
    ),
    "nobody asked for resources": (
        CAPTURED, boundary(fingerprint=None), P.FINGERPRINT, Reason.NO_FINGERPRINT,
    ),
    **{
        f"owners {match.name.lower()}": (
            CAPTURED, boundary(owners=match), P.OWNERS, Reason.OWNERS,
        )
        for match in OwnersMatch
        if match is not OwnersMatch.SAME
    },
}  # fmt: skip


@pytest.mark.parametrize(("entry", "given", "missing", "reason"), TOGGLED.values(), ids=TOGGLED)
def test_an_update_is_forbidden_where(
    entry: EntryState, given: CallFacts, missing: Precondition, reason: Reason
) -> None:
    assert [each for each, _ in boundary_obstacles(entry, given)] == [missing]
    found = decide(entry, given)
    assert (found.kind, found.reason) == (Kind.DECLINED, reason)
    assert not found.uses_graph


def test_incomplete_coverage_forbids_the_update_as_part_of_the_outcome_and_by_itself() -> None:
    given = boundary(made=plan(coverage=UNCERTIFIED))
    obstacles = [each for each, _ in boundary_obstacles(CAPTURED, given)]
    assert obstacles == [P.OUTCOME, P.COVERAGE]
    assert decide(CAPTURED, given).reason is Reason.COVERAGE
    odd = replace(plan(), subject=replace(subject(), coverage=UNCERTIFIED))
    assert [each for each, _ in boundary_obstacles(CAPTURED, boundary(made=odd))] == [P.COVERAGE]
    assert decide(CAPTURED, boundary(made=odd)).reason is Reason.COVERAGE


def test_required_work_that_is_staged_is_not_updated() -> None:
    given = boundary(made=FEW, required=True)
    ((obstacle, detail),) = boundary_obstacles(required_entry(), given)
    assert obstacle is P.STRATEGIES
    assert detail == "group layers.0: 8 routes, 4 slots; group layers.1: 8 routes, 4 slots"
    found = decide(required_entry(), given)
    assert (found.kind, found.reason) == (Kind.STAGED, Reason.HOST_STAGED)
    assert found.detail == detail


def test_an_expired_owner_makes_the_capture_incomplete_too() -> None:
    given = boundary(owners=OwnersMatch.EXPIRED)
    dead = replace(CAPTURED, capture=replace(CAPTURE, witnesses=None))
    assert [each for each, _ in boundary_obstacles(dead, given)] == [P.CAPTURE, P.OWNERS]


TOGETHER: dict[Precondition, dict[str, Any]] = {
    P.CAPTURABLE: {"obstacle": "a copy to the host"},
    P.OUTCOME: {"made": plan(sightings=seen(1, equivalence="other bits"))},
    P.STREAMS: {"streams": Streams.INCOHERENT},
    P.FINGERPRINT: {"fingerprint": None},
    P.OWNERS: {"owners": OwnersMatch.COUNT},
}
PAIRS = list(combinations(TOGETHER, 2))


@pytest.mark.parametrize(
    ("one", "other"), PAIRS, ids=[f"{one.name}-{other.name}" for one, other in PAIRS]
)
def test_all_that_forbids_an_update_is_told(one: Precondition, other: Precondition) -> None:
    given = boundary(**TOGETHER[one], **TOGETHER[other])
    told = {each for each, _ in boundary_obstacles(CAPTURED, given)}
    assert {one, other} <= told
    assert decide(CAPTURED, given).kind is Kind.DECLINED


def test_every_precondition_was_toggled() -> None:
    toggled = {missing for _, _, missing, _ in TOGGLED.values()}
    assert toggled | {P.COVERAGE, P.STRATEGIES} == set(Precondition)
    assert {each.reason for each in Precondition} <= set(Reason)


def test_a_decline_names_every_field_that_differs() -> None:
    detail = decide(CAPTURED, boundary(fingerprint=fingerprint(transfer_counter=64, rank=1))).detail
    assert "graph: rank: expected 0, got 1" in detail
    assert "graph: transfer_counter: expected 0x0, got 0x40" in detail


def test_another_number_of_expert_rows_is_no_boundary() -> None:
    other = replace(CAPTURED, capture=replace(CAPTURE, fingerprint=fingerprint(semantic_key=1)))
    assert decide(other, boundary()).reason is Reason.FINGERPRINT


def test_a_capture_without_a_fingerprint_matches_nothing() -> None:
    bare = replace(CAPTURED, capture=replace(CAPTURE, fingerprint=None))
    assert dict(boundary_obstacles(bare, boundary())) == {
        P.CAPTURE: "no fingerprint",
        P.FINGERPRINT: "none at the capture",
    }
