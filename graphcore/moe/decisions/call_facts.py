"""CallFacts: all that deciding about one call needs, found out beforehand. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.coverage import Coverage
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.plan_binding import Binding
from graphcore.moe.decisions.property_probe import Probed
from graphcore.moe.decisions.resource_fingerprint import FingerprintRefusal, ResourceFingerprint
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import PlanOutcome

_OFF = MoEOptions()


class Streams(Enum):
    """What is known of the streams of a call's groups."""

    COHERENT = "one stream"
    INCOHERENT = "different streams"
    UNRESOLVED = "cannot be resolved"


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call.

    Args:
        probed: What a look at its nodes found.
        binding: Its plan.
        certificate: None where it carries none.
        graph_uid: Of the graph; 0: none.
        generation: Of the manifest that holds now.
        has_products: Whether products of cached experts are in it.
        has_context: Whether there are slots to run them from.
        obstacle: Why it cannot be captured; "" where it can.
        streams: Of its groups.
        fingerprint: Of its resources; None where nobody asked for it.
        owners: How those of its resources stand to those at the capture.
        can_watch_owners: Whether they can be watched.
        options: What is switched on.
        driver: Name of the driver.
        is_disabled: Whether graphs are switched off by GRAPHCORE_DISABLE=1.
    """

    probed: Probed
    binding: Binding
    certificate: Certificate | None
    graph_uid: int
    generation: int
    has_products: bool = True
    has_context: bool = True
    obstacle: str = ""
    streams: Streams = Streams.COHERENT
    fingerprint: ResourceFingerprint | FingerprintRefusal | None = None
    owners: OwnersMatch = OwnersMatch.NONE
    can_watch_owners: bool = True
    options: MoEOptions = _OFF
    driver: str = "emulated"
    is_disabled: bool = False

    @property
    def is_required(self) -> bool:
        """Whether a shortfall is an error."""
        return self.certificate is not None and self.certificate.is_required

    @property
    def semantic_key(self) -> int:
        """Of the certificate; 0 without a valid one."""
        return 0 if self.certificate is None else self.certificate.semantic_key()

    @property
    def outcome(self) -> PlanOutcome | None:
        """Of the plan; None where it is unavailable."""
        return None if self.binding.plan is None else self.binding.plan.outcome

    @property
    def coverage(self) -> Coverage | None:
        """Of the plan; None where it is unavailable."""
        return None if self.binding.plan is None else self.binding.plan.subject.coverage
