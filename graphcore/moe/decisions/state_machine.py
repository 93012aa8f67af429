"""The state machine: what a call does, from what is known of its variant and of the call. Pure.

The order of the looks is part of the behaviour: what makes required work fail comes before what
merely declines, and nothing is asked of the resources before plan, phase and streams are fine.
"""

from __future__ import annotations

from dataclasses import replace

from graphcore.moe.decisions.boundary_update import boundary_obstacles, fingerprint_difference
from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.decision import Decision, refuse
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.options import GROUPED_DRIVERS
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.decisions.resource_fingerprint import ResourceFingerprint
from graphcore.moe.decisions.retention import retention_obstacles
from graphcore.moe.manifests.names import Bind, Kind, PlanOutcome, Way


def decide(entry: EntryState, call: CallFacts) -> Decision:
    """What ``call`` does on the variant of ``entry``.

    The doing follows: :func:`graphcore.moe.decisions.activation.activate` looks once more under the
    lock, :mod:`graphcore.moe.decisions.settling` says what is known afterwards.
    """
    lost = _is_of_another_generation(entry, call)
    current = entry.after(Retention.RESET) if lost else entry
    found = _decide(current, call)
    if not lost:
        # a step of another meaning has a variant of its own, and must not cost this one anything
        return replace(found, retention=Retention.KEEP) if _is_of_another(entry, call) else found
    if found.reason is Reason.FIRST and entry.capture is not None:
        detail = f"expected {entry.capture.generation}, got {call.generation}"
        found = replace(found, reason=Reason.GENERATION, detail=detail)
    return replace(found, retention=found.retention.with_at_least(Retention.RESET))


def _is_of_another_generation(entry: EntryState, call: CallFacts) -> bool:
    capture = entry.grouped
    return capture is not None and capture.generation != call.generation


def _is_of_another(entry: EntryState, call: CallFacts) -> bool:
    capture = entry.grouped
    return capture is not None and capture.semantic_key != call.semantic_key


def _decide(entry: EntryState, call: CallFacts) -> Decision:
    refused, plan = _plan_refusal(call), call.binding.plan
    if refused is None and plan is not None:
        refused = _phase_refusal(entry, call, plan) or _graph_refusal(entry, call, plan)
    if refused is not None:
        return _refuse(call, *refused)
    if call.outcome is PlanOutcome.ORDINARY:
        return _plain(entry, call)
    return _on_capture(entry, call) if entry.grouped else _without_capture(entry, call)


Refusal = tuple[Reason, str]


def _refuse(call: CallFacts, reason: Reason, detail: str = "") -> Decision:
    return refuse(reason, detail, call.binding.plan, is_required=call.is_required)


def _go(call: CallFacts, kind: Kind, reason: Reason, detail: str = "") -> Decision:
    way = Way.DIRECT if kind is Kind.DIRECT else Way.GRAPH
    plan = call.binding.plan
    return Decision(kind, reason, detail, way, Retention.KEEP, call.is_required, plan)


def _plan_refusal(call: CallFacts) -> Refusal | None:
    """What is wrong with certificate, plan or coverage; required work fails for any of it."""
    if call.certificate is not None:
        flaws = call.certificate.flaws(call.graph_uid)
        if flaws:
            return Reason.CERTIFICATE, "; ".join(map(str, flaws))
    if call.has_products and not call.has_context:
        return Reason.NO_CONTEXT, ""
    plan = call.binding.plan
    if call.binding.result is Bind.UNAVAILABLE or plan is None:
        return Reason.UNAVAILABLE, call.binding.reason
    if plan.outcome is PlanOutcome.ERROR:
        return Reason.PLAN_ERROR, plan.why()
    if plan.outcome is PlanOutcome.ORDINARY and not call.has_products:
        return None  # nothing in it could be prepared: the draft model may have no experts
    coverage = plan.subject.coverage
    is_short = call.is_required and not coverage.is_complete
    if plan.outcome is PlanOutcome.INCOMPLETE or is_short:
        return Reason.COVERAGE, "; ".join(coverage.shortfalls())
    if call.is_required and not plan.outcome.is_grouped:
        return Reason.NOT_READY, plan.why()
    return None


