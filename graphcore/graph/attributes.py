"""LaunchAttributes: what an update must know of a graph's kernel nodes, read once and kept.

The driver accepts an update that changes a kernel's cluster size and then keeps the old size, so
an executable compares this summary before it trusts the driver's word. Reading attributes costs
about 1 us a node; comparing two summaries costs nothing to speak of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphcore.driver.api import Driver
from graphcore.driver.kernel_attributes import KernelAttributes
from graphcore.driver.records import Dim3, GraphHandle, KernelParams
from graphcore.graph.snapshot import GraphSnapshot


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """One (cluster, cooperative, priority) per kernel node, inner graphs included, in order."""

    entries: tuple[KernelAttributes, ...]
    _cluster_sizes: frozenset[Dim3] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # an update asks for no more than this, a thousand nodes or not
        object.__setattr__(self, "_cluster_sizes", frozenset(entry[0] for entry in self.entries))

    @staticmethod
    def of(snapshot: GraphSnapshot) -> LaunchAttributes:
        """The summary of a graph that was read already."""
        params = (node.params for node in snapshot.walk())
        configs = (each.config for each in params if isinstance(each, KernelParams))
        return LaunchAttributes(tuple((c.cluster, c.cooperative, c.priority) for c in configs))

    @staticmethod
    def read(driver: Driver, graph: GraphHandle) -> LaunchAttributes:
        """The summary of a graph, without the rest of a snapshot."""
        return LaunchAttributes(tuple(driver.kernel_attributes(graph)))

    def may_hide_a_change_to(self, new: LaunchAttributes) -> bool:
        """Whether an update to ``new`` could be answered SUCCESS and keep an old cluster size.

        False proves that it cannot: all clusters of both graphs are the same size, whichever way
        the driver pairs the nodes. True asks for :func:`graphcore.graph.diff.trap_differences`.
        """
        sizes, others = self._cluster_sizes, new._cluster_sizes
        return len(sizes) > 1 or len(others) > 1 or bool(sizes and others and sizes != others)
