"""Reading a graph through a driver into a snapshot: one pass, one question a graph.

It assumes that nobody changes the graph meanwhile. What every function shares (name, layout,
signature) is asked for once per function, not once per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    FunctionHandle,
    FunctionInfo,
    GraphHandle,
    KernelParams,
    NodeHandle,
    NodeParams,
)
from graphcore.graph.nodes import NodeFields, NodeRecord
from graphcore.graph.snapshot import GraphSnapshot

Annotation = tuple[int, int, str]
"""(first node index, index past the last node, label), in creation order."""


def read(
    driver: Driver,
    handle: GraphHandle,
    *,
    annotations: Sequence[Annotation] = (),
    kernels: Iterable[Kernel] = (),
) -> GraphSnapshot:
    """Reads every node and edge of a graph, inner graphs included.

    Works on any graph of the driver's context, whoever built it.

    Args:
        driver: The driver the graph belongs to.
        handle: The graph; borrowed for the call.
        annotations: Labels of index ranges; nested ranges make a path, ``"layer 3/attention"``.
        kernels: Kernels whose signatures type the arguments, besides those the driver itself knows
            (:meth:`Driver.kernel_of`).

    Raises:
        CudaError: The driver's refusal to read a node.
    """
    return _Reader(driver, kernels).graph(handle, annotations, "")


class _Reader:
    """One reading: the caches that its nodes and inner graphs share."""

    def __init__(self, driver: Driver, kernels: Iterable[Kernel]) -> None:
        self._driver = driver
        self._context = driver.context_id()
        self._kernels: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            self._kernels.setdefault(kernel.name, []).append(kernel)
        self._functions: dict[FunctionHandle, tuple[FunctionInfo, Kernel | None]] = {}

    def graph(
        self, handle: GraphHandle, annotations: Sequence[Annotation], prefix: str
    ) -> GraphSnapshot:
        listed = self._driver.all_params(handle)
        labels = label_paths(len(listed), annotations, prefix)
        nodes = self._nodes(listed, labels)
        position = {node: index for index, (node, _) in enumerate(listed)}
        edges = self._driver.plain_edges(handle)
        return GraphSnapshot(
            tuple(nodes),
            tuple([(position[source], position[target]) for source, target, _ in edges]),
            tuple([data for _, _, data in edges]),
            self._driver.device,
            self._context,
            self._driver.name,
        )

    def _nodes(
        self, listed: Sequence[tuple[NodeHandle, NodeParams]], labels: Sequence[str]
    ) -> list[NodeRecord]:
        found: list[NodeRecord] = []
        functions = self._functions
        for index, (handle, params) in enumerate(listed):
            if isinstance(params, KernelParams):
                known = functions.get(params.function) or self._function(params.function)
                made: Any = NodeFields(index, handle, params, known, labels[index])
                made.__class__ = NodeRecord
                found.append(made)
            else:
                found.append(self._other(index, handle, params, labels[index]))
        return found

    def _other(self, index: int, handle: NodeHandle, params: NodeParams, label: str) -> NodeRecord:
        if isinstance(params, ChildParams):
            child = self.graph(params.graph, (), label)
            return NodeRecord(index, handle, params, label=label, child=child)
        if isinstance(params, ConditionalParams):
            bodies = tuple(self.graph(body, (), label) for body in params.bodies)
            return NodeRecord(index, handle, params, label=label, bodies=bodies)
        return NodeRecord(index, handle, params, label=label)

    def _function(self, handle: FunctionHandle) -> tuple[FunctionInfo, Kernel | None]:
        info = self._driver.function_info(handle)
        known = self._functions[handle] = (info, self._kernel(handle, info))
        return known

    def _kernel(self, handle: FunctionHandle, info: FunctionInfo) -> Kernel | None:
        kernel = self._driver.kernel_of(handle)
        if kernel is not None:
            return kernel
        sizes = [size for _, size in info.layout]
        fitting = {
            candidate.parameters: candidate
            for candidate in self._kernels.get(info.raw_name, ())
            if [parameter.size for parameter in candidate.parameters] == sizes
        }
        # two signatures of one name and layout: showing bytes is better than guessing
        return fitting.popitem()[1] if len(fitting) == 1 else None


def label_paths(count: int, annotations: Sequence[Annotation], prefix: str = "") -> list[str]:
    """The label path of each of ``count`` nodes; where ranges nest, the widest comes first.

    Of two equal ranges the later one in ``annotations`` is the outer: a capture notes a range when
    it ends, and inner ones end first.
    """
    labels = [prefix] * count
    order = sorted(
        range(len(annotations)), key=lambda i: (annotations[i][0] - annotations[i][1], -i)
    )
    for start, stop, label in (annotations[i] for i in order):
        for index in range(max(start, 0), min(stop, count)):
            labels[index] = f"{labels[index]}/{label}" if labels[index] else label
    return labels
