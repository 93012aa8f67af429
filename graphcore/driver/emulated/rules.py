"""What CUDA accepts of a graph: to make an executable of it, and to put it into an existing one.

Pure functions over descriptions: they change nothing. The update rules follow CUDA's documentation
of cuGraphExecUpdate and what an H200 answered (docs/driver-notes.md has the table).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.emulated.graph import Graph, Node, Payload
from graphcore.driver.records import (
    AllocParams,
    ConditionalParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    UpdateResult,
)

_BODY_KINDS = frozenset(
    {
        NodeKind.KERNEL,
        NodeKind.MEMCPY,
        NodeKind.MEMSET,
        NodeKind.EMPTY,
        NodeKind.CHILD,
        NodeKind.CONDITIONAL,
    }
)
SWITCHABLE_KINDS = frozenset({NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET})
# nodes of these kinds take no new parameters one by one
FIXED_KINDS = frozenset({NodeKind.EMPTY, NodeKind.ALLOC, NodeKind.FREE, NodeKind.CONDITIONAL})


@dataclass(frozen=True, slots=True)
class UpdateRefusal:
    """Why a graph cannot be put into an executable; ``node`` lies in the new graph."""

    result: UpdateResult
    node: Node | None = None
    from_node: Node | None = None


Pairs = list[tuple[Node, Node]]
"""(node of the executable, node of the new graph), embedded graphs' nodes included."""


# ---- instantiate ----------------------------------------------------------------------------


def check_instantiate(graph: Graph) -> None:
    """Refuses what no executable can be made of, with CUDA's instantiate result in the reason."""
    _check_structure(graph)
    if graph.has_conditional_nodes and graph.was_instantiated:
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED",
            "a graph with conditional nodes can be instantiated once",
            hint="keep the executable, or capture again",
        )
    if graph.has_memory_nodes and graph.live_executables():
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED",
            "a graph with allocation or free nodes can have one executable at a time",
        )


def _check_structure(graph: Graph, *, in_body: bool = False) -> None:
    if len(topological(graph)) < len(graph.nodes):
        raise Refused(
            "CUDA_ERROR_INVALID_VALUE", "CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE: a cycle"
        )
    used = {node.payload.conditional for node in graph.nodes}
    for conditional in graph.conditionals:
        if conditional not in used:
            raise Refused(
                "CUDA_ERROR_INVALID_VALUE",
                "CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED: no node uses handle "
                f"{conditional.handle:#x}",
            )
    for node in graph.nodes:
        if in_body:
            _check_in_body(node)
        for inner in node.payload.inner_graphs:
            _check_structure(inner, in_body=in_body or bool(node.payload.bodies))


def _check_in_body(node: Node) -> None:
    if node.kind not in _BODY_KINDS:
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED",
            "CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED: a conditional body cannot hold "
            f"a node of kind {node.kind.value}",
            node=node.handle,
        )
    # CUDA gives a captured copy another context than the body's kernels have
    if node.kind is NodeKind.MEMCPY and node.payload.was_captured:
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED",
            "CUDA_GRAPH_INSTANTIATE_MULTIPLE_CTXS_NOT_SUPPORTED: a captured copy in a "
            "conditional body",
            node=node.handle,
            hint="copy with a kernel (graphcore_kernels.strided_copy)",
        )


def topological(graph: Graph) -> list[Node]:
    """Nodes after what they depend on, else in creation order; shorter where there is a cycle."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    waiting = {node: len(node.sources) for node in graph.nodes}
    by_position = list(graph.nodes)
    ready = [position[node] for node, count in waiting.items() if not count]
    order: list[Node] = []
    while ready:
        node = by_position[heapq.heappop(ready)]
        order.append(node)
        for target in node.targets:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, position[target])
    return order


# ---- whole-graph update ---------------------------------------------------------------------


def pair_graphs(old: Graph, new: Graph) -> Pairs | UpdateRefusal:
    """Which node of ``new`` takes the place of which of ``old``, or the driver's refusal.

    CUDA pairs the sinks in the order in which they became sinks, then walks up the dependencies in
    edge order. So a reversed edge between two equal kernels is no change at all.
    """
    if len(old.nodes) != len(new.nodes) or old.edge_count != new.edge_count:
        return UpdateRefusal(UpdateResult.TOPOLOGY_CHANGED)
    paired = _pair_topology(old, new)
    if isinstance(paired, UpdateRefusal):
        return paired
    pairs: Pairs = []
    for old_node, new_node in paired:
        refusal = refuse_change(old_node.payload, new_node)
        if refusal is not None:
            return refusal
        pairs.append((old_node, new_node))
        inner = zip(old_node.payload.inner_graphs, new_node.payload.inner_graphs, strict=True)
        for old_inner, new_inner in inner:
            inner_pairs = pair_graphs(old_inner, new_inner)
            if isinstance(inner_pairs, UpdateRefusal):
                return inner_pairs
            pairs += inner_pairs
    return pairs


def _pair_topology(old: Graph, new: Graph) -> Pairs | UpdateRefusal:
    if len(new.sinks) > len(old.sinks):
        extra = list(new.sinks)[len(old.sinks)]
        return UpdateRefusal(UpdateResult.TOPOLOGY_CHANGED, extra)
    became: dict[Node, Node] = {}
    taken: set[Node] = set()
    waiting = list(zip(old.sinks, new.sinks, strict=False))
    for old_node, new_node in waiting:
        became[old_node] = new_node
        taken.add(new_node)
    for old_node, new_node in waiting:
        if len(old_node.sources) != len(new_node.sources):
            return UpdateRefusal(UpdateResult.TOPOLOGY_CHANGED, new_node)
        sources = zip(old_node.sources.items(), new_node.sources.items(), strict=True)
        for (old_source, old_data), (new_source, new_data) in sources:
            known = became.get(old_source)
            if known is None and new_source not in taken and old_data == new_data:
                became[old_source] = new_source
                taken.add(new_source)
                waiting.append((old_source, new_source))
            elif known is not new_source or old_data != new_data:
                return UpdateRefusal(UpdateResult.TOPOLOGY_CHANGED, new_node, new_source)
    if len(became) < len(old.nodes):
        return UpdateRefusal(UpdateResult.TOPOLOGY_CHANGED)
    return list(became.items())


def refuse_change(old: Payload, new_node: Node) -> UpdateRefusal | None:
    """Whether an executable's node may become ``new_node``; embedded graphs are not compared."""
    new = new_node.payload
    if old.params.kind is not new.params.kind:
        return UpdateRefusal(UpdateResult.NODE_TYPE_CHANGED, new_node)
    result = _changed(old, new)
    return None if result is None else UpdateRefusal(result, new_node)


