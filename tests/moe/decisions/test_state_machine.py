"""What a call does, step after step: warm-up, replay, prompts beside, changes, siblings, an end."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from helpers.moe_calls import (
    BOTH,
    CAPTURE,
    CAPTURED,
    KEY,
    NEW_PROPERTIES,
    PLAIN,
    PLAN,
    PROPERTIES,
    REQUIRED,
    SEEN_ONCE,
    Owner,
    call,
    required_entry,
)
from helpers.moe_cases import CERTIFICATE, fingerprint
from helpers.moe_manifests import manifest
from helpers.moe_plans import MANIFEST, plan, prompt_rows, seen, subject
from helpers.moe_variants import Variants, kinds

from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.coverage import Uncertified, UncertifiedReason
from graphcore.moe.decisions.decline_table import INVALIDATIONS
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.property_probe import Probe, Properties, probe
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.decisions.retention import RetentionRule, retention_obstacles
from graphcore.moe.decisions.settling import settle
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch, Witnesses
from graphcore.moe.manifests.manifest import ManifestFlag
from graphcore.moe.manifests.manifest_registry import Published
from graphcore.moe.manifests.names import Kind, Namespace, RowSemantics, Way
from graphcore.moe.manifests.ownership import Admission

KEEP, RETAIN, DROP, RESET = Retention
PROMPT = plan(sightings=prompt_rows(4))
STAGED_PROMPT = plan(manifest(slots=4), sightings=prompt_rows(4, manifest(slots=4)))
ORDINARY = plan(products=(), sightings=())
SWITCHED_OFF = plan(replace(MANIFEST, flags=ManifestFlag.DISABLED))
UNCERTIFIED = replace(subject().coverage, record=Uncertified(UncertifiedReason.MOVED))
ON = MoEOptions(decode_boundary_overlap=True)
EMPTY = EntryState()

# ---- one call -----------------------------------------------------------------------------------

PATHS: dict[str, tuple[EntryState, CallFacts, Kind, Reason, Retention]] = {
    "nothing known": (EMPTY, call(Probe.FIRST), Kind.DIRECT, Reason.FIRST, KEEP),
    "seen once, unchanged": (SEEN_ONCE, call(), Kind.CAPTURE, Reason.WARM, KEEP),
    "seen once, equal uid": (SEEN_ONCE, call(Probe.SAME_UID), Kind.CAPTURE, Reason.WARM, KEEP),
    "seen once, changed": (SEEN_ONCE, call(Probe.CHANGED), Kind.DIRECT, Reason.CHANGED, KEEP),
    "seen once, another count": (SEEN_ONCE, call(Probe.COUNT), Kind.DIRECT, Reason.CHANGED, KEEP),
    "seen once, another meaning": (
        SEEN_ONCE, call(Probe.SEMANTICS), Kind.DIRECT, Reason.CHANGED, KEEP,
    ),
    "warm without a capture, unchanged": (
        replace(SEEN_ONCE, is_warm=True), call(), Kind.CAPTURE, Reason.WARM, KEEP,
    ),
    "captured, unchanged": (CAPTURED, call(), Kind.REPLAY, Reason.UNCHANGED, KEEP),
    "captured, equal uid": (CAPTURED, call(Probe.SAME_UID), Kind.REPLAY, Reason.UNCHANGED, KEEP),
    "captured, unchanged, nobody asked for resources": (
        CAPTURED, call(fingerprint=None, owners=OwnersMatch.NONE), Kind.REPLAY, Reason.UNCHANGED,
        KEEP,
    ),
    "captured, changed, option on": (
        CAPTURED, call(Probe.CHANGED, options=ON), Kind.UPDATE, Reason.BOUNDARY, KEEP,
    ),
    "captured, another count, option on": (
        CAPTURED, call(Probe.COUNT, options=ON), Kind.UPDATE, Reason.BOUNDARY, KEEP,
    ),
    "captured, changed, option off": (
        CAPTURED, call(Probe.CHANGED), Kind.DECLINED, Reason.PROPERTIES, DROP,
    ),
    "captured, required, unchanged": (
        required_entry(), call(required=True), Kind.REPLAY, Reason.UNCHANGED, KEEP,
    ),
    "captured, required, changed, option on": (
        required_entry(), call(Probe.CHANGED, options=ON, required=True), Kind.UPDATE,
        Reason.BOUNDARY, KEEP,
    ),
    "captured, required, changed, option off": (
        required_entry(), call(Probe.CHANGED, required=True), Kind.DECLINED, Reason.PROPERTIES,
        DROP,
    ),
    "resources cannot be asked at a capture": (
        SEEN_ONCE, call(fingerprint=None), Kind.DECLINED, Reason.NO_FINGERPRINT, DROP,
    ),
    "resources cannot be asked at a required capture": (
        SEEN_ONCE, call(fingerprint=None, required=True), Kind.FAILED, Reason.NO_FINGERPRINT, KEEP,
    ),
    "graphs are off": (CAPTURED, call(is_disabled=True), Kind.DECLINED, Reason.DISABLED, KEEP),
    "graphs are off, required": (
        required_entry(), call(is_disabled=True, required=True), Kind.DECLINED, Reason.DISABLED,
        KEEP,
    ),
    "another driver": (CAPTURED, call(driver="hip"), Kind.DECLINED, Reason.BACKEND, KEEP),
    "a prompt to capture, seen once": (
        SEEN_ONCE, call(made=PROMPT), Kind.CAPTURE, Reason.WARM, KEEP,
    ),
    "a prompt that is staged": (
        SEEN_ONCE, call(made=STAGED_PROMPT), Kind.STAGED, Reason.NOT_READY, DROP,
    ),
    "a prompt that is not staged": (
        SEEN_ONCE, call(made=plan(sightings=prompt_rows(4), coverage=UNCERTIFIED)), Kind.DIRECT,
        Reason.NOT_READY, DROP,
    ),
    "plain, nothing known": (
        EMPTY, call(Probe.FIRST, ORDINARY, has_products=False), Kind.DIRECT, Reason.FIRST, KEEP,
    ),
    "plain, required, nothing known": (
        EMPTY, call(Probe.FIRST, ORDINARY, has_products=False, required=True), Kind.DIRECT,
        Reason.FIRST, KEEP,
    ),
    "plain, required, seen once": (
        SEEN_ONCE, call(made=ORDINARY, has_products=False, required=True), Kind.CAPTURE,
        Reason.WARM, KEEP,
    ),
    "plain, required, though it has experts": (
        EMPTY, call(Probe.FIRST, SWITCHED_OFF, required=True), Kind.FAILED, Reason.NOT_READY, KEEP,
    ),
    "plain, though it has experts": (
        EMPTY, call(Probe.FIRST, SWITCHED_OFF), Kind.DIRECT, Reason.FIRST, KEEP,
    ),
    "plain, changed": (
        PLAIN, call(Probe.CHANGED, ORDINARY, has_products=False), Kind.DIRECT, Reason.CHANGED, KEEP,
    ),
    "plain, seen once": (
        replace(PLAIN, capture=None), call(made=ORDINARY, has_products=False), Kind.CAPTURE,
        Reason.WARM, KEEP,
    ),
    "plain, captured, unchanged": (
        PLAIN, call(made=ORDINARY, has_products=False), Kind.REPLAY, Reason.UNCHANGED, KEEP,
    ),
    "plain, captured, changed before": (
        replace(PLAIN, is_warm=False), call(made=ORDINARY, has_products=False), Kind.UPDATE,
        Reason.WARM, KEEP,
    ),
    "plain, captured, its executable gone": (
        replace(PLAIN, capture=CaptureState(is_grouped=False, has_executable=False)),
        call(made=ORDINARY, has_products=False), Kind.CAPTURE, Reason.WARM, KEEP,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "given", "kind", "reason", "retention"), PATHS.values(), ids=PATHS
)
def test_a_call_does(
    entry: EntryState, given: CallFacts, kind: Kind, reason: Reason, retention: Retention
) -> None:
    found = decide(entry, given)
    assert (found.kind, found.reason, found.retention) == (kind, reason, retention)
    assert found.uses_graph is (kind in (Kind.CAPTURE, Kind.REPLAY, Kind.UPDATE))


def test_every_kind_but_the_one_that_the_driver_brings_is_decided() -> None:
    assert {kind for _, _, kind, _, _ in PATHS.values()} == set(Kind) - {Kind.REINSTANTIATE}


# ---- what ends a capture, item by item ----------------------------------------------------------

DEAD_OWNER = Witnesses.of([Owner()])
ADAPTED = MANIFEST.adapted("lora", ["layers.0.experts.down"])
ENDS: dict[str, tuple[EntryState, CallFacts, Reason, Retention]] = {
    "another manifest": (
        CAPTURED, call(generation=6), Reason.GENERATION, RESET,
    ),
    "a LoRA adapter, which is another manifest": (
        CAPTURED,
        call(generation=6, made=plan(published=Published(ADAPTED, 6), registered=ADAPTED)),
        Reason.COVERAGE, RESET,
    ),
    "changed without permission": (CAPTURED, call(Probe.CHANGED), Reason.PROPERTIES, DROP),
    "coverage lost": (CAPTURED, call(made=plan(coverage=UNCERTIFIED)), Reason.COVERAGE, DROP),
    "outcome not grouped": (
        CAPTURED, call(made=plan(sightings=seen(0, equivalence="x"))), Reason.NOT_READY, DROP,
    ),
    "a plan that is corrupt": (
        CAPTURED, call(made=plan(sightings=seen(0, route=None))), Reason.PLAN_ERROR, DROP,
    ),
    "no plan": (CAPTURED, call(made=None), Reason.UNAVAILABLE, DROP),
    "streams not coherent": (
        CAPTURED, call(streams=Streams.INCOHERENT), Reason.STREAMS_INCOHERENT, DROP,
    ),
    "other resources": (
        CAPTURED, call(Probe.CHANGED, options=ON, fingerprint=fingerprint(rank=1)),
        Reason.FINGERPRINT, DROP,
    ),
    "other owners": (
        CAPTURED, call(Probe.CHANGED, options=ON, owners=OwnersMatch.DIFFERENT), Reason.OWNERS,
        DROP,
    ),
    "an owner is gone": (
        replace(CAPTURED, capture=replace(CAPTURE, witnesses=DEAD_OWNER)), call(), Reason.OWNERS,
        DROP,
    ),
    "something cannot be captured any more": (
        CAPTURED, call(obstacle="a copy to the host"), Reason.NOT_CAPTURABLE, DROP,
    ),
    "no cached experts any more": (
        CAPTURED, call(made=ORDINARY, has_products=False), Reason.NOT_NEEDED, DROP,
    ),
    "no slots any more": (CAPTURED, call(has_context=False), Reason.NO_CONTEXT, DROP),
    "its graph is gone": (
        replace(CAPTURED, capture=replace(CAPTURE, has_graph=False)), call(),
        Reason.CAPTURE_INCOMPLETE, DROP,
    ),
    "its executable is gone": (
        replace(CAPTURED, capture=replace(CAPTURE, has_executable=False)), call(),
        Reason.CAPTURE_INCOMPLETE, DROP,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "given", "reason", "retention"), ENDS.values(), ids=ENDS)
def test_a_capture_ends_by(
    entry: EntryState, given: CallFacts, reason: Reason, retention: Retention
) -> None:
    found = decide(entry, given)
    assert (found.reason, found.retention) == (reason, retention)
    assert not found.uses_graph
    left = settle(entry, found, given)
    assert left.capture is None
    assert not left.is_warm


def test_an_evicted_entry_and_one_of_another_manifest_keep_nothing() -> None:
    assert {each.reason for each in INVALIDATIONS} == {Reason.GENERATION, Reason.EVICTED}
    for each in INVALIDATIONS:
        assert CAPTURED.after(each.retention) == EMPTY


def test_a_call_that_lost_its_generation_keeps_the_reason_why_it_has_no_graph() -> None:
    found = decide(CAPTURED, call(generation=6, made=None))
    assert (found.kind, found.reason, found.retention) == (
        Kind.DECLINED, Reason.UNAVAILABLE, RESET,
    )  # fmt: skip
    plain = decide(CAPTURED, call(generation=6))
    assert (plain.kind, plain.detail) == (Kind.DIRECT, "expected 5, got 6")


def test_a_plain_capture_does_not_ask_for_the_generation() -> None:
    given = call(made=ORDINARY, has_products=False, generation=99)
    assert decide(PLAIN, given).kind is Kind.REPLAY


# what ends a capture in other systems, and does not end one here
KEPT: dict[str, tuple[CallFacts, Reason]] = {
    "another meaning": (
        call(certificate=replace(CERTIFICATE, namespace=Namespace.DRAFT)), Reason.SEMANTICS,
    ),
    "other row semantics": (
        call(certificate=replace(CERTIFICATE, row_semantics=RowSemantics.SEQUENTIAL)),
        Reason.SEMANTICS,
    ),
    "another owner": (call(certificate=replace(CERTIFICATE, owner=2)), Reason.SEMANTICS),
    "a malformed certificate": (
        call(certificate=replace(CERTIFICATE, version=9)), Reason.CERTIFICATE,
    ),
    "another meaning whose plan is staged": (
        call(
            certificate=replace(CERTIFICATE, owner=2),
            made=plan(sightings=seen(0, equivalence="x"), certificate=None),
        ),
        Reason.NOT_READY,
    ),
    "another meaning in streams that differ": (
        call(certificate=replace(CERTIFICATE, owner=2), streams=Streams.INCOHERENT),
        Reason.SEMANTICS,
    ),
    "another phase": (call(made=PROMPT), Reason.PHASE),
    "graphs switched off": (call(is_disabled=True), Reason.DISABLED),
}  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), KEPT.values(), ids=KEPT)
def test_a_capture_outlives(given: CallFacts, reason: Reason) -> None:
    found = decide(CAPTURED, given)
    assert (found.kind, found.reason) == (Kind.DECLINED, reason)
    left = settle(CAPTURED, found, given)
    assert left.capture is CAPTURE
    assert left.plan is PLAN
    # the next step of the captured kind replays
    assert decide(left, call()).kind is Kind.REPLAY


# ---- retention over a prompt --------------------------------------------------------------------

RETAINED = {"grouped": PROMPT, "staged": STAGED_PROMPT}


@pytest.mark.parametrize("made", RETAINED.values(), ids=RETAINED)
@pytest.mark.parametrize("options", [MoEOptions(*each) for each in product((0, 1), repeat=2)])
@pytest.mark.parametrize("kind", [Probe.SAME, Probe.CHANGED, Probe.COUNT])
def test_a_prompt_neither_updates_nor_ends_a_decode_capture(
    made: ExpertPlan, options: MoEOptions, kind: Probe
) -> None:
    given = call(kind, made, options=options)
    assert retention_obstacles(CAPTURED, given) == ()
    found = decide(CAPTURED, given)
    assert (found.kind, found.reason, found.retention) == (Kind.DECLINED, Reason.PHASE, RETAIN)
    assert found.way is made.fallback
    left = settle(CAPTURED, found, given)
    assert left == replace(CAPTURED, properties=PROPERTIES.without_uid())


def test_a_decode_step_does_not_end_the_capture_of_a_prompt_either() -> None:
    captured = replace(CAPTURED, capture=replace(CAPTURE, phase=PROMPT.phase), plan=PROMPT)
    found = decide(captured, call())
    assert (found.reason, found.retention) == (Reason.PHASE, RETAIN)
    assert decide(captured, call(made=PROMPT)).kind is Kind.REPLAY


def test_after_a_retained_prompt_the_nodes_are_looked_at_again() -> None:
    given = call(made=PROMPT)
    left = settle(CAPTURED, decide(CAPTURED, given), given)
    looked = probe(left.properties, 8, KEY, lambda: NEW_PROPERTIES.records)
    assert looked.probe is Probe.CHANGED  # though the uid is that of the capture
    assert probe(left.properties, 8, KEY, lambda: PROPERTIES.records).probe is Probe.SAME


def with_subject(**more: Any) -> ExpertPlan:
    return replace(PROMPT, subject=replace(PROMPT.subject, **more))


RECORD = PROMPT.subject.coverage.record
NOT_RETAINED: dict[str, tuple[EntryState, CallFacts, set[RetentionRule]]] = {
    "the plan was made for another step": (
        CAPTURED, call(made=with_subject(certificate=replace(CERTIFICATE, owner=9))),
        {RetentionRule.AGREEMENT},
    ),
    "other products than certified": (
        CAPTURED, call(made=with_subject(products=PROMPT.subject.products[:-1])),
        {RetentionRule.CERTIFIED},
    ),
    "not certified": (
        CAPTURED, call(made=with_subject(coverage=UNCERTIFIED)),
        {RetentionRule.CERTIFIED, RetentionRule.COVERAGE},
    ),
    "another number of nodes": (
        CAPTURED,
        call(made=with_subject(nodes=replace(PROMPT.subject.nodes, nodes=("decode0",)))),
        {RetentionRule.NODES},
    ),
    "coverage incomplete": (
        CAPTURED,
        call(made=with_subject(coverage=replace(PROMPT.subject.coverage, standing=()))),
        {RetentionRule.COVERAGE},
    ),
    "no complete capture": (
        replace(CAPTURED, is_warm=False), call(made=PROMPT), {RetentionRule.CAPTURE},
    ),
    "an owner of the capture is gone": (
        replace(CAPTURED, capture=replace(CAPTURE, witnesses=DEAD_OWNER)), call(made=PROMPT),
        {RetentionRule.CAPTURE},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "given", "rules"), NOT_RETAINED.values(), ids=NOT_RETAINED)
def test_a_capture_is_not_retained_where(
    entry: EntryState, given: CallFacts, rules: set[RetentionRule]
) -> None:
    assert set(retention_obstacles(entry, given)) == rules
    found = decide(entry, given)
    assert (found.kind, found.reason, found.retention) == (
        Kind.DECLINED, Reason.NOT_RETAINED, DROP,
    )  # fmt: skip


def test_only_a_plan_of_the_other_phase_retains() -> None:
    for entry, given in [
        (CAPTURED, call()),
        (CAPTURED, call(made=None)),
        (SEEN_ONCE, call(made=PROMPT)),
        (PLAIN, call(made=PROMPT)),
    ]:
        assert retention_obstacles(entry, given) == (RetentionRule.PLAN,)
    seen_rules = set().union(*(rules for _, _, rules in NOT_RETAINED.values()))
    assert seen_rules | {RetentionRule.PLAN} == set(RetentionRule)


# ---- whole scenarios, with variants side by side ------------------------------------------------


def test_two_calls_warm_up_and_the_third_replays() -> None:
    variants = Variants()
    assert kinds(variants, 5) == [Kind.DIRECT, Kind.CAPTURE, *[Kind.REPLAY] * 3]


def test_a_prompt_between_replays_loses_nothing() -> None:
    variants = Variants()
    kinds(variants, 3)
    before = dict(variants.entries)
    assert variants.step(prompt=True).way is Way.DIRECT
    assert kinds(variants, 2) == [Kind.REPLAY] * 2
    assert [each.capture for each in variants.entries.values()] == [
        each.capture for each in before.values()
    ]
    assert variants.captures == 1


@pytest.mark.parametrize("on", [True, False], ids=["option on", "option off"])
def test_an_output_that_moves_there_and_back(on: bool) -> None:
    variants = Variants(MoEOptions(decode_boundary_overlap=on))
    kinds(variants, 3)
    there = variants.step(records=NEW_PROPERTIES.records, uid=9)
    back = variants.step(uid=10)
    if on:
        assert (there.kind, back.kind) == (Kind.UPDATE, Kind.UPDATE)
        assert variants.step(uid=10).kind is Kind.REPLAY
        assert variants.captures == 1
    else:
        assert (there.kind, there.reason) == (Kind.DECLINED, Reason.PROPERTIES)
        assert (back.kind, back.reason) == (Kind.DIRECT, Reason.CHANGED)
        assert kinds(variants, 2, uid=10) == [Kind.CAPTURE, Kind.REPLAY]


def test_another_namespace_makes_a_sibling_and_the_first_replays_again() -> None:
    variants = Variants()
    draft = replace(CERTIFICATE, namespace=Namespace.DRAFT)
    kinds(variants, 3)
    (first,) = variants.entries.values()
    assert kinds(variants, 3, certificate=draft) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]
    assert variants.step().kind is Kind.REPLAY
    assert next(iter(variants.entries.values())).capture is first.capture
    assert len(variants.entries) == 2


def test_the_same_manifest_published_again_ends_the_capture() -> None:
    variants = Variants()
    kinds(variants, 3)
    variants.generation = 6
    again = variants.step()
    assert (again.kind, again.reason, again.retention) == (
        Kind.DIRECT, Reason.GENERATION, RESET,
    )  # fmt: skip
    assert kinds(variants, 2) == [Kind.CAPTURE, Kind.REPLAY]


def test_one_plan_serves_all_calls_and_nothing_else_is_counted() -> None:
    variants = Variants()
    kinds(variants, 6)
    counted = variants.counting.snapshot()
    assert (counted.plan_calls, counted.plan_compiles, counted.plan_reuses) == (6, 1, 5)
    assert (counted.calls, counted.direct, counted.captures, counted.replays) == (6, 1, 1, 4)
    assert (counted.fallback, counted.rollback, counted.failed) == (0, 0, 0)
    assert (counted.prepare_error, counted.finish_error, counted.declined) == (0, 0, 0)


def test_while_a_manifest_is_replaced_required_work_fails_and_ordinary_work_falls_back() -> None:
    variants = Variants()
    kinds(variants, 3)
    kinds(variants, 3, certificate=REQUIRED)
    variants.admission = Admission.REPLACING
    required = variants.step(REQUIRED)
    assert (required.kind, required.reason) == (Kind.FAILED, Reason.UNAVAILABLE)
    assert variants.counting.snapshot().required_unsupported == 1
    ordinary = variants.step()
    assert (ordinary.kind, ordinary.way) == (Kind.DECLINED, Way.STAGED)
    variants.admission, variants.generation = Admission.OPEN, 6
    for certificate in (CERTIFICATE, REQUIRED):
        after = kinds(variants, 3, certificate=certificate)
        assert after == [Kind.CAPTURE, Kind.REPLAY, Kind.REPLAY]


def test_rounds_of_draft_verify_decode_and_prompt_capture_each_variant_once() -> None:
    variants = Variants(BOTH)
    draft = REQUIRED
    verify = replace(
        REQUIRED, namespace=Namespace.MAIN, row_semantics=RowSemantics.SPECULATIVE, sequences=1
    )
    for _ in range(50):
        variants.step(draft, graph="draft")
        variants.step(verify, graph="verify")
        variants.step(graph="decode")
        variants.step(graph="prompt", prompt=True)
    counted = variants.counting.snapshot()
    assert variants.captures == 4 == len(variants.entries)
    assert (counted.direct, counted.captures, counted.replays) == (4, 4, 192)


# ---- the parts of a variant ---------------------------------------------------------------------

LACKS: dict[str, tuple[EntryState, str]] = {
    "no capture": (SEEN_ONCE, "no grouped capture"),
    "a plain capture": (PLAIN, "no grouped capture"),
    "no graph": (replace(CAPTURED, capture=replace(CAPTURE, has_graph=False)), "no graph"),
    "no executable": (
        replace(CAPTURED, capture=replace(CAPTURE, has_executable=False)), "no executable",
    ),
    "not warm": (replace(CAPTURED, is_warm=False), "not warm"),
    "no semantic key": (
        replace(CAPTURED, capture=replace(CAPTURE, semantic_key=0)), "no semantic key",
    ),
    "no fingerprint": (
        replace(CAPTURED, capture=replace(CAPTURE, fingerprint=None)), "no fingerprint",
    ),
    "no properties": (replace(CAPTURED, properties=None), "no properties"),
    "properties of no node": (
        replace(CAPTURED, properties=Properties(8, KEY, ())), "no properties",
    ),
    "no witnesses": (replace(CAPTURED, capture=replace(CAPTURE, witnesses=None)), "no owners"),
    "witnesses of nobody": (
        replace(CAPTURED, capture=replace(CAPTURE, witnesses=Witnesses(()))), "no owners",
    ),
    "an owner is gone": (
        replace(CAPTURED, capture=replace(CAPTURE, witnesses=DEAD_OWNER)), "an owner is gone",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "lacking"), LACKS.values(), ids=LACKS)
def test_a_capture_is_complete_and_live_but_for(entry: EntryState, lacking: str) -> None:
    assert entry.shortfalls() == (lacking,)
    assert CAPTURED.shortfalls() == ()


def test_what_is_left_of_a_variant() -> None:
    assert CAPTURED.after(KEEP) is CAPTURED
    assert CAPTURED.after(RETAIN).properties == PROPERTIES.without_uid()
    assert CAPTURED.after(RETAIN).capture is CAPTURE
    dropped = CAPTURED.after(DROP, NEW_PROPERTIES)
    assert dropped == EntryState(NEW_PROPERTIES, is_warm=False, plan=PLAN)
    assert CAPTURED.after(DROP).properties == PROPERTIES
    assert CAPTURED.after(RESET, NEW_PROPERTIES) == EMPTY
    # a plain capture outlives both, but for being warm
    assert PLAIN.after(DROP) == replace(PLAIN, is_warm=False)
    assert PLAIN.after(RESET) == EntryState(capture=PLAIN.capture)
    assert EMPTY.after(RETAIN) == EMPTY


@pytest.mark.parametrize(
    ("one", "other"),
    list(product(Retention, repeat=2)),
    ids=lambda retention: retention.name,
)
def test_the_stronger_of_two_retentions_holds(one: Retention, other: Retention) -> None:
    order = list(Retention)
    assert one.with_at_least(other) is order[max(order.index(one), order.index(other))]
    assert one.drops is (one in (DROP, RESET))
