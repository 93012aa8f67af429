"""EntryState: what is known of one captured variant between calls. Frozen: a call makes another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.property_probe import Properties
from graphcore.moe.decisions.reasons import Retention
from graphcore.moe.decisions.resource_fingerprint import ResourceFingerprint
from graphcore.moe.decisions.witnesses import Witnesses
from graphcore.moe.manifests.names import Phase


@dataclass(frozen=True, slots=True)
class CaptureState:
    """What was captured, and what has to hold for it.

    A plain capture has no experts in it; its generation is 0, and it has no fingerprint.

    Args:
        is_grouped: Whether expert products are in it.
        has_graph: Whether the description is there.
        has_executable: Whether it can be launched.
        phase: Of the step that was captured.
        semantic_key: Of its certificate; 0 without a valid one.
        generation: Of the manifest.
        fingerprint: Of its resources.
        witnesses: Their owners.
    """

    is_grouped: bool
    has_graph: bool = True
    has_executable: bool = True
    phase: Phase = Phase.DECODE
    semantic_key: int = 0
    generation: int = 0
    fingerprint: ResourceFingerprint | None = None
    witnesses: Witnesses | None = None


@dataclass(frozen=True, slots=True)
class EntryState:
    """One variant.

    Args:
        properties: What the next call's nodes are compared with; None: nothing.
        is_warm: Whether what was captured is what was seen last.
        plan: Of the last call.
        capture: None where there is none.
    """

    properties: Properties | None = None
    is_warm: bool = False
    plan: ExpertPlan | None = None
    capture: CaptureState | None = None

    @property
    def grouped(self) -> CaptureState | None:
        """The capture, where experts are in it."""
        return self.capture if self.capture is not None and self.capture.is_grouped else None

    def shortfalls(self) -> tuple[str, ...]:
        """What its grouped capture lacks to be a complete, live one; empty for such a one."""
        return tuple(self._shortfalls())

    def _shortfalls(self) -> Iterator[str]:
        capture = self.grouped
        if capture is None:
            yield "no grouped capture"
            return
        if not capture.has_graph:
            yield "no graph"
        if not capture.has_executable:
            yield "no executable"
        if not self.is_warm:
            yield "not warm"
        if not capture.semantic_key:
            yield "no semantic key"
        if capture.fingerprint is None:
            yield "no fingerprint"
        if self.properties is None or not self.properties.records:
            yield "no properties"
        if capture.witnesses is None or not capture.witnesses.references:
            yield "no owners"
        elif not capture.witnesses.are_alive:
            yield "an owner is gone"

    def after(self, retention: Retention, seen: Properties | None = None) -> EntryState:
        """What is left of it.

        A plain capture outlives a drop, but is not taken for what was seen last.

        Args:
            retention: What is kept.
            seen: What is known of the nodes now; kept where the capture goes and the nodes stay.
        """
        if retention is Retention.KEEP:
            return self
        if retention is Retention.RETAIN:
            known = self.properties and self.properties.without_uid()
            return replace(self, properties=known)
        capture = None if self.grouped is not None else self.capture
        if retention is Retention.RESET:
            return EntryState(capture=capture)
        return replace(self, properties=seen or self.properties, is_warm=False, capture=capture)
