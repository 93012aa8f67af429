"""Values that decisions about graphs of experts are made from."""

from __future__ import annotations

from typing import Any

from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.resource_fingerprint import ResourceFingerprint, resource_fingerprint
from graphcore.moe.decisions.resources import (
    SLOT_TABLES,
    AuxiliaryResources,
    BankResources,
    GroupResources,
    GroupState,
    Resources,
    ResourceState,
)
from graphcore.moe.manifests.capability import Capability
from graphcore.moe.manifests.names import (
    GroupReason,
    Location,
    Namespace,
    Phase,
    PlanOutcome,
    Role,
    RowSemantics,
)
from graphcore.moe.manifests.ownership import Admission

CERTIFICATE = Certificate(
    Namespace.MAIN,
    RowSemantics.INDEPENDENT,
    rows=4,
    sequences=4,
    owner=1,
    owner_generation=1,
    source_uid=7,
    graph_uid=8,
)
"""An ordinary decode step of four sequences."""


def capability(**more: Any) -> Capability:
    """Of a bfloat16 bank of 8 experts and 8 slots, 4 rows, top 2."""
    fields: dict[str, Any] = {
        "role": Role.GATE_UP,
        "kernel": "grouped",
        "consumer": "swiglu",
        "reason": GroupReason.ELIGIBLE,
        "equivalence": "the same kernel",
        "phase": Phase.DECODE,
        "location": Location.PINNED,
        "row_semantics": RowSemantics.INDEPENDENT,
        "source_type": "bfloat16",
        "source_flags": 0,
        "input_type": "bfloat16",
        "output_type": "bfloat16",
        "tokens": 4,
        "experts": 8,
        "top_k": 2,
        "rows": 4,
        "routes": 8,
        "row_stride": 8,
        "slots": 8,
        "source_extents": (8, 48, 16),
        "source_strides": (1536, 32, 2),
        "slot_extents": (8, 48, 16),
        "slot_strides": (1536, 32, 2),
        "device": 0,
        "compute_capability": 90,
        "warp_size": 32,
        "shared_memory_limit": 232448,
    }
    return Capability(**{**fields, **more})


def group_resources(index: int = 0, **more: Any) -> GroupResources:
    """Of a layer of two banks and a scale."""
    base = 0x7F00_0000 + index * 0x10_0000
    tables = (*SLOT_TABLES, "pinned", "is_open")
    buffers = ("plan_buffer", "bank_descriptors", "auxiliary_array")
    scale = AuxiliaryResources(
        base + 0x3000, 1, f"layers.{index}.scale", base + 0x4000, Role.DOWN_SCALE, 0, 32, 1
    )
    fields: dict[str, Any] = {
        "name": f"layers.{index}",
        "semantic_key": CERTIFICATE.semantic_key(),
        "device": 0,
        "rank": 0,
        "top_k": 2,
        "rows": 4,
        "routes": 8,
        "row_stride": 8,
        "slots": 8,
        "generation": 1,
        "serial": 3 + index,
        "stream": 0x5000,
        "tables": tuple((name, base + 0x100 * at) for at, name in enumerate(tables)),
        **{name: base + 0xA00 + 0x100 * at for at, name in enumerate(buffers)},
        "plan_bytes": 4096,
        "auxiliary_count": 1,
        "miss_values": 1152,
        "banks": (
            BankResources(base + 0x1000, base + 0x5000, capability()),
            BankResources(base + 0x2000, base + 0x6000, capability(role=Role.DOWN)),
        ),
        "auxiliaries": (scale,),
    }
    return GroupResources(**{**fields, **more})


def resources(**more: Any) -> Resources:
    """Of two layers, under the manifest of generation 5."""
    fields: dict[str, Any] = {
        "generation": 5,
        "semantic_key": CERTIFICATE.semantic_key(),
        "device": 0,
        "rank": 0,
        "groups": (group_resources(0), group_resources(1)),
    }
    return Resources(**{**fields, **more})


def resource_state(**more: Any) -> ResourceState:
    """In which :func:`resources` have a fingerprint."""
    fields: dict[str, Any] = {
        "outcome": PlanOutcome.DECODE_GROUPED,
        "admission": Admission.OPEN,
        "generation": 5,
        "stream": 0x5000,
        "groups": (GroupState(), GroupState()),
    }
    return ResourceState(**{**fields, **more})


def fingerprint(**more: Any) -> ResourceFingerprint:
    """Of :func:`resources`, changed."""
    found = resource_fingerprint(resources(**more), resource_state())
    assert isinstance(found, ResourceFingerprint)
    return found
