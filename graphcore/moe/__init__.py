"""Mixture-of-experts models through graphs: experts in slots, certificates, coverage, decisions.

Deciding is apart from doing: what decides takes values and gives values with reasons, and needs no
driver. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.moe.certificate import (
        Certificate,
        CertificateFlag,
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
    from graphcore.moe.ownership import (
        Admission,
        Lease,
        Ownership,
        Refusal,
        RefusalReason,
        Transaction,
    )

_names = "graphcore.moe.names"
_homes = {
    "Admission": "graphcore.moe.ownership",
    "BankStatus": _names,
    "Bind": _names,
    "Certificate": "graphcore.moe.certificate",
    "CertificateFlag": "graphcore.moe.certificate",
    "CoverageReason": _names,
    "ExpertBank": "graphcore.moe.manifest",
    "ExpertGroup": "graphcore.moe.manifest",
    "GroupReason": _names,
    "Kind": _names,
    "Layout": _names,
    "Lease": "graphcore.moe.ownership",
    "Location": _names,
    "Manifest": "graphcore.moe.manifest",
    "ManifestFlag": "graphcore.moe.manifest",
    "ManifestRegistry": "graphcore.moe.manifest_registry",
    "Namespace": _names,
    "Ownership": "graphcore.moe.ownership",
    "Phase": _names,
    "PlanOutcome": _names,
    "Publication": "graphcore.moe.manifest_registry",
    "PublicationCode": _names,
    "Published": "graphcore.moe.manifest_registry",
    "Refusal": "graphcore.moe.ownership",
    "RefusalReason": "graphcore.moe.ownership",
    "Rejected": "graphcore.moe.manifest_check",
    "Rejection": _names,
    "Role": _names,
    "RowSemantics": _names,
    "Strategy": _names,
    "Transaction": "graphcore.moe.ownership",
    "Way": _names,
    "examine": "graphcore.moe.manifest_check",
}

__all__ = [
    "Admission",
    "BankStatus",
    "Bind",
    "Certificate",
    "CertificateFlag",
    "CoverageReason",
    "ExpertBank",
    "ExpertGroup",
    "GroupReason",
    "Kind",
    "Layout",
    "Lease",
    "Location",
    "Manifest",
    "ManifestFlag",
    "ManifestRegistry",
    "Namespace",
    "Ownership",
    "Phase",
    "PlanOutcome",
    "Publication",
    "PublicationCode",
    "Published",
    "Refusal",
    "RefusalReason",
    "Rejected",
    "Rejection",
    "Role",
    "RowSemantics",
    "Strategy",
    "Transaction",
    "Way",
    "examine",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.moe' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
