"""Mixture-of-experts models through graphs: experts in slots, certificates, coverage, decisions.

Deciding is apart from doing: what decides takes values and gives values with reasons, and needs no
driver. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.moe.accelerated_model import (
        AcceleratedModel,
    )
    from graphcore.moe.accelerating import (
        accelerate,
    )
    from graphcore.moe.admission import (
        AdmissionOutcome,
        SlotAdmission,
    )
    from graphcore.moe.boundary_update import (
        Precondition,
    )
    from graphcore.moe.callable_step import (
        CallableStep,
    )
    from graphcore.moe.certificate import (
        Certificate,
        CertificateFlag,
    )
    from graphcore.moe.counters import (
        MoECounters,
    )
    from graphcore.moe.coverage import (
        Coverage,
    )
    from graphcore.moe.decision import (
        Decision,
    )
    from graphcore.moe.decode_loop import (
        DecodedStep,
        DecodeLoop,
        DecodeRequest,
    )
    from graphcore.moe.decode_model import (
        DecodeModel,
    )
    from graphcore.moe.decode_overlap import (
        OverlapRule,
        Row,
    )
    from graphcore.moe.expert_plan import (
        ExpertPlan,
    )
    from graphcore.moe.graph_reuse import (
        GraphReuse,
    )
    from graphcore.moe.group_use import (
        GroupUse,
    )
    from graphcore.moe.layer import (
        MoELayer,
    )
    from graphcore.moe.lookup_key import (
        LookupKey,
    )
    from graphcore.moe.manifest import (
        ExpertBank,
        ExpertGroup,
        Manifest,
        ManifestFlag,
    )
    from graphcore.moe.manifest_check import (
        Rejected,
        examine,
    )
    from graphcore.moe.manifest_registry import (
        ManifestRegistry,
        Publication,
        Published,
    )
    from graphcore.moe.manifest_replacement import (
        replace_manifest,
    )
    from graphcore.moe.names import (
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
    from graphcore.moe.nvtx_ranges import (
        NvtxRanges,
    )
    from graphcore.moe.options import (
        MoEOptions,
        resolve_options,
    )
    from graphcore.moe.oracle import (
        SlotDecision,
        SlotOracle,
    )
    from graphcore.moe.overlap_totals import (
        OverlapTotals,
    )
    from graphcore.moe.overlapped_decode import (
        OverlappedDecode,
        StepTicket,
    )
    from graphcore.moe.ownership import (
        Admission,
        Lease,
        Ownership,
        Refusal,
        RefusalReason,
    )
    from graphcore.moe.plan_step import (
        PlanStep,
    )
    from graphcore.moe.pool_manifest import (
        manifest_of,
    )
    from graphcore.moe.product_options import (
        ProductOptions,
    )
    from graphcore.moe.products_plan import (
        ProductsPlans,
    )
    from graphcore.moe.reasons import (
        Reason,
        Retention,
    )
    from graphcore.moe.report import (
        ReuseReport,
    )
    from graphcore.moe.resource_fingerprint import (
        ResourceFingerprint,
    )
    from graphcore.moe.router_prefetch import (
        RouterPrefetch,
    )
    from graphcore.moe.sibling_prefetch import (
        PrefetchTotals,
        SiblingPrefetch,
    )
    from graphcore.moe.slot_experts import (
        SlotExperts,
    )
    from graphcore.moe.slot_group import (
        SlotGroup,
    )
    from graphcore.moe.slot_pool import (
        SlotPool,
    )
    from graphcore.moe.slot_products import (
        SlotProducts,
    )
    from graphcore.moe.slot_state import (
        SlotFault,
        SlotState,
        SlotTotals,
    )
    from graphcore.moe.slot_tables import (
        SlotTables,
    )
    from graphcore.moe.staged import (
        StagedProducts,
        StagedStep,
        StagedTotals,
    )
    from graphcore.moe.staging_memory import (
        StagingMemory,
    )
    from graphcore.moe.step_record import (
        StepPart,
        StepRecord,
        StepResult,
        StepSeconds,
        StepTotals,
    )
    from graphcore.moe.step_trace import (
        StepTrace,
    )
    from graphcore.moe.step_work import (
        StepWork,
    )
    from graphcore.moe.trace_events import (
        Span,
    )

_names = "graphcore.moe.names"
_homes = {
    "AcceleratedModel": "graphcore.moe.accelerated_model",
    "Admission": "graphcore.moe.ownership",
    "AdmissionOutcome": "graphcore.moe.admission",
    "BankStatus": _names,
    "CallableStep": "graphcore.moe.callable_step",
    "Certificate": "graphcore.moe.certificate",
    "CertificateFlag": "graphcore.moe.certificate",
    "Coverage": "graphcore.moe.coverage",
    "CoverageReason": _names,
    "Decision": "graphcore.moe.decision",
    "DecodeLoop": "graphcore.moe.decode_loop",
    "DecodeModel": "graphcore.moe.decode_model",
    "DecodeRequest": "graphcore.moe.decode_loop",
    "DecodedStep": "graphcore.moe.decode_loop",
    "ExpertBank": "graphcore.moe.manifest",
    "ExpertGroup": "graphcore.moe.manifest",
    "ExpertPlan": "graphcore.moe.expert_plan",
    "GraphReuse": "graphcore.moe.graph_reuse",
    "GroupReason": _names,
    "GroupUse": "graphcore.moe.group_use",
    "Kind": _names,
    "Layout": _names,
    "Lease": "graphcore.moe.ownership",
    "Location": _names,
    "LookupKey": "graphcore.moe.lookup_key",
    "Manifest": "graphcore.moe.manifest",
    "ManifestFlag": "graphcore.moe.manifest",
    "ManifestRegistry": "graphcore.moe.manifest_registry",
    "MoECounters": "graphcore.moe.counters",
    "MoELayer": "graphcore.moe.layer",
    "MoEOptions": "graphcore.moe.options",
    "Namespace": _names,
    "NvtxRanges": "graphcore.moe.nvtx_ranges",
    "OverlapRule": "graphcore.moe.decode_overlap",
    "OverlapTotals": "graphcore.moe.overlap_totals",
    "OverlappedDecode": "graphcore.moe.overlapped_decode",
    "Ownership": "graphcore.moe.ownership",
    "Phase": _names,
    "PlanOutcome": _names,
    "PlanStep": "graphcore.moe.plan_step",
    "Precondition": "graphcore.moe.boundary_update",
    "PrefetchTotals": "graphcore.moe.sibling_prefetch",
    "ProductOptions": "graphcore.moe.product_options",
    "ProductsPlans": "graphcore.moe.products_plan",
    "Publication": "graphcore.moe.manifest_registry",
    "PublicationCode": _names,
    "Published": "graphcore.moe.manifest_registry",
    "Reason": "graphcore.moe.reasons",
    "Refusal": "graphcore.moe.ownership",
    "RefusalReason": "graphcore.moe.ownership",
    "Rejected": "graphcore.moe.manifest_check",
    "Rejection": _names,
    "ResourceFingerprint": "graphcore.moe.resource_fingerprint",
    "Retention": "graphcore.moe.reasons",
    "ReuseReport": "graphcore.moe.report",
    "Role": _names,
    "RouterPrefetch": "graphcore.moe.router_prefetch",
    "Row": "graphcore.moe.decode_overlap",
    "RowSemantics": _names,
    "SiblingPrefetch": "graphcore.moe.sibling_prefetch",
    "SlotAdmission": "graphcore.moe.admission",
    "SlotDecision": "graphcore.moe.oracle",
    "SlotExperts": "graphcore.moe.slot_experts",
    "SlotFault": "graphcore.moe.slot_state",
    "SlotGroup": "graphcore.moe.slot_group",
    "SlotOracle": "graphcore.moe.oracle",
    "SlotPool": "graphcore.moe.slot_pool",
    "SlotProducts": "graphcore.moe.slot_products",
    "SlotState": "graphcore.moe.slot_state",
    "SlotTables": "graphcore.moe.slot_tables",
    "SlotTotals": "graphcore.moe.slot_state",
    "Span": "graphcore.moe.trace_events",
    "StagedProducts": "graphcore.moe.staged",
    "StagedStep": "graphcore.moe.staged",
    "StagedTotals": "graphcore.moe.staged",
    "StagingMemory": "graphcore.moe.staging_memory",
    "StepPart": "graphcore.moe.step_record",
    "StepRecord": "graphcore.moe.step_record",
    "StepResult": "graphcore.moe.step_record",
    "StepSeconds": "graphcore.moe.step_record",
    "StepTicket": "graphcore.moe.overlapped_decode",
    "StepTotals": "graphcore.moe.step_record",
    "StepTrace": "graphcore.moe.step_trace",
    "StepWork": "graphcore.moe.step_work",
    "Strategy": _names,
    "Way": _names,
    "accelerate": "graphcore.moe.accelerating",
    "examine": "graphcore.moe.manifest_check",
    "manifest_of": "graphcore.moe.pool_manifest",
    "replace_manifest": "graphcore.moe.manifest_replacement",
    "resolve_options": "graphcore.moe.options",
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
