"""What CUDA accepts of a graph: to make an executable of it, and to put it into an existing one.

Pure functions over descriptions: they change nothing. The update rules follow CUDA's documentation
of cuGraphExecUpdate and what an H200 answered (docs/driver-notes.md has the table).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.emulated.graph import Graph, Node, Payload
from graphcore.driver.owned_memory import OwnedMemory
from graphcore.driver.pairing import Mismatch, Outline, pair
from graphcore.driver.records import (
    ConditionalParams,
    Dim3,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    NodeParams,
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


NO_CLUSTER: Dim3 = (1, 1, 1)

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


Owned = tuple[OwnedMemory, OwnedMemory]
"""The memory that the old and the new graph allocate themselves."""


def pair_graphs(old: Graph, new: Graph, owned: Owned | None = None) -> Pairs | UpdateRefusal:
    """Which node of ``new`` takes the place of which of ``old``, or the driver's refusal.

    A reversed edge between two equal kernels is no change at all: the nodes pair the other way.
    """
    old_nodes, new_nodes = list(old.nodes), list(new.nodes)
    memory = owned or (_owned_by(old_nodes), _owned_by(new_nodes))
    inner: Pairs = []

    def check(old_index: int, new_index: int) -> UpdateRefusal | None:
        found = _refused_inside(old_nodes[old_index], new_nodes[new_index], memory)
        if isinstance(found, UpdateRefusal):
            return found
        inner.extend(found)
        return None

    found = pair(_outline(old), _outline(new), check)
    if isinstance(found, UpdateRefusal):
        return found
    if isinstance(found, Mismatch):
        named = [
            None if index is None else new_nodes[index] for index in (found.node, found.from_node)
        ]
        return UpdateRefusal(found.result, *named)
    return [(old_nodes[one], new_nodes[other]) for one, other in found] + inner


def _owned_by(nodes: list[Node]) -> OwnedMemory:
    return OwnedMemory(node.payload.params for node in nodes)


def _refused_inside(old: Node, new: Node, owned: Owned) -> Pairs | UpdateRefusal:
    """Why ``new`` cannot take the place of ``old``, or the pairs of the graphs inside them."""
    result = _changed(old.payload, new.payload) or _owned_changed(
        old.payload.params, new.payload.params, owned
    )
    if result is not None:
        return UpdateRefusal(result, new)
    pairs: Pairs = []
    for graphs in zip(old.payload.inner_graphs, new.payload.inner_graphs, strict=True):
        found = pair_graphs(*graphs, owned)
        if isinstance(found, UpdateRefusal):
            return found
        pairs += found
    return pairs


def _outline(graph: Graph) -> Outline:
    position = {node: index for index, node in enumerate(graph.nodes)}
    return Outline(
        tuple(node.kind for node in graph.nodes),
        tuple(
            tuple((position[source], data) for source, data in node.sources.items())
            for node in graph.nodes
        ),
    )


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
        is_same = (before.form, before.size) == (after.form, after.size)
        return None if is_same else UpdateResult.NOT_SUPPORTED
    return UpdateResult.PARAMETERS_CHANGED if refused else None


def _owned_changed(before: NodeParams, after: NodeParams, owned: Owned) -> UpdateResult | None:
    """What an update says about nodes that work on memory their graph allocates itself."""
    old, new = owned
    if isinstance(before, MemcpyParams) and isinstance(after, MemcpyParams):
        sides = ((before.dst, after.dst), (before.src, after.src))
        if any(old.holds(was.address) != new.holds(now.address) for was, now in sides):
            return UpdateResult.PARAMETERS_CHANGED
    elif isinstance(before, MemsetParams) and isinstance(after, MemsetParams):
        is_moved = before.address != after.address
        return UpdateResult.ERROR if is_moved and new.gives_back(after.address) else None
    return None


def _may_change_copy(before: MemcpyParams, after: MemcpyParams) -> bool:
    same_memory = (before.dst.memory, before.src.memory) == (after.dst.memory, after.src.memory)
    return before.is_1d and after.is_1d and same_memory


def _may_change_fill(before: MemsetParams, after: MemsetParams) -> bool:
    if before.height == 1 and after.height == 1:
        return True
    # of a 2-D fill, address and value may change
    return replace(before, address=after.address, value=after.value) == after


def merged(old: Payload, new: Payload, *, is_uploaded: bool = True) -> Payload:
    """What an executable's node does after an accepted change.

    Embedded graphs stay: their nodes are changed one by one. A launched or uploaded executable also
    keeps, though CUDA accepts others, a kernel's cluster dimension, and the function of a
    cooperative kernel where nothing else about it changes; a new one keeps its clusters only
    against none at all.
    """
    params = new.params
    if isinstance(params, KernelParams) and isinstance(old.params, KernelParams):
        if is_uploaded and old.params.config.cooperative and _only_function(old.params, params):
            return old
        is_kept = is_uploaded or params.config.cluster == NO_CLUSTER
        cluster = old.params.config.cluster if is_kept else params.config.cluster
        params = replace(params, config=replace(params.config, cluster=cluster))
    return replace(new, params=params, child=old.child, bodies=old.bodies)


def _only_function(before: KernelParams, after: KernelParams) -> bool:
    return before != after and replace(after, function=before.function) == before


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
        if before != after and not _may_change_copy(before, after):
            raise invalid("a copy that changes is and stays 1-D, of the same kinds of memory")
    elif _changed(old.payload, new) is not None:
        raise invalid("the driver cannot change this about the node")
    if old.payload.child is None or new.child is None:
        return []
    pairs = pair_graphs(old.payload.child, new.child)
    if isinstance(pairs, UpdateRefusal):
        raise Refused(
            "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", f"the child graph: {pairs.result.value}"
        )
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
