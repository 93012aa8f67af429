"""Calls of graphs of experts and what is known of their variants, for tests of what is decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.moe_cases import CERTIFICATE, fingerprint
from helpers.moe_plans import plan

from graphcore.moe.decisions.call_facts import CallFacts
from graphcore.moe.decisions.certificate import CertificateFlag
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.plan_binding import Binding
from graphcore.moe.decisions.property_probe import Probe, Probed, Properties
from graphcore.moe.decisions.witnesses import OwnersMatch, Witnesses
from graphcore.moe.manifests.names import Bind, Namespace

REQUIRED = replace(CERTIFICATE, namespace=Namespace.DRAFT, flags=CertificateFlag.REQUIRED)
"""A draft step, which must not fall back."""

KEY = CERTIFICATE.semantic_key()
RECORDS = tuple(("node", index) for index in range(12))
PROPERTIES = Properties(uid=8, semantic_key=KEY, records=RECORDS)
NEW_PROPERTIES = Properties(uid=9, semantic_key=KEY, records=(("moved", 0), *RECORDS[1:]))
FINGERPRINT = fingerprint()
PLAN = plan()
BOTH = MoEOptions(decode_boundary_overlap=True, decode_overlap=True)


class Owner:
    """What owns slots."""


OWNERS = [Owner(), Owner()]
WITNESSES = Witnesses.of(OWNERS)

CAPTURE = CaptureState(
    is_grouped=True,
    semantic_key=KEY,
    generation=5,
    fingerprint=FINGERPRINT,
    witnesses=WITNESSES,
)
CAPTURED = EntryState(PROPERTIES, is_warm=True, plan=PLAN, capture=CAPTURE)
"""A variant with a complete, live capture of a decode step."""

SEEN_ONCE = EntryState(PROPERTIES, plan=PLAN)
PLAIN = EntryState(PROPERTIES, is_warm=True, capture=CaptureState(is_grouped=False))


def probed(kind: Probe = Probe.SAME) -> Probed:
    """What a look found; where something changed, the nodes are others."""
    return Probed(kind, PROPERTIES if kind.is_same else NEW_PROPERTIES)


def bound(made: ExpertPlan | None = PLAN) -> Binding:
    """A plan, or none because the manifest is being replaced."""
    if made is None:
        return Binding(Bind.UNAVAILABLE, None, "the manifest is being replaced")
    return Binding(Bind.REUSED, made)


def call(
    probe: Probe = Probe.SAME,
    made: ExpertPlan | None = PLAN,
    *,
    required: bool = False,
    **more: Any,
) -> CallFacts:
    """A decode step with which nothing is wrong."""
    fields: dict[str, Any] = {
        "probed": probed(probe),
        "binding": bound(made),
        "certificate": REQUIRED if required else CERTIFICATE,
        "graph_uid": CERTIFICATE.graph_uid,
        "generation": 5,
        "fingerprint": FINGERPRINT,
        "owners": OwnersMatch.SAME,
        **more,
    }
    return CallFacts(**fields)


def required_entry(entry: EntryState = CAPTURED) -> EntryState:
    """The same variant of required work."""
    key = REQUIRED.semantic_key()
    capture = entry.capture and replace(entry.capture, semantic_key=key)
    properties = entry.properties and replace(entry.properties, semantic_key=key)
    return replace(entry, capture=capture, properties=properties)
