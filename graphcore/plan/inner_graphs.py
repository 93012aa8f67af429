"""Graphs inside a plan's graph: what CUDA embeds, and forms of them that a body can hold."""

from __future__ import annotations

from typing import Any

from graphcore.driver import Driver, collectives
from graphcore.driver.records import (
    ChildParams,
    CopyOperand,
    Edge,
    GraphHandle,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeHandle,
    NodeKind,
)
from graphcore.errors import PlanError
from graphcore.executable import Graph
from graphcore.executable.handles import GraphResource
from graphcore.interop.drivers import same_driver
from graphcore.plan.lowering import Lowering
from graphcore.resources.lifetime import OwnerSet
from graphcore.resources.tensors import TensorRef

_NOT_IN_A_CHILD = (NodeKind.ALLOC, NodeKind.FREE, NodeKind.CONDITIONAL)
# captured elsewhere they carry the context of their capture, and a body takes one context only
_MADE_ANEW = (NodeKind.MEMCPY, NodeKind.MEMSET)
_NOT_IN_A_BODY = (NodeKind.HOST, NodeKind.EVENT_RECORD, NodeKind.EVENT_WAIT)


def embeddable(graph: Any, driver: Driver) -> Graph:
    """``graph``, if CUDA can embed it in a graph of ``driver``.

    Raises:
        PlanError: It is of another driver, or holds memory or conditional nodes.
        LifecycleError: It is closed.
    """
    assert isinstance(graph, Graph), graph
    handle = graph.handle
    if not same_driver(graph.driver, driver):
        raise PlanError(
            f"graph: expected one of driver {driver.name}:{driver.device}, got one of "
            f"{graph.driver.name}:{graph.driver.device}"
        )
    _refuse(driver, handle, _NOT_IN_A_CHILD, "a child graph")
    return graph


def refuse_collectives(owners: OwnerSet) -> None:
    """Refuses what captured collectives, on every driver alike, as part of a conditional body.

    Raises:
        PlanError: Names the communicator.
    """
    for group in collectives.groups_in(owner.object for owner in owners):
        raise PlanError(
            f"graph: expected one without collectives for a conditional body, got one with those "
            f"of {collectives.label_of(group)}: NCCL orders its work by event nodes, which no body "
            "holds, and ranks that decide by themselves would not all send as often"
        )


def without_copies(graph: GraphHandle, lowering: Lowering) -> GraphResource | None:
    """A copy of ``graph`` for a conditional body, its memcpy nodes done by kernels.

    CUDA refuses memcpy nodes in a body that were captured elsewhere. Memset nodes are made anew, by
    the driver of the body. None where ``graph`` has neither and can be embedded as it is.

    Raises:
        PlanError: Nodes that no body holds, or copies and no kernel for them.
    """
    driver = lowering.binding.driver
    _refuse(driver, graph, _NOT_IN_A_BODY, "a conditional body")
    if not _has_any(driver, graph):
        return None
    copy = GraphResource(driver, driver.clone_graph(graph), owned=True)
    _replace(copy.handle, lowering)
    return copy


def _has_any(driver: Driver, graph: GraphHandle) -> bool:
    for node in driver.nodes(graph):
        inner = _child_of(driver, node)
        if driver.node_kind(node) in _MADE_ANEW or (inner and _has_any(driver, inner)):
            return True
    return False


def _replace(graph: GraphHandle, lowering: Lowering) -> None:
    driver = lowering.binding.driver
    edges = driver.edges(graph)
    replaced: dict[NodeHandle, NodeHandle] = {}
    for node in driver.nodes(graph):
        inner = _child_of(driver, node)
        if inner is not None:
            _replace(inner, lowering)
        params = driver.node_params(node)
        if params.kind not in _MADE_ANEW:
            continue
        if isinstance(params, MemcpyParams):
            dst, src = (_bytes_of(side, params, driver) for side in (params.dst, params.src))
            params = lowering.copied_by_kernel(dst, src)
        elif not isinstance(params, MemsetParams):
            raise PlanError(
                "a copy or fill of CUDA arrays: no kernel does it, so no body can hold it"
            )
        replaced[node] = driver.add_node(graph, (), params)
    driver.add_edges(
        graph,
        [
            Edge(replaced.get(e.source, e.source), replaced.get(e.target, e.target))
            for e in edges
            if e.source in replaced or e.target in replaced
        ],
    )
    for node in replaced:
        driver.destroy_node(node)


def _bytes_of(side: CopyOperand, params: MemcpyParams, driver: Driver) -> TensorRef:
    """One side of a memcpy node as a tensor of bytes."""
    if side.memory is not MemoryKind.DEVICE:
        raise PlanError(f"a copy of {side.memory.value} memory: a conditional body holds none")
    return TensorRef(
        address=side.address,
        shape=(params.depth, params.height, params.width),
        strides=(side.rows * side.pitch, side.pitch, 1),
        dtype="uint8",
        itemsize=1,
        device_kind="cpu" if driver.is_emulated else "cuda",
        device=0 if driver.is_emulated else driver.device,
    )


def _refuse(driver: Driver, graph: GraphHandle, kinds: tuple[NodeKind, ...], place: str) -> None:
    for node in driver.nodes(graph):
        kind = driver.node_kind(node)
        if kind in kinds:
            raise PlanError(
                f"graph: expected one that {place} can be, got one with a node of kind {kind.value}"
            )
        inner = _child_of(driver, node)
        if inner is not None:
            _refuse(driver, inner, kinds, place)


def _child_of(driver: Driver, node: NodeHandle) -> GraphHandle | None:
    if driver.node_kind(node) is not NodeKind.CHILD:
        return None
    params = driver.node_params(node)
    assert isinstance(params, ChildParams)
    return params.graph