def _phase_refusal(entry: EntryState, call: CallFacts, plan: ExpertPlan) -> Refusal | None:
    """Whether the capture is one of the other phase, and stays or goes."""
    capture = entry.grouped
    if capture is None or plan.outcome is PlanOutcome.ORDINARY or plan.phase is capture.phase:
        return None
    obstacles = retention_obstacles(entry, call)
    if obstacles:
        return Reason.NOT_RETAINED, "; ".join(f"not so: {each.value}" for each in obstacles)
    return Reason.PHASE, f"{plan.phase.value}, captured {capture.phase.value}"


def _graph_refusal(entry: EntryState, call: CallFacts, plan: ExpertPlan) -> Refusal | None:
    """Why no graph can come of it, whatever was captured."""
    is_plain = plan.outcome is PlanOutcome.ORDINARY
    if not is_plain and not plan.outcome.is_grouped:
        return Reason.NOT_READY, plan.why()
    if is_plain and entry.grouped:
        return Reason.NOT_NEEDED, ""
    if call.is_disabled:
        return Reason.DISABLED, ""
    if call.driver not in GROUPED_DRIVERS:
        return Reason.BACKEND, f"expected driver {' or '.join(GROUPED_DRIVERS)}, got {call.driver}"
    if not is_plain and not plan.is_device_direct:
        return Reason.HOST_STAGED, plan.why_not_direct()
    if call.obstacle:
        return Reason.NOT_CAPTURABLE, call.obstacle
    return None if is_plain else _stream_refusal(entry, call)


def _stream_refusal(entry: EntryState, call: CallFacts) -> Refusal | None:
    if entry.grouped and _is_of_another(entry, call):
        detail = f"expected {entry.grouped.semantic_key:#x}, got {call.semantic_key:#x}"
        return Reason.SEMANTICS, detail
    if call.streams is Streams.UNRESOLVED:
        return Reason.STREAMS_UNRESOLVED, ""
    if call.streams is Streams.INCOHERENT:
        return Reason.STREAMS_INCOHERENT, ""
    return None


def _on_capture(entry: EntryState, call: CallFacts) -> Decision:
    """The variant has a grouped capture of this phase and meaning."""
    if call.probed.probe.is_same:
        shortfalls = entry.shortfalls()
        if not shortfalls:
            return _go(call, Kind.REPLAY, Reason.UNCHANGED)
        gone = shortfalls == ("an owner is gone",)
        reason = Reason.OWNERS if gone else Reason.CAPTURE_INCOMPLETE
        return _refuse(call, reason, "; ".join(shortfalls))
    obstacles = boundary_obstacles(entry, call)
    if not obstacles:
        return _go(call, Kind.UPDATE, Reason.BOUNDARY, str(call.probed))
    first, _ = obstacles[0]
    reason = first.reason
    if reason is Reason.FINGERPRINT and not isinstance(call.fingerprint, ResourceFingerprint):
        reason = Reason.NO_FINGERPRINT
    told = "; ".join(f"not so: {each.value} ({detail})" for each, detail in obstacles)
    return _refuse(call, reason, f"{call.probed}; {told}")


def _without_capture(entry: EntryState, call: CallFacts) -> Decision:
    """The variant has no grouped capture: warm up, or capture now."""
    probe = call.probed.probe
    if entry.properties is None or probe is Probe.FIRST:
        return _go(call, Kind.DIRECT, Reason.FIRST)
    if not probe.is_same:
        return _go(call, Kind.DIRECT, Reason.CHANGED, str(call.probed))
    if not isinstance(call.fingerprint, ResourceFingerprint):
        return _refuse(call, Reason.NO_FINGERPRINT, fingerprint_difference(entry, call))
    if not call.can_watch_owners:
        return _refuse(call, Reason.NO_WITNESSES)
    return _go(call, Kind.CAPTURE, Reason.WARM)


def _plain(entry: EntryState, call: CallFacts) -> Decision:
    """No experts are cached in it: warm up, capture, replay."""
    probe = call.probed.probe
    if entry.properties is None or probe is Probe.FIRST:
        return _go(call, Kind.DIRECT, Reason.FIRST)
    if not probe.is_same:
        return _go(call, Kind.DIRECT, Reason.CHANGED, str(call.probed))
    has_executable = entry.capture is not None and entry.capture.has_executable
    if has_executable and entry.is_warm:
        return _go(call, Kind.REPLAY, Reason.UNCHANGED)
    return _go(call, Kind.UPDATE if has_executable else Kind.CAPTURE, Reason.WARM)
