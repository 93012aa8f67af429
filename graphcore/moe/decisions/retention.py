"""Retention over a prompt: may a capture stay while a step of the other phase runs beside it?"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from graphcore.moe.decisions.call_facts import CallFacts
from graphcore.moe.decisions.coverage import CoverageRecord
from graphcore.moe.decisions.entry_state import EntryState


class RetentionRule(Enum):
    """What must hold, in the order in which it is looked at."""

    PLAN = "there is a plan of the other phase"
    AGREEMENT = "the plan was made for this step"
    CERTIFIED = "its expert products are those that were certified"
    NODES = "plan, record and graph have as many nodes"
    COVERAGE = "coverage is complete"
    CAPTURE = "there is a complete, live capture"


def retention_obstacles(entry: EntryState, call: CallFacts) -> tuple[RetentionRule, ...]:
    """What forbids to retain the capture of ``entry``, in order; empty where it is retained."""
    return tuple(_obstacles(entry, call))


def _obstacles(entry: EntryState, call: CallFacts) -> Iterator[RetentionRule]:
    plan, capture = call.binding.plan, entry.grouped
    if plan is None or capture is None or plan.phase is capture.phase:
        yield RetentionRule.PLAN
        return
    subject = plan.subject
    if subject.semantic_key != call.semantic_key:
        yield RetentionRule.AGREEMENT
    record = subject.coverage.record
    certified = record if isinstance(record, CoverageRecord) else None
    if certified is None or certified.products != len(subject.products):
        yield RetentionRule.CERTIFIED
    counts = {len(subject.nodes.nodes), len(call.probed.properties.records)}
    if certified is not None:
        counts.add(len(certified.nodes))
    if len(counts) > 1:
        yield RetentionRule.NODES
    if not subject.coverage.is_complete:
        yield RetentionRule.COVERAGE
    if entry.shortfalls():
        yield RetentionRule.CAPTURE
