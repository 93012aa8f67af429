"""Activation: the last look, under the lock, before a decided call begins. Pure.

Between the decision and the beginning another thread may have changed resources: what was decided
is compared with what is there now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.decisions.resource_fingerprint import FingerprintRefusal, ResourceFingerprint
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import Kind, PlanOutcome, Way
from graphcore.moe.manifests.ownership import Refusal


@dataclass(frozen=True, slots=True)
class ActivationFacts:
    """What is there now.

    Args:
        refusal: Why there is no lease or no exclusive use; None where there is.
        fingerprint: Of the resources now.
        owners: How those of now stand to those at the capture.
        is_clock_active: Whether the device clock counts; a replay goes on counting.
        is_clock_exhausted: Whether it has no step left.
    """

    refusal: Refusal | None = None
    fingerprint: ResourceFingerprint | FingerprintRefusal | None = None
    owners: OwnersMatch = OwnersMatch.NONE
    is_clock_active: bool = True
    is_clock_exhausted: bool = False


def activate(
    entry: EntryState,
    decision: Decision,
    facts: ActivationFacts,
    decided: ResourceFingerprint | None = None,
) -> Decision:
    """``decision``, or the one that takes its place.

    Args:
        entry: The variant.
        decision: Of :func:`graphcore.moe.decisions.state_machine.decide`.
        facts: What is there now.
        decided: The fingerprint that a capture or an update was decided with.
    """
    if decision.way not in (Way.GRAPH, Way.DIRECT):
        return decision  # neither slots nor a graph are used
    if decision.plan is None or decision.plan.outcome is PlanOutcome.ORDINARY:
        return decision
    if facts.refusal is not None:
        return decision.turned(Reason.DISPATCH, str(facts.refusal))
    if decision.way is Way.DIRECT:
        return decision
    obstacle = next(_obstacles(entry, decision.kind, facts, decided), None)
    return decision if obstacle is None else decision.turned(Reason.ACTIVATION, obstacle)


def _obstacles(
    entry: EntryState, kind: Kind, facts: ActivationFacts, decided: ResourceFingerprint | None
) -> Iterator[str]:
    capture = entry.grouped
    expected = decided
    if kind is Kind.REPLAY:
        expected = None if capture is None else capture.fingerprint
    if not isinstance(facts.fingerprint, ResourceFingerprint):
        yield f"no fingerprint: {facts.fingerprint}"
    elif expected is None:
        yield "no fingerprint to compare with"
    elif differences := expected.compare(facts.fingerprint):
        yield "; ".join(differences)
    if kind is not Kind.CAPTURE and facts.owners is not OwnersMatch.SAME:
        yield facts.owners.value
    if kind is Kind.REPLAY and not facts.is_clock_active:
        yield "the device clock does not count"
    if facts.is_clock_exhausted:
        yield "the device clock has no step left"
