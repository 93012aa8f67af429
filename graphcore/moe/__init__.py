"""Mixture-of-experts models through graphs: experts in slots, certificates, coverage, decisions.

Deciding is apart from doing: what decides takes values and gives values with reasons, and needs no
driver. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.moe.certificate import Certificate, CertificateFlag
    from graphcore.moe.names import (
        Bind,
        CoverageReason,
        GroupReason,
        Kind,
        Layout,
        Namespace,
        Phase,
        PlanOutcome,
        Rejection,
        Role,
        RowSemantics,
        Strategy,
        Way,
    )

_names = "graphcore.moe.names"
_homes = {
    "Bind": _names,
    "Certificate": "graphcore.moe.certificate",
    "CertificateFlag": "graphcore.moe.certificate",
    "CoverageReason": _names,
    "GroupReason": _names,
    "Kind": _names,
    "Layout": _names,
    "Namespace": _names,
    "Phase": _names,
    "PlanOutcome": _names,
    "Rejection": _names,
    "Role": _names,
    "RowSemantics": _names,
    "Strategy": _names,
    "Way": _names,
}

__all__ = [
    "Bind",
    "Certificate",
    "CertificateFlag",
    "CoverageReason",
    "GroupReason",
    "Kind",
    "Layout",
    "Namespace",
    "Phase",
    "PlanOutcome",
    "Rejection",
    "Role",
    "RowSemantics",
    "Strategy",
    "Way",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.moe' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
