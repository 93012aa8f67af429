"""Mixture-of-experts models through graphs: experts in slots, certificates, coverage, decisions.

Deciding is apart from doing: what decides takes values and gives values with reasons, and needs no
driver. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.moe.decisions.boundary_update import (
        Precondition,
    )
    from graphcore.moe.decisions.certificate import (
        Certificate,
        CertificateFlag,
    )
    from graphcore.moe.decisions.counters import (
        MoECounters,
    )
    from graphcore.moe.decisions.coverage import (
        Coverage,
    )
    from graphcore.moe.decisions.decision import (
        Decision,
    )
    from graphcore.moe.decisions.decode_overlap import (
        OverlapRule,
        Row,
    )
    from graphcore.moe.decisions.expert_plan import (
        ExpertPlan,
    )
    from graphcore.moe.decisions.lookup_key import (
        LookupKey,
    )
    from graphcore.moe.decisions.options import (
        MoEOptions,
        resolve_options,
    )
    from graphcore.moe.decisions.reasons import (
        Reason,
        Retention,
    )
    from graphcore.moe.decisions.resource_fingerprint import (
        ResourceFingerprint,
    )
    from graphcore.moe.graph_reuse import (
        GraphReuse,
    )
    from graphcore.moe.layers.layer import (
        MoELayer,
    )
    from graphcore.moe.layers.product_options import (
        ProductOptions,
    )
    from graphcore.moe.layers.products_plan import (
        ProductsPlans,
    )
    from graphcore.moe.layers.slot_experts import (
        SlotExperts,
    )
    from graphcore.moe.layers.slot_products import (
        SlotProducts,
    )
    from graphcore.moe.layers.staged import (
        StagedProducts,
        StagedStep,
        StagedTotals,
    )
    from graphcore.moe.layers.staging_memory import (
        StagingMemory,
    )
    from graphcore.moe.manifests.manifest import (
        ExpertBank,
        ExpertGroup,
        Manifest,
        ManifestFlag,
    )
    from graphcore.moe.manifests.manifest_check import (
        Rejected,
        examine,
    )
    from graphcore.moe.manifests.manifest_registry import (
        ManifestRegistry,
        Publication,
        Published,
    )
    from graphcore.moe.manifests.names import (
        BankStatus,
        CoverageReason,
        GroupReason,
        Kind,
        Layout,
        Location,
        Namespace,
        Phase,
        PlanOutcome,
        PublicationCode,
        Rejection,
        Role,
        RowSemantics,
        Strategy,
        Way,
    )
    from graphcore.moe.manifests.ownership import (
        Admission,
        Lease,
        Ownership,
        Refusal,
        RefusalReason,
    )
    from graphcore.moe.models.accelerated_model import (
        AcceleratedModel,
    )
    from graphcore.moe.models.accelerating import (
        accelerate,
    )
    from graphcore.moe.models.router_prefetch import (
        RouterPrefetch,
    )
    from graphcore.moe.overlap.decode_loop import (
        DecodedStep,
        DecodeLoop,
        DecodeRequest,
    )
    from graphcore.moe.overlap.decode_model import (
        DecodeModel,
    )
    from graphcore.moe.overlap.overlap_totals import (
        OverlapTotals,
    )
    from graphcore.moe.overlap.overlapped_decode import (
        OverlappedDecode,
        StepTicket,
    )
    from graphcore.moe.reports.nvtx_ranges import (
        NvtxRanges,
    )
    from graphcore.moe.reports.report import (
        ReuseReport,
    )
    from graphcore.moe.reports.step_trace import (
        StepTrace,
    )
    from graphcore.moe.reports.trace_events import (
        Span,
    )
    from graphcore.moe.slots.admission import (
        AdmissionOutcome,
        SlotAdmission,
    )
    from graphcore.moe.slots.group_use import (
        GroupUse,
    )
    from graphcore.moe.slots.manifest_replacement import (
        replace_manifest,
    )
    from graphcore.moe.slots.oracle import (
        SlotDecision,
        SlotOracle,
    )
    from graphcore.moe.slots.pool_manifest import (
        manifest_of,
    )
    from graphcore.moe.slots.sibling_prefetch import (
        PrefetchTotals,
        SiblingPrefetch,
    )
    from graphcore.moe.slots.slot_group import (
        SlotGroup,
    )
    from graphcore.moe.slots.slot_pool import (
        SlotPool,
    )
    from graphcore.moe.slots.slot_state import (
        SlotFault,
        SlotState,
        SlotTotals,
    )
    from graphcore.moe.slots.slot_tables import (
        SlotTables,
    )
    from graphcore.moe.steps.callable_step import (
        CallableStep,
    )
    from graphcore.moe.steps.plan_step import (
        PlanStep,
    )
    from graphcore.moe.steps.step_record import (
        StepPart,
        StepRecord,
        StepResult,
        StepSeconds,
        StepTotals,
    )
    from graphcore.moe.steps.step_work import (
        StepWork,
    )

_names = "graphcore.moe.manifests.names"
_homes = {
    "AcceleratedModel": "graphcore.moe.models.accelerated_model",
    "Admission": "graphcore.moe.manifests.ownership",
    "AdmissionOutcome": "graphcore.moe.slots.admission",
    "BankStatus": _names,
    "CallableStep": "graphcore.moe.steps.callable_step",
    "Certificate": "graphcore.moe.decisions.certificate",
    "CertificateFlag": "graphcore.moe.decisions.certificate",
    "Coverage": "graphcore.moe.decisions.coverage",
    "CoverageReason": _names,
    "Decision": "graphcore.moe.decisions.decision",
    "DecodeLoop": "graphcore.moe.overlap.decode_loop",
    "DecodeModel": "graphcore.moe.overlap.decode_model",
    "DecodeRequest": "graphcore.moe.overlap.decode_loop",
    "DecodedStep": "graphcore.moe.overlap.decode_loop",
    "ExpertBank": "graphcore.moe.manifests.manifest",
    "ExpertGroup": "graphcore.moe.manifests.manifest",
    "ExpertPlan": "graphcore.moe.decisions.expert_plan",
    "GraphReuse": "graphcore.moe.graph_reuse",
    "GroupReason": _names,
    "GroupUse": "graphcore.moe.slots.group_use",
    "Kind": _names,
    "Layout": _names,
    "Lease": "graphcore.moe.manifests.ownership",
    "Location": _names,
    "LookupKey": "graphcore.moe.decisions.lookup_key",
    "Manifest": "graphcore.moe.manifests.manifest",
    "ManifestFlag": "graphcore.moe.manifests.manifest",
    "ManifestRegistry": "graphcore.moe.manifests.manifest_registry",
    "MoECounters": "graphcore.moe.decisions.counters",
    "MoELayer": "graphcore.moe.layers.layer",
    "MoEOptions": "graphcore.moe.decisions.options",
    "Namespace": _names,
    "NvtxRanges": "graphcore.moe.reports.nvtx_ranges",
    "OverlapRule": "graphcore.moe.decisions.decode_overlap",
    "OverlapTotals": "graphcore.moe.overlap.overlap_totals",
    "OverlappedDecode": "graphcore.moe.overlap.overlapped_decode",
    "Ownership": "graphcore.moe.manifests.ownership",
    "Phase": _names,
    "PlanOutcome": _names,
    "PlanStep": "graphcore.moe.steps.plan_step",
    "Precondition": "graphcore.moe.decisions.boundary_update",
    "PrefetchTotals": "graphcore.moe.slots.sibling_prefetch",
    "ProductOptions": "graphcore.moe.layers.product_options",
    "ProductsPlans": "graphcore.moe.layers.products_plan",
    "Publication": "graphcore.moe.manifests.manifest_registry",
    "PublicationCode": _names,
    "Published": "graphcore.moe.manifests.manifest_registry",
    "Reason": "graphcore.moe.decisions.reasons",
    "Refusal": "graphcore.moe.manifests.ownership",
    "RefusalReason": "graphcore.moe.manifests.ownership",
    "Rejected": "graphcore.moe.manifests.manifest_check",
    "Rejection": _names,
    "ResourceFingerprint": "graphcore.moe.decisions.resource_fingerprint",
    "Retention": "graphcore.moe.decisions.reasons",
    "ReuseReport": "graphcore.moe.reports.report",
    "Role": _names,
    "RouterPrefetch": "graphcore.moe.models.router_prefetch",
    "Row": "graphcore.moe.decisions.decode_overlap",
    "RowSemantics": _names,
    "SiblingPrefetch": "graphcore.moe.slots.sibling_prefetch",
    "SlotAdmission": "graphcore.moe.slots.admission",
    "SlotDecision": "graphcore.moe.slots.oracle",
    "SlotExperts": "graphcore.moe.layers.slot_experts",
    "SlotFault": "graphcore.moe.slots.slot_state",
    "SlotGroup": "graphcore.moe.slots.slot_group",
    "SlotOracle": "graphcore.moe.slots.oracle",
    "SlotPool": "graphcore.moe.slots.slot_pool",
    "SlotProducts": "graphcore.moe.layers.slot_products",
    "SlotState": "graphcore.moe.slots.slot_state",
    "SlotTables": "graphcore.moe.slots.slot_tables",
    "SlotTotals": "graphcore.moe.slots.slot_state",
    "Span": "graphcore.moe.reports.trace_events",
    "StagedProducts": "graphcore.moe.layers.staged",
    "StagedStep": "graphcore.moe.layers.staged",
    "StagedTotals": "graphcore.moe.layers.staged",
    "StagingMemory": "graphcore.moe.layers.staging_memory",
    "StepPart": "graphcore.moe.steps.step_record",
    "StepRecord": "graphcore.moe.steps.step_record",
    "StepResult": "graphcore.moe.steps.step_record",
    "StepSeconds": "graphcore.moe.steps.step_record",
    "StepTicket": "graphcore.moe.overlap.overlapped_decode",
    "StepTotals": "graphcore.moe.steps.step_record",
    "StepTrace": "graphcore.moe.reports.step_trace",
    "StepWork": "graphcore.moe.steps.step_work",
    "Strategy": _names,
    "Way": _names,
    "accelerate": "graphcore.moe.models.accelerating",
    "examine": "graphcore.moe.manifests.manifest_check",
    "manifest_of": "graphcore.moe.slots.pool_manifest",
    "replace_manifest": "graphcore.moe.slots.manifest_replacement",
    "resolve_options": "graphcore.moe.decisions.options",
}

__all__ = [
    "AcceleratedModel",
    "Admission",
    "AdmissionOutcome",
    "BankStatus",
    "CallableStep",
    "Certificate",
    "CertificateFlag",
    "Coverage",
    "CoverageReason",
    "Decision",
    "DecodeLoop",
    "DecodeModel",
    "DecodeRequest",
    "DecodedStep",
    "ExpertBank",
    "ExpertGroup",
    "ExpertPlan",
    "GraphReuse",
    "GroupReason",
    "GroupUse",
    "Kind",
    "Layout",
    "Lease",
    "Location",
    "LookupKey",
    "Manifest",
    "ManifestFlag",
    "ManifestRegistry",
    "MoECounters",
    "MoELayer",
    "MoEOptions",
    "Namespace",
    "NvtxRanges",
    "OverlapRule",
    "OverlapTotals",
    "OverlappedDecode",
    "Ownership",
    "Phase",
    "PlanOutcome",
    "PlanStep",
    "Precondition",
    "PrefetchTotals",
    "ProductOptions",
    "ProductsPlans",
    "Publication",
    "PublicationCode",
    "Published",
    "Reason",
    "Refusal",
    "RefusalReason",
    "Rejected",
    "Rejection",
    "ResourceFingerprint",
    "Retention",
    "ReuseReport",
    "Role",
    "RouterPrefetch",
    "Row",
    "RowSemantics",
    "SiblingPrefetch",
    "SlotAdmission",
    "SlotDecision",
    "SlotExperts",
    "SlotFault",
    "SlotGroup",
    "SlotOracle",
    "SlotPool",
    "SlotProducts",
    "SlotState",
    "SlotTables",
    "SlotTotals",
    "Span",
    "StagedProducts",
    "StagedStep",
    "StagedTotals",
    "StagingMemory",
    "StepPart",
    "StepRecord",
    "StepResult",
    "StepSeconds",
    "StepTicket",
    "StepTotals",
    "StepTrace",
    "StepWork",
    "Strategy",
    "Way",
    "accelerate",
    "examine",
    "manifest_of",
    "replace_manifest",
    "resolve_options",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.moe' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
