"""Mixture-of-experts models through graphs: experts in slots, certificates, coverage, decisions.

Deciding is apart from doing: what decides takes values and gives values with reasons, and needs no
driver. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.moe.capability import (
        Capability,
    )
    from graphcore.moe.certificate import (
        Certificate,
        CertificateFlag,
    )
    from graphcore.moe.counters import (
        MoECounters,
        MoECounting,
    )
    from graphcore.moe.coverage import (
        Coverage,
        CoverageRecord,
        CoverageTable,
        ExpertProduct,
        NodeList,
        Uncertified,
        cover,
    )
    from graphcore.moe.expert_plan import (
        ExpertPlan,
        PlanSubject,
        make_plan,
    )
    from graphcore.moe.graph_uids import (
        GraphUids,
    )
    from graphcore.moe.group_plan import (
        GroupPlan,
        GroupSighting,
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
    from graphcore.moe.names import (
        BankStatus,
        Bind,
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
    from graphcore.moe.options import (
        MoEOptions,
        OptionSetting,
        resolve_options,
    )
    from graphcore.moe.ownership import (
        Admission,
        Lease,
        Ownership,
        Refusal,
        RefusalReason,
        Transaction,
    )
    from graphcore.moe.plan_binding import (
        Binding,
    )
    from graphcore.moe.property_probe import (
        Probe,
        Properties,
        probe,
    )
    from graphcore.moe.resource_fingerprint import (
        FingerprintReason,
        FingerprintRefusal,
        ResourceFingerprint,
    )
    from graphcore.moe.resources import (
        AuxiliaryResources,
        BankResources,
        GroupResources,
        GroupState,
        Resources,
        ResourceState,
    )
    from graphcore.moe.reverse_map import (
        ReverseMap,
        WeightSource,
    )
    from graphcore.moe.route_witness import (
        Reader,
        RouteWitness,
    )
    from graphcore.moe.witnesses import (
        OwnersMatch,
        Witnesses,
    )

_names = "graphcore.moe.names"
_homes = {
    "Admission": "graphcore.moe.ownership",
    "AuxiliaryResources": "graphcore.moe.resources",
    "BankResources": "graphcore.moe.resources",
    "BankStatus": _names,
    "Bind": _names,
    "Binding": "graphcore.moe.plan_binding",
    "Capability": "graphcore.moe.capability",
    "Certificate": "graphcore.moe.certificate",
    "CertificateFlag": "graphcore.moe.certificate",
    "Coverage": "graphcore.moe.coverage",
    "CoverageReason": _names,
    "CoverageRecord": "graphcore.moe.coverage",
    "CoverageTable": "graphcore.moe.coverage",
    "ExpertBank": "graphcore.moe.manifest",
    "ExpertGroup": "graphcore.moe.manifest",
    "ExpertPlan": "graphcore.moe.expert_plan",
    "ExpertProduct": "graphcore.moe.coverage",
    "FingerprintReason": "graphcore.moe.resource_fingerprint",
    "FingerprintRefusal": "graphcore.moe.resource_fingerprint",
    "GraphUids": "graphcore.moe.graph_uids",
    "GroupPlan": "graphcore.moe.group_plan",
    "GroupReason": _names,
    "GroupResources": "graphcore.moe.resources",
    "GroupSighting": "graphcore.moe.group_plan",
    "GroupState": "graphcore.moe.resources",
    "Kind": _names,
    "Layout": _names,
    "Lease": "graphcore.moe.ownership",
    "Location": _names,
    "LookupKey": "graphcore.moe.lookup_key",
    "Manifest": "graphcore.moe.manifest",
    "ManifestFlag": "graphcore.moe.manifest",
    "ManifestRegistry": "graphcore.moe.manifest_registry",
    "MoECounters": "graphcore.moe.counters",
    "MoECounting": "graphcore.moe.counters",
    "MoEOptions": "graphcore.moe.options",
    "Namespace": _names,
    "NodeList": "graphcore.moe.coverage",
    "OptionSetting": "graphcore.moe.options",
    "OwnersMatch": "graphcore.moe.witnesses",
    "Ownership": "graphcore.moe.ownership",
    "Phase": _names,
    "PlanOutcome": _names,
    "PlanSubject": "graphcore.moe.expert_plan",
    "Probe": "graphcore.moe.property_probe",
    "Properties": "graphcore.moe.property_probe",
    "Publication": "graphcore.moe.manifest_registry",
    "PublicationCode": _names,
    "Published": "graphcore.moe.manifest_registry",
    "Reader": "graphcore.moe.route_witness",
    "Refusal": "graphcore.moe.ownership",
    "RefusalReason": "graphcore.moe.ownership",
    "Rejected": "graphcore.moe.manifest_check",
    "Rejection": _names,
    "ResourceFingerprint": "graphcore.moe.resource_fingerprint",
    "ResourceState": "graphcore.moe.resources",
    "Resources": "graphcore.moe.resources",
    "ReverseMap": "graphcore.moe.reverse_map",
    "Role": _names,
    "RouteWitness": "graphcore.moe.route_witness",
    "RowSemantics": _names,
    "Strategy": _names,
    "Transaction": "graphcore.moe.ownership",
    "Uncertified": "graphcore.moe.coverage",
    "Way": _names,
    "WeightSource": "graphcore.moe.reverse_map",
    "Witnesses": "graphcore.moe.witnesses",
    "cover": "graphcore.moe.coverage",
    "examine": "graphcore.moe.manifest_check",
    "make_plan": "graphcore.moe.expert_plan",
    "probe": "graphcore.moe.property_probe",
    "resolve_options": "graphcore.moe.options",
}

__all__ = [
    "Admission",
    "AuxiliaryResources",
    "BankResources",
    "BankStatus",
    "Bind",
    "Binding",
    "Capability",
    "Certificate",
    "CertificateFlag",
    "Coverage",
    "CoverageReason",
    "CoverageRecord",
    "CoverageTable",
    "ExpertBank",
    "ExpertGroup",
    "ExpertPlan",
    "ExpertProduct",
    "FingerprintReason",
    "FingerprintRefusal",
    "GraphUids",
    "GroupPlan",
    "GroupReason",
    "GroupResources",
    "GroupSighting",
    "GroupState",
    "Kind",
    "Layout",
    "Lease",
    "Location",
    "LookupKey",
    "Manifest",
    "ManifestFlag",
    "ManifestRegistry",
    "MoECounters",
    "MoECounting",
    "MoEOptions",
    "Namespace",
    "NodeList",
    "OptionSetting",
    "OwnersMatch",
    "Ownership",
    "Phase",
    "PlanOutcome",
    "PlanSubject",
    "Probe",
    "Properties",
    "Publication",
    "PublicationCode",
    "Published",
    "Reader",
    "Refusal",
    "RefusalReason",
    "Rejected",
    "Rejection",
    "ResourceFingerprint",
    "ResourceState",
    "Resources",
    "ReverseMap",
    "Role",
    "RouteWitness",
    "RowSemantics",
    "Strategy",
    "Transaction",
    "Uncertified",
    "Way",
    "WeightSource",
    "Witnesses",
    "cover",
    "examine",
    "make_plan",
    "probe",
    "resolve_options",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.moe' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