def _changed(old: Payload, new: Payload) -> UpdateResult | None:
    before, after = old.params, new.params
    refused = None
    if isinstance(before, KernelParams) and isinstance(after, KernelParams):
        assert old.function is not None
        assert new.function is not None
        if old.function.device != new.function.device:
            return UpdateResult.UNSUPPORTED_FUNCTION_CHANGE
        if before.config.cooperative != after.config.cooperative:
            return UpdateResult.ATTRIBUTES_CHANGED
    elif isinstance(before, MemcpyParams) and isinstance(after, MemcpyParams):
        refused = before != after and not _may_change_copy(before, after)
    elif isinstance(before, MemsetParams) and isinstance(after, MemsetParams):
        refused = before != after and not _may_change_fill(before, after)
    elif isinstance(before, ConditionalParams) and isinstance(after, ConditionalParams):
        refused = (before.form, before.size) != (after.form, after.size)
    elif isinstance(before, AllocParams) and isinstance(after, AllocParams):
        refused = before.size != after.size
    return UpdateResult.PARAMETERS_CHANGED if refused else None


def _may_change_copy(before: MemcpyParams, after: MemcpyParams) -> bool:
    same_memory = (before.dst.memory, before.src.memory) == (after.dst.memory, after.src.memory)
    return before.is_1d and after.is_1d and same_memory


def _may_change_fill(before: MemsetParams, after: MemsetParams) -> bool:
    if before.height == 1 and after.height == 1:
        return True
    # of a 2-D fill, address and value may change
    return replace(before, address=after.address, value=after.value) == after


def merged(old: Payload, new: Payload) -> Payload:
    """What an executable's node does after an accepted change.

    Embedded graphs stay (their nodes are changed one by one), and so does a kernel's cluster
    dimension: CUDA accepts another one and keeps the old.
    """
    params = new.params
    if isinstance(params, KernelParams) and isinstance(old.params, KernelParams):
        config = replace(params.config, cluster=old.params.config.cluster)
        params = replace(params, config=config)
    return replace(new, params=params, child=old.child, bodies=old.bodies)


# ---- one node of an executable --------------------------------------------------------------


def check_kind(old: Payload, kind: NodeKind, fixed: frozenset[NodeKind] = FIXED_KINDS) -> None:
    """Refuses parameters of ``fixed`` kinds, and of another kind than the node's."""
    if kind in fixed:
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED",
            f"nodes of kind {kind.value} cannot be made or changed this way",
        )
    if old.params.kind is not kind:
        raise invalid(f"expected parameters of kind {old.params.kind.value}, got {kind.value}")


def pair_node(old: Node, new: Payload) -> Pairs:
    """The nodes that change when ``old`` of an executable becomes ``new``: those of a child graph.

    Refuses what cannot be changed. Assumes :func:`check_kind`.
    """
    before, after = old.payload.params, new.params
    if isinstance(before, KernelParams):
        if _crosses_devices(old.payload, new):
            raise invalid("the new function is of another device")
    elif isinstance(before, MemcpyParams) and isinstance(after, MemcpyParams):
        if not _may_change_copy(before, after):
            raise invalid("a copy must be and stay 1-D, between the same kinds of memory")
    elif _changed(old.payload, new) is not None:
        raise invalid("the driver cannot change this about the node")
    if old.payload.child is None or new.child is None:
        return []
    pairs = pair_graphs(old.payload.child, new.child)
    if isinstance(pairs, UpdateRefusal):
        raise invalid(f"the child graph cannot be taken: {pairs.result.value}")
    return pairs


def _crosses_devices(old: Payload, new: Payload) -> bool:
    return (
        old.function is not None
        and new.function is not None
        and old.function.device != new.function.device
    )


def merged_alone(old: Payload, new: Payload) -> Payload:
    """As :func:`merged`, for one node: launch attributes are no part of such a call and stay."""
    result = merged(old, new)
    params = result.params
    if isinstance(params, KernelParams) and isinstance(old.params, KernelParams):
        before = old.params.config
        config = replace(
            params.config,
            cooperative=before.cooperative,
            priority=before.priority,
        )
        result = replace(result, params=replace(params, config=config))
    return result
