"""The boundary update: may a decode graph that changed update the executable of its capture?

Nine preconditions, all of which must hold. What may change is everything outside the experts'
resources: extents of the key/value cache, addresses of outputs, row counts of other nodes, copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.decisions.resource_fingerprint import ResourceFingerprint
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import PlanOutcome


class Precondition(Enum):
    """What must hold, in the order in which it is looked at."""

    OPTION = "the option decode_boundary_overlap is on"
    OUTCOME = "the plan is one of decoding, every group grouped"
    CAPTURE = "there is a complete, live capture"
    CAPTURABLE = "the graph can be captured"
    COVERAGE = "coverage is complete"
    STRATEGIES = "every group is served from slots"
    STREAMS = "all groups are on one stream"
    FINGERPRINT = "the resources are those of the capture"
    OWNERS = "so are their owners"

    @property
    def reason(self) -> Reason:
        """Why a call is declined where it does not hold."""
        return _REASONS[self]


_REASONS = {
    Precondition.OPTION: Reason.PROPERTIES,
    Precondition.OUTCOME: Reason.NOT_READY,
    Precondition.CAPTURE: Reason.CAPTURE_INCOMPLETE,
    Precondition.CAPTURABLE: Reason.NOT_CAPTURABLE,
    Precondition.COVERAGE: Reason.COVERAGE,
    Precondition.STRATEGIES: Reason.HOST_STAGED,
    Precondition.STREAMS: Reason.STREAMS_INCOHERENT,
    Precondition.FINGERPRINT: Reason.FINGERPRINT,
    Precondition.OWNERS: Reason.OWNERS,
}

Obstacle = tuple[Precondition, str]
"""A precondition that does not hold, and in which way."""


def boundary_obstacles(entry: EntryState, call: CallFacts) -> tuple[Obstacle, ...]:
    """What forbids the update, in order; empty where it is allowed; the option alone is enough."""
    return tuple(_obstacles(entry, call))


def _obstacles(entry: EntryState, call: CallFacts) -> Iterator[Obstacle]:
    plan, coverage = call.binding.plan, call.coverage
    if not call.options.decode_boundary_overlap:
        yield Precondition.OPTION, "it is off"
        return  # nothing else was asked for
    if call.outcome is not PlanOutcome.DECODE_GROUPED:
        yield Precondition.OUTCOME, "no plan" if plan is None else plan.why()
    if shortfalls := entry.shortfalls():
        yield Precondition.CAPTURE, "; ".join(shortfalls)
    if call.obstacle:
        yield Precondition.CAPTURABLE, call.obstacle
    if coverage is None or not coverage.is_complete:
        missing = "no plan" if coverage is None else "; ".join(coverage.shortfalls())
        yield Precondition.COVERAGE, missing
    if plan is not None and not plan.is_device_direct:
        yield Precondition.STRATEGIES, plan.why_not_direct()
    if call.streams is not Streams.COHERENT:
        yield Precondition.STREAMS, call.streams.value
    if difference := fingerprint_difference(entry, call):
        yield Precondition.FINGERPRINT, difference
    if call.owners is not OwnersMatch.SAME:
        yield Precondition.OWNERS, call.owners.value


def fingerprint_difference(entry: EntryState, call: CallFacts) -> str:
    """In which way the resources are not those of the capture; "" where they are."""
    captured = None if entry.capture is None else entry.capture.fingerprint
    if not isinstance(call.fingerprint, ResourceFingerprint):
        return str(call.fingerprint) if call.fingerprint is not None else "not computed"
    if captured is None:
        return "none at the capture"
    return "; ".join(captured.compare(call.fingerprint))
