"""All combinations of what can be known of a variant and a call: what holds of every decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from helpers.moe_calls import (
    CAPTURE,
    CAPTURED,
    FINGERPRINT,
    PLAIN,
    REQUIRED,
    SEEN_ONCE,
    call,
    required_entry,
)
from helpers.moe_cases import CERTIFICATE, fingerprint
from helpers.moe_manifests import manifest
from helpers.moe_plans import plan, prompt_rows, seen, subject

from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.coverage import Uncertified, UncertifiedReason
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.decisions.settling import settle
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import Kind, Phase, PlanOutcome, Way

FEW = manifest(slots=4)
UNCERTIFIED = replace(subject().coverage, record=Uncertified(UncertifiedReason.MOVED))


def plans(certificate: Certificate) -> dict[str, ExpertPlan | None]:
    return {
        "unavailable": None,
        "grouped": plan(certificate=certificate),
        "more routes than slots": plan(FEW, certificate=certificate),
        "staged": plan(sightings=seen(0, equivalence="x"), certificate=certificate),
        "prompt": plan(sightings=prompt_rows(4), certificate=certificate),
        "staged prompt": plan(FEW, sightings=prompt_rows(4, FEW), certificate=certificate),
        "ordinary": plan(products=(), sightings=(), certificate=certificate),
        "uncovered": plan(coverage=UNCERTIFIED, certificate=certificate),
        "error": plan(sightings=seen(0, route=None), certificate=certificate),
    }


ORDINARY, REQUIRING = plans(CERTIFICATE), plans(REQUIRED)
ENTRIES = {
    "empty": EntryState(),
    "seen once": SEEN_ONCE,
    "captured": CAPTURED,
    "captured, its executable gone": replace(
        CAPTURED, capture=replace(CAPTURE, has_executable=False)
    ),
    "captured a prompt": replace(CAPTURED, capture=replace(CAPTURE, phase=Phase.PROMPT)),
    "plain": PLAIN,
}
PROBES = (Probe.FIRST, Probe.SAME, Probe.CHANGED)
STREAMS = (Streams.COHERENT, Streams.INCOHERENT)
OPTIONS = (MoEOptions(), MoEOptions(decode_boundary_overlap=True))
OTHER = fingerprint(rank=1)


def combinations() -> Iterator[tuple[EntryState, CallFacts]]:
    """An entry of its own meaning, and a call: ordinary, then required."""
    facts = product(
        PROBES, ORDINARY, STREAMS, (FINGERPRINT, OTHER, None),
        (OwnersMatch.SAME, OwnersMatch.DIFFERENT), OPTIONS, (5, 6), ("", "a copy to the host"),
    )  # fmt: skip
    for kind, name, streams, found, owners, options, generation, obstacle in facts:
        more = {
            "streams": streams, "fingerprint": found, "owners": owners, "options": options,
            "generation": generation, "obstacle": obstacle, "has_products": name != "ordinary",
        }  # fmt: skip
        ordinary = call(kind, ORDINARY[name], **more)
        required = call(kind, REQUIRING[name], required=True, **more)
        for entry in ENTRIES.values():
            yield entry, ordinary
            yield required_entry(entry), required


def complaints(entry: EntryState, given: CallFacts, found: Decision) -> Iterator[str]:
    capture, plan_of = entry.grouped, given.binding.plan
    is_plain = plan_of is not None and plan_of.outcome is PlanOutcome.ORDINARY
    if (found.kind is Kind.FAILED) is not (found.way is Way.NOTHING):
        yield "what fails launches nothing, and what launches nothing fails"
    if found.kind is Kind.FAILED and not given.is_required and found.reason != Reason.PLAN_ERROR:
        yield "ordinary work fails for a corrupt plan alone"
    if given.is_required and plan_of is not None and not is_plain:
        is_ready = plan_of.outcome.is_grouped
        if not is_ready and found.kind is not Kind.FAILED:
            yield "required work runs by a grouped plan or fails"
    if capture is not None and capture.generation != given.generation:
        if found.retention is not Retention.RESET:
            yield "a capture of another manifest goes"
        if found.uses_graph and found.kind is not Kind.CAPTURE:
            yield "a capture of another manifest is never launched"
    if found.uses_graph:
        if found.retention is not Retention.KEEP:
            yield "what is launched is kept"
        if given.obstacle:
            yield "what cannot be captured uses no graph"
        if not is_plain:
            yield from _grouped_complaints(entry, given, found)
    if found.kind is Kind.UPDATE and not is_plain and plan_of.outcome.is_prompt:
        yield "a prompt updates nothing"
    if plan_of is not None and plan_of.outcome.is_prompt and capture is not None:
        lost = capture.generation != given.generation or entry.shortfalls()
        fine = plan_of.subject.coverage.is_complete
        if capture.phase is not plan_of.phase and fine and not lost and found.retention.drops:
            yield "a prompt ends no capture of decoding"


def _grouped_complaints(entry: EntryState, given: CallFacts, found: Decision) -> Iterator[str]:
    capture = entry.grouped
    if given.streams is not Streams.COHERENT:
        yield "a graph of experts is on one stream"
    if found.kind is Kind.REPLAY and not (capture and given.probed.probe.is_same):
        yield "a replay is of what was captured"
    if found.kind in (Kind.REPLAY, Kind.UPDATE) and entry.shortfalls():
        yield "only a complete, live capture is launched"
    if found.kind is Kind.UPDATE:
        same = given.fingerprint == FINGERPRINT and given.owners is OwnersMatch.SAME
        if not (given.options.decode_boundary_overlap and same):
            yield "an update needs the option, equal resources and owners"
    if found.kind is Kind.CAPTURE and (capture or given.fingerprint is None):
        yield "a capture is the first, over known resources"


def test_of_every_combination_holds_what_must_hold() -> None:
    wrong: Counter[str] = Counter()
    kinds: Counter[Kind] = Counter()
    for entry, given in combinations():
        found = decide(entry, given)
        kinds[found.kind] += 1
        wrong.update(complaints(entry, given, found))
    assert wrong == {}
    assert set(kinds) == set(Kind) - {Kind.REINSTANTIATE}
    assert sum(kinds.values()) > 30_000


def test_a_decision_that_is_wrong_would_be_seen() -> None:
    replay = decide(CAPTURED, call())
    for given in [
        call(generation=6),
        call(Probe.CHANGED),
        call(streams=Streams.INCOHERENT),
        call(obstacle="a copy to the host"),
    ]:
        assert list(complaints(CAPTURED, given, replay))
    assert not list(complaints(CAPTURED, call(), replay))
    dropped = replace(decide(CAPTURED, call(made=ORDINARY["prompt"])), retention=Retention.DROP)
    assert list(complaints(CAPTURED, call(made=ORDINARY["prompt"]), dropped))


def captured_by(found: Decision, given: CallFacts) -> CaptureState | None:
    if found.kind not in (Kind.CAPTURE, Kind.UPDATE):
        return None
    is_plain = given.outcome is PlanOutcome.ORDINARY
    plain = CaptureState(is_grouped=False)
    made = replace(
        CAPTURE,
        semantic_key=given.semantic_key,
        generation=given.generation,
        phase=given.binding.plan.phase,
    )
    return plain if is_plain else made


def test_after_any_call_three_calls_with_nothing_wrong_end_in_a_replay() -> None:
    fine, required = call(), call(made=REQUIRING["grouped"], required=True)
    ends: Counter[Kind] = Counter()
    for number, (before, given) in enumerate(combinations()):
        if number % 17:  # what matters repeats: a share of them is enough
            continue
        found = decide(before, given)
        entry = settle(before, found, given, captured_by(found, given))
        after = required if given.is_required else fine
        if entry.grouped and entry.grouped.phase is Phase.PROMPT:
            prompt = (REQUIRING if given.is_required else ORDINARY)["prompt"]
            after = replace(after, binding=replace(after.binding, plan=prompt))
        for _ in range(3):
            follow = decide(entry, after)
            assert follow.kind is not Kind.FAILED
            entry = settle(entry, follow, after, captured_by(follow, after))
        ends[decide(entry, after).kind] += 1
    assert set(ends) == {Kind.REPLAY}
