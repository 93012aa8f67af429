"""StepWork: what GraphReuse runs: who it is, what it depends on, how it runs and is captured.

Two makers stand: :class:`graphcore.moe.PlanStep` and :class:`graphcore.moe.CallableStep`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from graphcore.driver import Stream
from graphcore.executable import Graph
from graphcore.moe.decisions.coverage import NodeList
from graphcore.moe.decisions.property_probe import Records
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.slots.pool_bank import PoolBank


@dataclass(frozen=True, slots=True)
class ProductPlace:
    """Where one product of a group stands.

    Args:
        index: Of its node.
        node: Identity of its node.
        bank: Name of the bank that it multiplies by.
        consumers: (identity of a node, how often it reads the product), in order.
    """

    index: int
    node: Hashable
    bank: str
    consumers: tuple[tuple[Hashable, int], ...]


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """Where a group stands in a graph.

    Args:
        products: In the order of their nodes.
        inner: Identities of the nodes between its products, and of those that read the last one.
        chain: Of the nodes that chose its ids; None: as its use says.
    """

    products: tuple[ProductPlace, ...]
    inner: tuple[Hashable, ...]
    chain: tuple[Hashable, ...] | None = None


Banks = Sequence[tuple[GroupUse, tuple[PoolBank, ...]]]
"""Each group that a step uses, with its banks."""


@dataclass(frozen=True, slots=True)
class StepLook:
    """What a look at the nodes of a step finds; ``places`` are in the order of its groups."""

    nodes: NodeList
    places: tuple[GroupPlaces, ...]


class StepWork(Protocol):
    """One step. It compares by identity and takes weak references.

    Attributes:
        identity: Of its graph: a name, or another content that stays; variants share it.
        uid: Another one after every change of it; 0: its records are compared at each call.
        extents: Of what its nodes write; how many, the first and the last tell variants apart.
        capabilities: Whatever else selects kernels: element types, say.
        groups: The groups of experts that it uses; none at all is a plain step.
        rows: Of the step.
        obstacle: Why it cannot be captured; "" where it can.
        has_staged: Whether :meth:`run_staged` does something.
    """

    @property
    def identity(self) -> Hashable: ...

    @property
    def uid(self) -> int: ...

    @property
    def extents(self) -> Sequence[Sequence[int]]: ...

    @property
    def capabilities(self) -> tuple[Hashable, ...]: ...

    @property
    def groups(self) -> tuple[GroupUse, ...]: ...

    @property
    def rows(self) -> int: ...

    @property
    def obstacle(self) -> str: ...

    @property
    def has_staged(self) -> bool: ...

    def look(self, banks: Banks) -> StepLook:
        """Its nodes, and where the products of each group stand."""

    def records(self) -> Records:
        """All that a graph of it would have baked in."""

    def run(self, stream: Stream) -> None:
        """Runs it once on ``stream``, without a graph."""

    def run_staged(self, stream: Stream) -> None:
        """Runs it once with experts in scratch memory: no slot and no table changes."""

    def capture(self, stream: Stream, *, rows_by_kernel: bool) -> Graph:
        """A graph of it, to be launched on ``stream``; runs nothing.

        Args:
            stream: That its launches will be on; its running work is not waited for.
            rows_by_kernel: Float32 copies with a step between rows become kernels.
        """


def declared_places(
    step: Hashable, first: int, use: GroupUse, banks: Sequence[PoolBank]
) -> tuple[tuple[Hashable, ...], GroupPlaces]:
    """Nodes that stand for a group whose own nodes cannot be seen, and its places among them.

    A choice of experts; then a product of each bank and a reader of it, in turn.

    Args:
        step: Identity that no other step has.
        first: Index of the first of the nodes.
        use: The group.
        banks: Its banks.
    """
    nodes: list[Hashable] = [(step, use.group, "ids")]
    products, inner = [], []
    for bank in banks:
        if bank.is_auxiliary:
            continue
        node, reader = (step, use.group, bank.name), (step, use.group, bank.name, "reader")
        products.append(ProductPlace(first + len(nodes), node, bank.name, ((reader, 1),)))
        nodes += [node, reader]
        inner.append(reader)
    return tuple(nodes), GroupPlaces(tuple(products), tuple(inner))
