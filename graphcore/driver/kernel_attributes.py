"""The launch attributes of a graph's kernel nodes, inner ones too, through any driver's calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    Dim3,
    GraphHandle,
    KernelParams,
    NodeKind,
)

if TYPE_CHECKING:
    from graphcore.driver.api import Driver

KernelAttributes = tuple[Dim3, bool, int | None]
"""(cluster, cooperative, priority) of a kernel node."""

WITH_KERNELS = frozenset({NodeKind.KERNEL, NodeKind.CHILD, NodeKind.CONDITIONAL})


def walk_attributes(driver: Driver, graph: GraphHandle) -> Iterator[KernelAttributes]:
    """Reads every node that is a kernel or may hold one, in order."""
    for node in driver.nodes(graph):
        if driver.node_kind(node) not in WITH_KERNELS:
            continue
        params = driver.node_params(node)
        if isinstance(params, KernelParams):
            config = params.config
            yield config.cluster, config.cooperative, config.priority
        elif isinstance(params, ChildParams):
            yield from walk_attributes(driver, params.graph)
        elif isinstance(params, ConditionalParams):
            for body in params.bodies:
                yield from walk_attributes(driver, body)
