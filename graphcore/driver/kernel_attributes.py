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

_WITH_KERNELS = frozenset({NodeKind.KERNEL, NodeKind.CHILD, NodeKind.CONDITIONAL})


def walk_attributes(driver: Driver, graph: GraphHandle) -> Iterator[KernelAttributes]:
    """The attributes of every kernel node, in order."""
    for params in walk_kernels(driver, graph):
        config = params.config
        yield config.cluster, config.cooperative, config.priority


def walk_kernels(driver: Driver, graph: GraphHandle) -> Iterator[KernelParams]:
    """Reads every kernel node, inner graphs' too, in order."""
    for node in driver.nodes(graph):
        if driver.node_kind(node) not in _WITH_KERNELS:
            continue
        params = driver.node_params(node)
        if isinstance(params, KernelParams):
            yield params
        elif isinstance(params, ChildParams):
            yield from walk_kernels(driver, params.graph)
        elif isinstance(params, ConditionalParams):
            for body in params.bodies:
                yield from walk_kernels(driver, body)
