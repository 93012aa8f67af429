"""Certificate: what a step claims to be, and whether the claim holds together.

A step that carries none, or a malformed one, is ordinary work without a graph. A *required*
certificate (speculative work) that is malformed, or whose plan cannot be prepared, is an error
before anything is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntFlag
from functools import cached_property
from typing import NamedTuple

from graphcore.moe.manifests.digest import number_of
from graphcore.moe.manifests.names import Namespace, RowSemantics

CERTIFICATE_VERSION = 1
_MOST = 2**64 - 1


class CertificateFlag(IntFlag):
    """What a certificate asks for."""

    REQUIRED = 1


class Flaw(NamedTuple):
    """One rule that a certificate breaks."""

    field: str
    expected: str
    actual: object

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.actual!r}"


@dataclass(frozen=True)
class Certificate:
    """The claim of one step. Any values can be put in: :meth:`flaws` says what is wrong.

    Args:
        namespace: Whose step it is.
        row_semantics: What its rows are to each other.
        rows: Rows of the step.
        sequences: Sequences that they belong to.
        owner: Number of the model or context that runs it.
        owner_generation: Counts what its owner changed about itself.
        source_uid: Of the graph that it was made from; uids are given by
            :mod:`graphcore.moe.decisions.graph_uids`.
        graph_uid: Of the graph that runs.
        device: Ordinal of the device that it runs on.
        rank: Of the process among those that share the experts.
        ranks: How many those are.
        flags: :class:`CertificateFlag`; 0 for ordinary work.
        version: Of these rules.
        reserved: 0.
    """

    namespace: Namespace
    row_semantics: RowSemantics
    rows: int
    sequences: int
    owner: int
    owner_generation: int
    source_uid: int
    graph_uid: int
    device: int = 0
    rank: int = 0
    ranks: int = 1
    flags: int = 0
    version: int = CERTIFICATE_VERSION
    reserved: int = 0

    @property
    def is_required(self) -> bool:
        """Whether a shortfall is an error; read from the flags even where the rest is malformed."""
        return isinstance(self.flags, int) and bool(self.flags & CertificateFlag.REQUIRED)

    def flaws(self, graph_uid: int | None = None) -> tuple[Flaw, ...]:
        """The rules that it breaks; empty for a valid one.

        Args:
            graph_uid: Of the graph that is about to run; None does not compare it.
        """
        if graph_uid is None or not self.is_required:
            return self._flaws
        return self._flaws_for(graph_uid)

    @cached_property
    def _flaws(self) -> tuple[Flaw, ...]:
        return self._flaws_for(None)

    def _flaws_for(self, graph_uid: int | None) -> tuple[Flaw, ...]:
        kinds = _flaws_of_kind(self)
        if kinds:  # numbers that are none cannot be compared
            return kinds
        found = [*_flaws_of_rows(self), *_flaws_of_fixed(self)]
        if self.is_required:
            found += [*_flaws_of_required(self), *_flaws_of_uids(self, graph_uid)]
        return tuple(found)

    def semantic_key(self) -> int:
        """A number of 64 bits over all fields but the two uids; 0 for a malformed one.

        The same in every process; equal exactly where two steps mean the same.
        """
        return self._semantic_key

    @cached_property
    def _semantic_key(self) -> int:
        if self._flaws:
            return 0
        values = tuple(
            (field.name, _plain(getattr(self, field.name)))
            for field in fields(self)
            if field.name not in _UIDS
        )
        return number_of(values)


_UIDS = frozenset({"source_uid", "graph_uid"})
_NUMBERS = (
    "rows",
    "sequences",
    "owner",
    "owner_generation",
    "source_uid",
    "graph_uid",
    "device",
    "rank",
    "ranks",
    "flags",
    "version",
    "reserved",
)


def _plain(value: Namespace | RowSemantics | int) -> str | int:
    # a flag and the number that it is are one value, and so are True and 1
    return value.name if isinstance(value, (Namespace, RowSemantics)) else int(value)


def _flaws_of_kind(certificate: Certificate) -> tuple[Flaw, ...]:
    found = []
    for name, kind in (("namespace", Namespace), ("row_semantics", RowSemantics)):
        value = getattr(certificate, name)
        if not isinstance(value, kind):
            found.append(Flaw(name, f"a {kind.__name__}", value))
    for name in _NUMBERS:
        value = getattr(certificate, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
            found.append(Flaw(name, "an int of 64 bits, 0 or more", value))
    return tuple(found)


def _flaws_of_fixed(certificate: Certificate) -> list[Flaw]:
    found = []
    if certificate.flags not in (0, CertificateFlag.REQUIRED):
        found.append(Flaw("flags", "0 or exactly REQUIRED (1)", int(certificate.flags)))
    if certificate.version != CERTIFICATE_VERSION:
        found.append(Flaw("version", str(CERTIFICATE_VERSION), certificate.version))
    if certificate.rank >= certificate.ranks:
        found.append(Flaw("rank", f"below {certificate.ranks}, the ranks", certificate.rank))
    if certificate.reserved:
        found.append(Flaw("reserved", "0", certificate.reserved))
    return found


def _flaws_of_rows(certificate: Certificate) -> list[Flaw]:
    rows, sequences = certificate.rows, certificate.sequences
    found = [
        Flaw(name, "at least 1", getattr(certificate, name))
        for name in ("rows", "sequences")
        if getattr(certificate, name) < 1
    ]
    rule, holds = {
        RowSemantics.INDEPENDENT: (f"{rows}, as many as rows", sequences == rows),
        RowSemantics.SEQUENTIAL: (f"at most {rows}, the rows", sequences <= rows),
        RowSemantics.SPECULATIVE: (f"less than {rows}, the rows", sequences < rows),
    }[certificate.row_semantics]
    if not found and not holds:
        found.append(Flaw("sequences", rule, sequences))
    return found


# a draft is run row by row or along its sequences; only the main model verifies
_REQUIRED_ROWS = {
    Namespace.MAIN: (RowSemantics.SPECULATIVE,),
    Namespace.DRAFT: (RowSemantics.INDEPENDENT, RowSemantics.SEQUENTIAL),
    Namespace.MTP: (RowSemantics.INDEPENDENT, RowSemantics.SEQUENTIAL),
}


def _flaws_of_required(certificate: Certificate) -> list[Flaw]:
    found = []
    allowed = _REQUIRED_ROWS[certificate.namespace]
    if certificate.row_semantics not in allowed:
        names = " or ".join(each.name for each in allowed)
        expected = f"{names} for required work of {certificate.namespace.name}"
        found.append(Flaw("row_semantics", expected, certificate.row_semantics.name))
    return found + [
        Flaw(name, "other than 0 for required work", 0)
        for name in ("owner", "owner_generation", "source_uid", "graph_uid")
        if getattr(certificate, name) == 0
    ]


def _flaws_of_uids(certificate: Certificate, graph_uid: int | None) -> list[Flaw]:
    found = []
    if certificate.source_uid == certificate.graph_uid != 0:
        expected = "another uid than that of the source graph"
        found.append(Flaw("graph_uid", expected, certificate.graph_uid))
    if graph_uid is not None and certificate.graph_uid != graph_uid:
        found.append(Flaw("graph_uid", f"{graph_uid}, the graph's", certificate.graph_uid))
    return found
