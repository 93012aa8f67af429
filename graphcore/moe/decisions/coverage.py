"""Coverage: whether the manifest accounts for every expert product of a graph.

A graph is *certified* when it is made: which nodes are expert products, over which weights. When it
runs, what is found then must be what was certified. A node that moved meanwhile makes the graph
uncertified; nothing else is lost by that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.reverse_map import ReverseMap, WeightSource
from graphcore.moe.manifests.digest import number_of
from graphcore.moe.manifests.names import CoverageReason

MOST_EPOCHS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class NodeList:
    """The nodes of a graph, in order.

    Args:
        identity: Of the list itself: another one for another graph.
        nodes: Identities of the nodes, unique among all graphs.
    """

    identity: Hashable
    nodes: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A node that multiplies by the weights of experts that are cached."""

    index: int
    node: Hashable
    source: WeightSource


@dataclass(frozen=True, slots=True)
class CoverageRecord:
    """What was certified of a graph.

    Args:
        identity: Of its node list.
        nodes: Their identities, in order.
        epoch: Counts certifications, from 1.
        products: How many expert products it has.
        fingerprint: Over index, identity and weights of each, and their count; never 0.
    """

    identity: Hashable
    nodes: tuple[Hashable, ...]
    epoch: int
    products: int
    fingerprint: int


class UncertifiedReason(Enum):
    """Why there is no record of a graph."""

    EMPTY = "the graph has no node"
    DRAINING = "expert caching is not open"
    EXHAUSTED = "no epoch is left"
    UNKNOWN = "it was never certified, or its record made room for others"
    MOVED = "its nodes are not those that were certified"


@dataclass(frozen=True, slots=True)
class Uncertified:
    """Why there is no record of a graph, with what it is about."""

    reason: UncertifiedReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


def product_fingerprint(products: Iterable[ExpertProduct]) -> int:
    """One number of index, identity and weights of each product, and of their count; never 0."""
    found = [(each.index, each.node, each.source) for each in products]
    return number_of((*found, len(found)))


