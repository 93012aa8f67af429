"""LaunchAttributes: what an update must know of a graph's kernel nodes, read once and kept.

The driver accepts an update that changes a kernel's cluster size and then keeps the old size, so
an executable compares this summary before it trusts the driver's word. Reading attributes costs
about 1 us a node; comparing two summaries costs nothing to speak of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphcore.driver.api import Driver
from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    Dim3,
    GraphHandle,
    KernelParams,
    NodeKind,
)
from graphcore.graph.snapshot import GraphSnapshot

_WITH_KERNELS = (NodeKind.KERNEL, NodeKind.CHILD, NodeKind.CONDITIONAL)


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """One (cluster, cooperative, priority) per kernel node, inner graphs included, in order."""

    entries: tuple[tuple[Dim3, bool, int | None], ...]

    @staticmethod
    def of(snapshot: GraphSnapshot) -> LaunchAttributes:
        """The summary of a graph that was read already."""
        return LaunchAttributes(
            tuple(
                _entry(node.params)
                for node in snapshot.walk()
                if isinstance(node.params, KernelParams)
            )
        )

    @staticmethod
    def read(driver: Driver, graph: GraphHandle) -> LaunchAttributes:
        """The summary of a graph, without the rest of a snapshot."""
        return LaunchAttributes(tuple(_entry(params) for params in _kernels(driver, graph)))

    def may_hide_a_change_to(self, new: LaunchAttributes) -> bool:
        """Whether an update to ``new`` could be answered SUCCESS and keep an old cluster size.

        False proves that it cannot: all clusters of both graphs are the same size, whichever way
        the driver pairs the nodes. True asks for :func:`graphcore.graph.diff.trap_differences`.
        """
        sizes = {entry[0] for entry in self.entries} | {entry[0] for entry in new.entries}
        return len(sizes) > 1


def _entry(params: KernelParams) -> tuple[Dim3, bool, int | None]:
    config = params.config
    return config.cluster, config.cooperative, config.priority


def _kernels(driver: Driver, graph: GraphHandle) -> Iterator[KernelParams]:
    for node in driver.nodes(graph):
        if driver.node_kind(node) not in _WITH_KERNELS:
            continue
        params = driver.node_params(node)
        if isinstance(params, KernelParams):
            yield params
        elif isinstance(params, ChildParams):
            yield from _kernels(driver, params.graph)
        elif isinstance(params, ConditionalParams):
            for body in params.bodies:
                yield from _kernels(driver, body)
