"""What the plan of a graph comes to, when it holds for another call, and what is counted."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from helpers.moe_cases import CERTIFICATE
from helpers.moe_manifests import manifest
from helpers.moe_plans import (
    MANIFEST,
    nodes,
    plan,
    prompt_rows,
    route,
    seen,
    sighting,
    subject,
)

from graphcore import ConfigurationError
from graphcore.moe.decisions.certificate import CertificateFlag
from graphcore.moe.decisions.counters import MoECounters, MoECounting
from graphcore.moe.decisions.coverage import Uncertified, UncertifiedReason
from graphcore.moe.decisions.expert_plan import ExpertPlan, PlanSubject, make_plan
from graphcore.moe.decisions.plan_binding import bind, refusal
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.decisions.route_witness import RouteWitness
from graphcore.moe.manifests.manifest import Manifest, ManifestFlag
from graphcore.moe.manifests.manifest_registry import Published
from graphcore.moe.manifests.names import Bind, Location, Namespace, Phase, PlanOutcome, Way
from graphcore.moe.manifests.ownership import Admission

FEW = manifest(slots=4)
PAGEABLE = MANIFEST.with_banks(
    {bank.name: replace(bank, location=Location.PAGEABLE) for _, bank in list(MANIFEST.banks())[:1]}
)
ADAPTED = MANIFEST.adapted("lora", ["layers.1.experts.down"])
NOT_CERTIFIED = replace(subject().coverage, record=Uncertified(UncertifiedReason.MOVED))
BROKEN = {"route": None}
OTHER_BITS = {"equivalence": "other bits"}
REQUIRED = replace(CERTIFICATE, namespace=Namespace.DRAFT, flags=CertificateFlag.REQUIRED)


def prompts(count: int, given: Manifest = MANIFEST, **changes: Any) -> dict[str, Any]:
    first, *rest = prompt_rows(count, given)
    return {"sightings": (replace(first, **changes), *rest)}


# name: (manifest, what is otherwise, outcome, way without a graph)
OUTCOMES: dict[str, tuple[Manifest, dict[str, Any], PlanOutcome, Way]] = {
    "every group eligible": (MANIFEST, {}, PlanOutcome.DECODE_GROUPED, Way.DIRECT),
    "one group declines softly": (
        MANIFEST,
        {"sightings": seen(1, **OTHER_BITS)},
        PlanOutcome.DECODE_STAGED,
        Way.DIRECT,
    ),
    "every group declines softly": (
        MANIFEST,
        {"certificate": None},
        PlanOutcome.DECODE_STAGED,
        Way.DIRECT,
    ),
    "more routes than slots": (FEW, {}, PlanOutcome.DECODE_STAGED, Way.STAGED),
    "more routes than slots, required": (
        FEW,
        {"certificate": REQUIRED},
        PlanOutcome.DECODE_GROUPED,
        Way.STAGED,
    ),
    "pageable experts": (PAGEABLE, {}, PlanOutcome.DECODE_STAGED, Way.STAGED),
    "a contract broken": (
        MANIFEST,
        {"sightings": seen(1, **BROKEN)},
        PlanOutcome.ERROR,
        Way.DIRECT,
    ),
    "a contract broken beside a soft decline": (
        MANIFEST,
        {"sightings": (*seen(0, **BROKEN)[:1], *seen(1, **OTHER_BITS)[1:])},
        PlanOutcome.ERROR,
        Way.DIRECT,
    ),
    "no group seen": (MANIFEST, {"sightings": ()}, PlanOutcome.ERROR, Way.DIRECT),
    "not certified": (MANIFEST, {"coverage": NOT_CERTIFIED}, PlanOutcome.INCOMPLETE, Way.DIRECT),
    "not certified, and a contract broken by that": (
        MANIFEST,
        {"coverage": NOT_CERTIFIED, "sightings": seen(1, **BROKEN)},
        PlanOutcome.INCOMPLETE,
        Way.DIRECT,
    ),
    "a bank is not registered": (
        MANIFEST,
        {"registered": ADAPTED},
        PlanOutcome.INCOMPLETE,
        Way.DIRECT,
    ),
    "no slots": (manifest(slots=0), {"sightings": ()}, PlanOutcome.ORDINARY, Way.DIRECT),
    "a deliberately empty manifest": (
        MANIFEST,
        {"published": Published(Manifest(), 5), "sightings": ()},
        PlanOutcome.ORDINARY,
        Way.DIRECT,
    ),
    "switched off, though not certified": (
        replace(MANIFEST, flags=ManifestFlag.DISABLED),
        {"coverage": NOT_CERTIFIED},
        PlanOutcome.ORDINARY,
        Way.DIRECT,
    ),
    "no expert product": (
        MANIFEST,
        {"products": (), "sightings": ()},
        PlanOutcome.ORDINARY,
        Way.DIRECT,
    ),
    "a prompt": (MANIFEST, prompts(4), PlanOutcome.PROMPT_GROUPED, Way.DIRECT),
    "a prompt, more routes than slots": (
        FEW,
        prompts(4, FEW),
        PlanOutcome.PROMPT_STAGED,
        Way.STAGED,
    ),
    "a prompt, more routes than slots, required": (
        FEW,
        {**prompts(4, FEW), "certificate": REQUIRED},
        PlanOutcome.PROMPT_GROUPED,
        Way.STAGED,
    ),
    "a prompt, pageable experts": (
        PAGEABLE,
        prompts(4, PAGEABLE),
        PlanOutcome.PROMPT_STAGED,
        Way.STAGED,
    ),
    "a prompt, not certified": (
        MANIFEST,
        {**prompts(4), "coverage": NOT_CERTIFIED},
        PlanOutcome.PROMPT_STAGED,
        Way.DIRECT,
    ),
    "a prompt, a contract broken": (
        MANIFEST,
        prompts(4, route=None),
        PlanOutcome.PROMPT_STAGED,
        Way.DIRECT,
    ),
    "rows of both": (MANIFEST, prompts(1), PlanOutcome.PROMPT_GROUPED, Way.DIRECT),
    "rows of both, a soft decline": (
        MANIFEST,
        prompts(1, **OTHER_BITS),
        PlanOutcome.PROMPT_STAGED,
        Way.DIRECT,
    ),
    "rows of both, pageable experts": (
        PAGEABLE,
        prompts(1, PAGEABLE),
        PlanOutcome.PROMPT_STAGED,
        Way.STAGED,
    ),
    "rows of both, not certified": (
        MANIFEST,
        {**prompts(1), "coverage": NOT_CERTIFIED},
        PlanOutcome.INCOMPLETE,
        Way.DIRECT,
    ),
    "rows of both, a contract broken": (
        MANIFEST,
        prompts(1, route=None),
        PlanOutcome.ERROR,
        Way.DIRECT,
    ),
}


@pytest.mark.parametrize(("given", "more", "outcome", "way"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_plan_comes_to(
    given: Manifest, more: dict[str, Any], outcome: PlanOutcome, way: Way
) -> None:
    found = plan(given, **more)
    assert found.outcome is outcome
    assert found.fallback is way
    assert found.phase is (Phase.PROMPT if outcome.is_prompt else Phase.DECODE)
    assert found.why().startswith(outcome.value)


def test_every_outcome_is_tested() -> None:
    assert {outcome for _, _, outcome, _ in OUTCOMES.values()} == set(PlanOutcome)


def test_a_plan_says_why() -> None:
    assert plan().why() == "decoding, every group grouped"
    assert plan(sightings=seen(1, **OTHER_BITS)).why() == (
        "decoding, a group declined; group layers.1: its reader would see other bits than without "
        "grouping (other bits)"
    )
    assert "not certified: its nodes are not" in plan(coverage=NOT_CERTIFIED).why()


@pytest.mark.parametrize(
    ("given", "more", "why"),
    [
        (MANIFEST, {}, ""),
        (
            FEW,
            {"certificate": REQUIRED},
            "group layers.0: 8 routes, 4 slots; group layers.1: 8 routes, 4 slots",
        ),
        (
            PAGEABLE,
            {},
            "group layers.0: its experts lie in memory that the device cannot map "
            "(layers.0.experts.gate_up lies in pageable host memory)",
        ),
    ],
    ids=["slots for every route", "required, more routes", "pageable"],
)
def test_only_a_plan_whose_groups_are_all_served_from_slots_can_be_captured(
    given: Manifest, more: dict[str, Any], why: str
) -> None:
    assert plan(given, **more).is_device_direct is (not why)
    assert plan(given, **more).why_not_direct() == why


def test_a_group_that_the_manifest_does_not_have_is_refused() -> None:
    strange = replace(sighting(MANIFEST.groups[0]), group="layers.9")
    with pytest.raises(ConfigurationError, match=r"layers\.9"):
        plan(sightings=(strange,))


# ---- binding ------------------------------------------------------------------------------------

PLAN = plan()


def bound(
    before: ExpertPlan | None, probe: Probe = Probe.SAME, admission: Admission = Admission.OPEN,
    **more: Any,
) -> tuple[Any, MoECounters]:  # fmt: skip
    counting = MoECounting()
    found = bind(before, probe, admission, subject(**more), make_plan, counting)
    return found, counting.snapshot()


def test_a_plan_is_made_once_and_used_again() -> None:
    counting = MoECounting()
    before = None
    for probe in (Probe.FIRST, Probe.SAME, Probe.SAME_UID, Probe.SAME_UID):
        found = bind(before, probe, Admission.OPEN, subject(), make_plan, counting)
        before = found.plan
        assert found.result is (Bind.COMPILED if probe is Probe.FIRST else Bind.REUSED)
    counted = counting.snapshot()
    assert (counted.plan_calls, counted.plan_compiles, counted.plan_reuses) == (4, 1, 3)
    assert (counted.fallback, counted.rollback, counted.prepare_error) == (0, 0, 0)


def test_a_plan_that_is_used_again_is_the_same_object() -> None:
    found, _ = bound(PLAN)
    assert found.plan is PLAN
    assert str(found) == "reused"


@pytest.mark.parametrize("admission", [each for each in Admission if each is not Admission.OPEN])
def test_there_is_no_plan_while_caching_is_not_open(admission: Admission) -> None:
    for before in (None, PLAN):
        found, counted = bound(before, admission=admission)
        assert (found.result, found.plan) == (Bind.UNAVAILABLE, None)
        assert found.reason == admission.value
        assert (counted.plan_calls, counted.plan_unavailable) == (1, 1)
        assert (counted.plan_compiles, counted.plan_reuses) == (0, 0)


def test_a_plan_that_cannot_be_made_is_counted_and_raises() -> None:
    counting = MoECounting()

    def make(_: PlanSubject) -> ExpertPlan:
        raise KeyError("seen")

    with pytest.raises(KeyError):
        bind(None, Probe.FIRST, Admission.OPEN, subject(), make, counting)
    counted = counting.snapshot()
    assert (counted.plan_calls, counted.prepare_error, counted.plan_compiles) == (1, 1, 0)


MOVED = nodes(identity="other")
REFUSED_ALWAYS: dict[str, tuple[dict[str, Any], str]] = {
    "another meaning": (
        {"certificate": replace(CERTIFICATE, owner_generation=2)}, "semantic key: expected",
    ),
    "no certificate any more": ({"certificate": None}, "semantic key: expected"),
    "another owner": ({"owner": "other"}, "owner: expected 'model', got 'other'"),
    "another list of nodes": ({"nodes": replace(subject().nodes, identity="x")}, "nodes: another"),
    "another first node": (
        {"nodes": replace(subject().nodes, nodes=("x", *subject().nodes.nodes[1:]))},
        "nodes: another list",
    ),
    "a node fewer": (
        {"nodes": replace(subject().nodes, nodes=subject().nodes.nodes[:-1])},
        "nodes: expected 12, got 11",
    ),
    "another generation": (
        {"published": Published(MANIFEST, 6)}, "generation: expected 5, got 6",
    ),
    "other coverage": ({"registered": ADAPTED}, "coverage: another one"),
    "not certified any more": ({"coverage": NOT_CERTIFIED}, "coverage: another one"),
    "rows of a prompt": (prompts(4), "rows of prompts: expected [0, 0], got [4, 4]"),
}  # fmt: skip


@pytest.mark.parametrize("probe", [Probe.SAME_UID, Probe.SAME], ids=lambda probe: probe.name)
@pytest.mark.parametrize(("more", "reason"), REFUSED_ALWAYS.values(), ids=REFUSED_ALWAYS)
def test_a_plan_does_not_hold_for(probe: Probe, more: dict[str, Any], reason: str) -> None:
    assert refusal(PLAN, probe, subject(**more)).startswith(reason)
    found, counted = bound(PLAN, probe, **more)
    assert found.result is Bind.COMPILED
    assert found.reason.startswith(reason)
    assert found.plan is not PLAN
    assert counted.plan_compiles == 1


CHANGED = [each for each in Probe if not each.is_same and each is not Probe.FIRST]


@pytest.mark.parametrize("probe", CHANGED, ids=lambda probe: probe.name)
def test_a_plan_does_not_hold_for_nodes_that_are_known_to_have_changed(probe: Probe) -> None:
    assert refusal(PLAN, probe, subject()) == f"properties: {probe.value}"


# what is tampered with: the witness of a route, and what is seen of a group
ROUTES: dict[str, dict[str, Any]] = {
    "strides": {"strides": (8, 4)},
    "source": {"source": "other"},
    "address": {"address": 0x9999},
    "buffer": {"buffer": "other"},
    "view_offset": {"view_offset": 8},
    "uses": {"uses": 3},
    "dtype": {"dtype": "int32"},
    "extents": {"extents": (2, 4)},
    "chain": {"chain": ("decode1", "decode0")},
    "ids": {"ids": "other"},
}


def test_every_field_of_a_route_is_tampered_with() -> None:
    assert set(ROUTES) == {field.name for field in fields(RouteWitness)}


@pytest.mark.parametrize("field", ROUTES)
def test_a_route_that_was_tampered_with_is_refused_and_taken_again_when_restored(
    field: str,
) -> None:
    changed = {"sightings": seen(1, route=route(1, **ROUTES[field]))}
    found, _ = bound(PLAN, **changed)
    assert found.result is Bind.COMPILED
    assert found.reason.startswith(f"group layers.1: route: {field}: expected ")
    restored, _ = bound(PLAN)
    assert restored.result is Bind.REUSED


SIGHTINGS: dict[str, dict[str, Any]] = {
    "rows": {"rows": 3},
    "top_k": {"top_k": 1},
    "routes": {"routes": 6},
    "route": {"route": None},
    "readers": {"readers": tuple(reversed(PLAN.subject.sightings[1].readers))},
    "sources": {"sources": ()},
    "capabilities": {"capabilities": ()},
    "auxiliaries": {"auxiliaries": ("scale",)},
    "inner": {"inner": ()},
    "equivalence": {"equivalence": "other bits"},
}


@pytest.mark.parametrize("field", SIGHTINGS)
def test_a_plan_does_not_hold_where_another_group_is_seen(field: str) -> None:
    changed = subject(sightings=seen(1, **SIGHTINGS[field]))
    assert refusal(PLAN, Probe.SAME, changed).startswith(f"group layers.1: {field}: expected ")


def test_a_plan_does_not_hold_for_other_products_or_another_number_of_groups() -> None:
    fewer = subject(products=PLAN.subject.products[:-1])
    assert refusal(PLAN, Probe.SAME, fewer) == "products: others than it was made for"
    lone = subject(sightings=PLAN.subject.sightings[:1])
    assert refusal(PLAN, Probe.SAME, lone) == "groups: expected 2, got 1"


def test_an_equal_uid_saves_the_look_at_products_and_routes() -> None:
    changed = subject(sightings=seen(1, route=route(1, uses=9)), products=())
    assert refusal(PLAN, Probe.SAME_UID, changed) == ""
    assert refusal(PLAN, Probe.SAME, changed) != ""


# ---- counters -----------------------------------------------------------------------------------


def test_counters_count_all_or_none_and_know_their_names() -> None:
    counting = MoECounting()
    counting.add("calls", "replays")
    counting.add("ready", count=48)
    with pytest.raises(ConfigurationError, match="names: expected counters, got"):
        counting.add("calls", "nothing")
    assert counting.snapshot() == MoECounters(calls=1, replays=1, ready=48)
