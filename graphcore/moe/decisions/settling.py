"""Settling: what is known of a variant after a call, whether it went well or failed. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.call_facts import CallFacts
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.manifests.names import Kind

_CAPTURING = (Kind.CAPTURE, Kind.UPDATE, Kind.REINSTANTIATE)


class Failure(Enum):
    """What can go wrong after a call has begun."""

    UPDATE_REFUSED = "the driver refuses the update"
    DRIVER = "a driver call failed"
    EVALUATOR = "the work failed"
    FINISH = "the end failed"


_REASONS = {
    Failure.DRIVER: Reason.DRIVER,
    Failure.EVALUATOR: Reason.EVALUATOR,
    Failure.FINISH: Reason.FINISH,
}


def settle(
    entry: EntryState, decision: Decision, call: CallFacts, captured: CaptureState | None = None
) -> EntryState:
    """What is known after a call that went as decided.

    Args:
        entry: Before the call.
        decision: What it did.
        call: What was known of it.
        captured: What was captured, where something was.

    Raises:
        ConfigurationError: A capture without ``captured``, or the other way round.
    """
    if (captured is not None) is not (decision.kind in _CAPTURING):
        raise ConfigurationError(
            f"captured: expected {'one' if captured is None else 'none'} for a call of kind "
            f"{decision.kind.value}, got {captured!r}"
        )
    seen, plan = call.probed.properties, call.binding.plan
    if captured is not None:
        return EntryState(seen, is_warm=True, plan=plan, capture=captured)
    if decision.kind is Kind.REPLAY:
        return replace(entry, properties=seen, plan=plan)
    left = entry.after(decision.retention, seen)
    if decision.retention is Retention.RETAIN or decision.kind is Kind.FAILED:
        return left
    if decision.retention.drops:
        return replace(left, properties=seen, plan=plan)
    if decision.kind is Kind.DIRECT and decision.reason in (Reason.FIRST, Reason.CHANGED):
        return replace(left, properties=seen, plan=plan, is_warm=False)
    return left


def fail(
    entry: EntryState, decision: Decision, failure: Failure, detail: str = "", *, lost: bool = False
) -> tuple[Decision, EntryState]:
    """What a call does after ``failure``, and what is known then.

    An update that the driver refuses is made good by instantiating anew, with the entry as it was.
    Anything else fails. After an error of the driver the executable of before is what it was,
    unless it was given up already.

    Args:
        entry: Before the call.
        decision: What it was doing.
        failure: What went wrong.
        detail: In words.
        lost: Whether the executable of before is gone: only one may be live at a time, and the new
            one could not be made.
    """
    if failure is Failure.UPDATE_REFUSED:
        if decision.kind is not Kind.UPDATE:
            raise ConfigurationError(
                f"failure: expected another than {failure.name} for a call of kind "
                f"{decision.kind.value}"
            )
        turned = replace(
            decision, kind=Kind.REINSTANTIATE, reason=Reason.UPDATE_REFUSED, detail=detail
        )
        return turned, entry
    failed = decision.turned(_REASONS[failure], detail)
    if lost:
        failed = replace(failed, retention=failed.retention.with_at_least(Retention.DROP))
        without = replace(entry, capture=None, is_warm=False)
        return failed, without.after(failed.retention)
    return failed, entry.after(failed.retention)
