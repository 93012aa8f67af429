"""Issuing: the parameters of a node as work on a stream, at once or into a capture.

The same calls serve both, as with any stream. What no stream call makes (child graphs, conditional
and memory nodes, joins) is added by hand where the stream captures.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphcore.driver import Driver
from graphcore.driver.records import (
    Edge,
    EmptyParams,
    EventParams,
    GraphHandle,
    HostParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    StreamHandle,
)


def issue(driver: Driver, params: NodeParams, stream: StreamHandle, *, captured: bool) -> bool:
    """Puts the work on ``stream``; False where no stream call does it."""
    match params:
        case KernelParams():
            driver.launch(params.function, params.config, params.arguments, stream)
        case MemcpyParams():
            driver.copy(params, stream)
        case MemsetParams():
            driver.fill(params, stream)
        case HostParams(callback=callback) if callback is not None:
            driver.launch_host(callback, stream)
        case EventParams(kind=NodeKind.EVENT_RECORD):
            driver.record_event(params.event, stream, external=captured)
        case EventParams():
            driver.wait_event(stream, params.event, external=captured)
        case EmptyParams() if not captured:
            pass  # the stream's order joins already
        case _:
            return False
    return True


class GraphNodes:
    """Adds nodes to a graph, each with exactly the dependencies it is given."""

    def __init__(self, driver: Driver, graph: GraphHandle) -> None:
        self.driver = driver
        self.graph = graph
        self.count = 0
        """How many nodes it has added."""
        self.roots: tuple[NodeHandle, ...] = ()
        """What a node without dependencies comes after."""

    def add(self, params: NodeParams, after: Sequence[NodeHandle]) -> tuple[NodeHandle, ...]:
        """Adds a node and returns its handle."""
        self.count += 1
        return (self._add(params, after),)

    def _add(self, params: NodeParams, after: Sequence[NodeHandle]) -> NodeHandle:
        if not isinstance(params, KernelParams) or not params.config.programmatic:
            return self.driver.add_node(self.graph, after, params)
        # only a kernel can let the next one begin early
        kernels = [one for one in after if self.driver.node_kind(one) is NodeKind.KERNEL]
        node = self.driver.add_node(self.graph, kernels, params)
        others = [Edge(one, node) for one in after if one not in kernels]
        if others:
            self.driver.add_edges(self.graph, others)
        return node


class CapturedNodes(GraphNodes):
    """Captures nodes on a stream, each with exactly the dependencies it is given.

    The frontier of the capture is set before each node, so that one stream captures any order.
    """

    def __init__(self, driver: Driver, stream: StreamHandle) -> None:
        status = driver.capture_status(stream)
        assert status.graph is not None
        super().__init__(driver, status.graph)
        self.stream = stream
        self.roots = status.frontier
        self.recount()

    def add(self, params: NodeParams, after: Sequence[NodeHandle]) -> tuple[NodeHandle, ...]:
        is_programmatic = isinstance(params, KernelParams) and params.config.programmatic
        self.come_after(after)
        if is_programmatic or not issue(self.driver, params, self.stream, captured=True):
            return super().add(params, after)
        self.count += 1
        return self.frontier()

    def come_after(self, nodes: Sequence[NodeHandle]) -> None:
        """Makes the stream's next node depend on ``nodes``."""
        self.driver.set_capture_frontier(self.stream, nodes)

    def frontier(self) -> tuple[NodeHandle, ...]:
        """What the stream's next node would depend on."""
        return self.driver.capture_status(self.stream).frontier

    def recount(self) -> None:
        """Counts anew, after others have captured on the stream."""
        self.count = len(self.driver.nodes(self.graph))
