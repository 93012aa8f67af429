"""Variants of graphs of experts side by side: whole scenarios of calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers.moe_calls import FINGERPRINT, PROPERTIES, WITNESSES
from helpers.moe_cases import CERTIFICATE
from helpers.moe_plans import MANIFEST, prompt_rows, subject

from graphcore.moe.decisions.call_facts import CallFacts
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.counters import MoECounting
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.expert_plan import make_plan
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.plan_binding import bind
from graphcore.moe.decisions.property_probe import probe
from graphcore.moe.decisions.settling import settle
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.manifest_registry import Published
from graphcore.moe.manifests.names import Kind
from graphcore.moe.manifests.ownership import Admission


@dataclass
class Variants:
    """Variants by key, and what their calls did."""

    options: MoEOptions = field(default_factory=MoEOptions)
    generation: int = 5
    admission: Admission = Admission.OPEN
    entries: dict[LookupKey, EntryState] = field(default_factory=dict)
    counting: MoECounting = field(default_factory=MoECounting)
    captures: int = 0

    def step(
        self,
        certificate: Certificate = CERTIFICATE,
        *,
        records: tuple[Any, ...] = PROPERTIES.records,
        uid: int = 8,
        prompt: bool = False,
        graph: str = "decode",
    ) -> Decision:
        rows = prompt_rows(4) if prompt else subject().sightings
        about = subject(
            sightings=rows, certificate=certificate, published=Published(MANIFEST, self.generation)
        )
        key = LookupKey.of(graph, [(4, 16)] * len(records), certificate)
        entry = self.entries.get(key, EntryState())
        looked = probe(entry.properties, uid, certificate.semantic_key(), lambda: records)
        binding = bind(entry.plan, looked.probe, self.admission, about, make_plan, self.counting)
        given = CallFacts(
            looked,
            binding,
            certificate,
            uid,
            self.generation,
            fingerprint=FINGERPRINT,
            owners=OwnersMatch.SAME,
            options=self.options,
        )
        found = decide(entry, given)
        self.counting.add(*found.counters())
        captured = None
        if found.kind in (Kind.CAPTURE, Kind.UPDATE):
            self.captures += found.kind is Kind.CAPTURE
            captured = CaptureState(
                is_grouped=True,
                phase=binding.plan.phase,
                semantic_key=certificate.semantic_key(),
                generation=self.generation,
                fingerprint=FINGERPRINT,
                witnesses=WITNESSES,
            )
        self.entries[key] = settle(entry, found, given, captured)
        return found


def kinds(variants: Variants, count: int, **more: Any) -> list[Kind]:
    return [variants.step(**more).kind for _ in range(count)]