class CoverageTable:
    """Records of certified graphs, by first node.

    Args:
        limit: Records at most; beyond that the oldest goes.
        last_epoch: What epochs count from; none is given twice.
    """

    def __init__(self, limit: int = 64, *, last_epoch: int = 0) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ConfigurationError(f"limit: expected an int of at least 1, got {limit!r}")
        self._limit = limit
        self._epoch = last_epoch
        self._records: dict[Hashable, CoverageRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def certify(
        self, nodes: NodeList, products: Sequence[ExpertProduct], *, is_open: bool = True
    ) -> CoverageRecord | Uncertified:
        """Notes which nodes are expert products; records that share a node with it are dropped.

        Args:
            nodes: Of the graph.
            products: Its expert products, in order.
            is_open: Whether expert caching gives out leases.

        Raises:
            ConfigurationError: A product that is not the node at its index, or not in order.
        """
        _check(nodes, products)
        if not nodes.nodes:
            return Uncertified(UncertifiedReason.EMPTY)
        if not is_open:
            return Uncertified(UncertifiedReason.DRAINING)
        if self._epoch >= MOST_EPOCHS:
            return Uncertified(UncertifiedReason.EXHAUSTED)
        self.drop(nodes.nodes)
        self._epoch += 1
        record = CoverageRecord(
            nodes.identity, nodes.nodes, self._epoch, len(products), product_fingerprint(products)
        )
        self._records[nodes.nodes[0]] = record
        if len(self._records) > self._limit:
            # in order of epochs: a record is never changed, only replaced by a younger one
            del self._records[next(iter(self._records))]
        return record

    def recover(self, nodes: NodeList) -> CoverageRecord | Uncertified:
        """The record of exactly these nodes, in this order."""
        if not nodes.nodes:
            return Uncertified(UncertifiedReason.EMPTY)
        record = self._records.get(nodes.nodes[0])
        if record is None:
            return Uncertified(UncertifiedReason.UNKNOWN)
        difference = _difference(record, nodes)
        return Uncertified(UncertifiedReason.MOVED, difference) if difference else record

    def drop(self, nodes: Iterable[Hashable]) -> int:
        """Forgets the records that have one of ``nodes``; how many those were."""
        gone = set(nodes)
        stale = [
            first for first, record in self._records.items() if not gone.isdisjoint(record.nodes)
        ]
        for first in stale:
            del self._records[first]
        return len(stale)


def _check(nodes: NodeList, products: Sequence[ExpertProduct]) -> None:
    last = -1
    for product in products:
        if not last < product.index < len(nodes.nodes):
            raise ConfigurationError(
                f"products: expected ascending indices below {len(nodes.nodes)}, got "
                f"{product.index} after {last}"
            )
        last = product.index
        if nodes.nodes[last] != product.node:
            raise ConfigurationError(
                f"products: expected node {nodes.nodes[last]!r} at {last}, got {product.node!r}"
            )


def _difference(record: CoverageRecord, nodes: NodeList) -> str:
    """In which way the nodes are not those of the record; "" where they are."""
    if record.identity != nodes.identity:
        return f"expected list {record.identity!r}, got {nodes.identity!r}"
    if len(record.nodes) != len(nodes.nodes):
        return f"expected {len(record.nodes)} nodes, got {len(nodes.nodes)}"
    pairs = enumerate(zip(record.nodes, nodes.nodes, strict=True))
    moved = next(((at, *pair) for at, pair in pairs if pair[0] != pair[1]), None)
    if moved is None:
        return ""
    at, expected, actual = moved
    return f"expected node {expected!r} at {at}, got {actual!r}"


@dataclass(frozen=True, slots=True)
class Offender:
    """The first product of a graph that stands to the manifest in one way, and how many do."""

    reason: CoverageReason
    product: ExpertProduct
    count: int

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return (
            f"node {self.product.index}, weights {self.product.source.name}: "
            f"{self.reason.value}{more}"
        )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a graph that is about to run stands to its record and to the manifest.

    Args:
        record: What was certified, or why nothing is.
        identity: Of the node list that is about to run.
        found: Expert products in it.
        fingerprint: Of those.
        standing: For each reason that a product has, the first of them, in the order of reasons.
    """

    record: CoverageRecord | Uncertified
    identity: Hashable
    found: int
    fingerprint: int
    standing: tuple[Offender, ...] = ()

    @property
    def registered(self) -> int:
        """How many products the manifest accounts for."""
        fine = (each for each in self.standing if each.reason is CoverageReason.REGISTERED)
        return sum(each.count for each in fine)

    @property
    def offenders(self) -> tuple[Offender, ...]:
        """The first product of each reason other than "registered"."""
        return tuple(each for each in self.standing if each.reason != CoverageReason.REGISTERED)

    @property
    def epoch(self) -> int:
        """Of the record; 0 without one."""
        return self.record.epoch if isinstance(self.record, CoverageRecord) else 0

    @property
    def is_complete(self) -> bool:
        """Whether every product is certified and registered."""
        return not self.shortfalls()

    def shortfalls(self) -> tuple[str, ...]:
        """What is missing, one sentence each; empty for complete coverage."""
        return tuple(self._shortfalls())

    def _shortfalls(self) -> Iterator[str]:
        record = self.record
        if isinstance(record, Uncertified):
            yield f"not certified: {record}"
        else:
            if record.epoch == 0:
                yield "epoch: expected another than 0"
            if record.fingerprint == 0:
                yield "fingerprint: expected another than 0"
            if record.identity != self.identity:
                yield f"nodes: expected list {record.identity!r}, got {self.identity!r}"
            if record.products != self.found:
                yield f"products: expected {record.products} as certified, got {self.found}"
            elif record.fingerprint != self.fingerprint:
                yield "products: others than were certified"
        yield from map(str, self.offenders)
        if self.registered != self.found and not self.offenders:
            yield f"registered: expected {self.found} products, got {self.registered}"


def cover(
    record: CoverageRecord | Uncertified,
    nodes: NodeList,
    products: Sequence[ExpertProduct],
    reverse_map: ReverseMap,
) -> Coverage:
    """How the products of a graph stand to its record and to the manifest."""
    first: dict[CoverageReason, ExpertProduct] = {}
    counts: dict[CoverageReason, int] = {}
    for product in products:
        reason = reverse_map.classify(product.source)
        first.setdefault(reason, product)
        counts[reason] = counts.get(reason, 0) + 1
    standing = tuple(
        Offender(reason, first[reason], counts[reason])
        for reason in CoverageReason
        if reason in first
    )
    return Coverage(record, nodes.identity, len(products), product_fingerprint(products), standing)
