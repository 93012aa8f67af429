"""Values that decisions about graphs of experts are made from."""

from __future__ import annotations

from graphcore.moe.certificate import Certificate
from graphcore.moe.names import Namespace, RowSemantics

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
