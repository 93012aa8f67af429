"""The table of declines and failures: what a shortfall means for ordinary and for required work.

Ordinary work falls back with its reason. Only a corrupt plan, and what breaks after a dispatch
began, raises. Required work raises wherever its plan cannot be prepared or its capture does not
hold, before anything is launched.
"""

from __future__ import annotations

from typing import NamedTuple

from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.manifests.names import Kind, Way


class Ruling(NamedTuple):
    """What a call does for one reason.

    Args:
        kind: Declined or failed; staged where the work is what it should be without a graph.
        retention: What becomes of what its entry holds.
        way: How its work runs; None: as its plan says, or staged where it has none.
    """

    kind: Kind
    retention: Retention
    way: Way | None = None


def _declined(retention: Retention, way: Way | None = None) -> Ruling:
    return Ruling(Kind.DECLINED, retention, way)


def _failed(retention: Retention) -> Ruling:
    return Ruling(Kind.FAILED, retention, Way.NOTHING)


_KEEP, _RETAIN, _DROP, _RESET = Retention
_DIRECT, _STAGED = Way.DIRECT, Way.STAGED


class Row(NamedTuple):
    """The rulings of one reason."""

    ordinary: Ruling
    required: Ruling


def _both(ruling: Ruling) -> Row:
    return Row(ruling, ruling)


DECLINE_TABLE: dict[Reason, Row] = {
    # nothing is wrong with what was captured
    Reason.DISABLED: _both(_declined(_KEEP)),
    Reason.BACKEND: _both(_declined(_KEEP)),
    Reason.PHASE: _both(_declined(_RETAIN)),
    Reason.SEMANTICS: _both(_declined(_KEEP)),
    Reason.RANKS: _both(_declined(_RETAIN)),
    Reason.HOST_STAGED: _both(Ruling(Kind.STAGED, _KEEP, _STAGED)),
    # the plan
    Reason.CERTIFICATE: Row(_declined(_KEEP), _failed(_KEEP)),
    Reason.NO_CONTEXT: Row(_declined(_DROP, _STAGED), _failed(_DROP)),
    Reason.UNAVAILABLE: Row(_declined(_DROP, _STAGED), _failed(_DROP)),
    Reason.NOT_READY: Row(_declined(_DROP), _failed(_KEEP)),
    Reason.PLAN_ERROR: _both(_failed(_DROP)),
    Reason.COVERAGE: Row(_declined(_DROP), _failed(_DROP)),
    # the graph
    Reason.NOT_NEEDED: _both(_declined(_DROP)),
    Reason.NOT_RETAINED: _both(_declined(_DROP)),
    Reason.NOT_CAPTURABLE: _both(_declined(_DROP)),
    Reason.PROPERTIES: _both(_declined(_DROP)),
    Reason.CAPTURE_INCOMPLETE: _both(_declined(_DROP)),
    # without a stream no grouped kernel can be put in order
    Reason.STREAMS_UNRESOLVED: Row(_declined(_DROP, _STAGED), _failed(_KEEP)),
    Reason.STREAMS_INCOHERENT: Row(_declined(_DROP, _STAGED), _failed(_DROP)),
    # what was captured does not hold: kept, it would fail again and again
    Reason.NO_FINGERPRINT: Row(_declined(_DROP, _DIRECT), _failed(_KEEP)),
    Reason.FINGERPRINT: Row(_declined(_DROP, _DIRECT), _failed(_DROP)),
    Reason.OWNERS: Row(_declined(_DROP, _DIRECT), _failed(_DROP)),
    Reason.NO_WITNESSES: _both(_declined(_DROP, _DIRECT)),
    # no lease or no exclusive use: slots must not be touched
    Reason.DISPATCH: Row(_declined(_DROP, _STAGED), _failed(_DROP)),
    Reason.ACTIVATION: Row(_declined(_DROP, _DIRECT), _failed(_DROP)),
    # after the dispatch began
    Reason.DRIVER: _both(_failed(_KEEP)),
    Reason.EVALUATOR: _both(_failed(_RESET)),
    Reason.FINISH: _both(_failed(_RESET)),
}
"""Every reason that stands between a call and its graph."""


def ruling(reason: Reason, *, is_required: bool) -> Ruling:
    """What ``reason`` means for a call."""
    row = DECLINE_TABLE[reason]
    return row.required if is_required else row.ordinary


class Invalidation(NamedTuple):
    """What an event that is no call does to an entry."""

    reason: Reason
    retention: Retention


INVALIDATIONS = (
    Invalidation(Reason.GENERATION, Retention.RESET),
    Invalidation(Reason.EVICTED, Retention.RESET),
)
"""Events beside calls that end a capture: another manifest (so a LoRA adapter), an eviction."""
