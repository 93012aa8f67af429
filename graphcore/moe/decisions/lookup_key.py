"""LookupKey: what a captured variant is found by.

Several variants of one model stay captured side by side: prompt rows, decode rows, drafts and
verifications have keys of their own, so that none takes the place of another. Whether a variant may
still be used is no part of its key; that lies on its entry.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.manifests.names import Namespace, Phase, RowSemantics


@dataclass(frozen=True, slots=True)
class LookupKey:
    """Everything by which two variants are told apart.

    Args:
        graph: Identity of the graph: a name, or a number that no other graph has.
        nodes: How many it has.
        first: Extents of what its first node writes.
        last: Extents of what its last node writes.
        phase: Whether it is a prompt.
        namespace: None where the step carries no valid certificate, as all fields behind it.
        row_semantics: Of the certificate.
        rows: Of the certificate.
        semantics: The certificate's semantic key in hex digits; "" without one.
        capabilities: Whatever else selects kernels: element types, compute capability.
        device: Ordinal.
        rank: Of the process among those that share the experts.
        ranks: How many those are.
    """

    graph: Hashable
    nodes: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    phase: Phase
    namespace: Namespace | None
    row_semantics: RowSemantics | None
    rows: int | None
    semantics: str
    capabilities: tuple[Hashable, ...]
    device: int
    rank: int
    ranks: int = 1

    def differences(self, other: LookupKey) -> tuple[str, ...]:
        """Why ``other`` is another variant, field by field; empty for the same one."""
        return tuple(
            f"{name}: expected {mine!r}, got {theirs!r}"
            for name in self.__slots__
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        )

    @classmethod
    def of(
        cls,
        graph: Hashable,
        extents: Sequence[Sequence[int]],
        certificate: Certificate | None = None,
        *,
        phase: Phase = Phase.DECODE,
        capabilities: Sequence[Hashable] = (),
        device: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> LookupKey:
        """The key of a graph whose nodes write tensors of ``extents``.

        Args:
            graph: Identity of the graph.
            extents: Of what each node writes, in order.
            certificate: Of the step; a malformed one counts as none.
            phase: Whether it is a prompt.
            capabilities: Whatever else selects kernels.
            device: Ordinal; a valid certificate says its own.
            rank: Of the process; a valid certificate says its own.
            ranks: How many share the experts; a valid certificate says its own.

        Raises:
            ConfigurationError: The graph has no node, so that nothing identifies it.
        """
        if not extents:
            raise ConfigurationError("extents: expected those of at least one node, got none")
        ends = tuple(extents[0]), tuple(extents[-1])
        tail = tuple(capabilities)
        if certificate is None or not (semantics := certificate.semantic_key()):
            place = device, rank, ranks
            return cls(graph, len(extents), *ends, phase, None, None, None, "", tail, *place)
        return cls(
            graph,
            len(extents),
            *ends,
            phase,
            certificate.namespace,
            certificate.row_semantics,
            certificate.rows,
            f"{semantics:016x}",
            tail,
            certificate.device,
            certificate.rank,
            certificate.ranks,
        )
