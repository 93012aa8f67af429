"""What the driver will say to a whole-graph update: the answer, the field and the public rule.

Pure: two snapshots in, the first difference that an update refuses out. The table of answers is
docs/driver-notes.md, measured on a device. It also finds what the driver accepts and does not
apply (the cluster trap).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphcore.driver.owned_memory import OwnedMemory
from graphcore.driver.pairing import Mismatch, Outline, Pairs, pair
from graphcore.driver.records import (
    ConditionalParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeParams,
    UpdateResult,
)
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.pairing import first_unlike, outline
from graphcore.graph.snapshot import GraphSnapshot


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between an executable's graph and a new one that an update does not carry.

    Args:
        result: The driver's answer; SUCCESS for a trap, which is accepted and not applied.
        field: The field that changed, for example ``"height"`` or ``"dependencies"``.
        rule: The public rule it breaks, in words.
        node: The node of the new graph, or None where none can be named.
        named_by_driver: Whether the driver's own answer names the node.
        before: The field's old value, where one node is at fault.
        after: The field's new value.
        path: Index of ``node`` in the new graph; for inner nodes the indices of the nodes around
            it first, a conditional's body number between them.
    """

    result: UpdateResult
    field: str
    rule: str
    node: NodeRecord | None = None
    named_by_driver: bool = False
    before: object | None = None
    after: object | None = None
    path: tuple[int, ...] = ()

    @property
    def node_index(self) -> int | None:
        """Index of the outermost node in the new graph."""
        return self.path[0] if self.path else None

    def __str__(self) -> str:
        where = "the graph" if self.node is None else str(self.node)
        change = ""
        if self.before is not None or self.after is not None:
            change = f" changed from {self.before} to {self.after}"
        return f"{where}: {self.field}{change}: {self.rule}"


CLUSTER_RULE = "the driver accepts another cluster size and keeps the old one"
COOPERATIVE_RULE = (
    "the driver accepts another function for a cooperative kernel of the same arguments and keeps "
    "the old one"
)

_REFUSED = UpdateResult.PARAMETERS_CHANGED


def first_difference(old: GraphSnapshot, new: GraphSnapshot) -> Difference | None:
    """The first difference for which the driver refuses to update ``old`` to ``new``, or None.

    None predicts SUCCESS, as far as two descriptions can tell: the driver also refuses a graph with
    allocation nodes while another executable of it lives, and operands of another context. Where
    the driver would name no node, ``node`` is the first that is different here, and
    ``named_by_driver`` is False.
    """
    return predict(old, new)[0]


def trap_differences(old: GraphSnapshot, new: GraphSnapshot) -> list[Difference]:
    """What the driver would answer SUCCESS to and keep as it was.

    Changed cluster sizes, and other functions of cooperative kernels, of an executable that was
    launched or uploaded; whether it was is not asked. Empty where the update is refused anyway.
    """
    return predict(old, new)[1]


Prediction = tuple[Difference | None, list[Difference]]


def predict(
    old: GraphSnapshot,
    new: GraphSnapshot,
    outlines: tuple[Outline, Outline] | None = None,
    pairs: Pairs | Mismatch | None = None,
) -> Prediction:
    """:func:`first_difference` and :func:`trap_differences` together.

    ``outlines`` and ``pairs`` are what an update compares besides parameters, and what it makes of
    that, where it is known.
    """
    owned = owned_by(old), owned_by(new)
    outlines = outlines or (outline(old), outline(new))
    found = pair(*outlines) if pairs is None else pairs
    return _predict((old, new), (), owned, outlines, found)


Graphs = tuple[GraphSnapshot, GraphSnapshot]
Owned = tuple[OwnedMemory, OwnedMemory]
"""The memory that the old and the new graph allocate themselves."""


def owned_by(graph: GraphSnapshot) -> OwnedMemory:
    """The memory that a graph's own nodes allocate."""
    return OwnedMemory(node.params for node in graph.nodes)


def _predict(
    graphs: Graphs,
    path: tuple[int, ...],
    owned: Owned,
    outlines: tuple[Outline, Outline],
    pairs: Pairs | Mismatch,
) -> Prediction:
    check = _Check(graphs, path, owned)
    if isinstance(pairs, Mismatch):  # what comes first: where they part, or a node that is refused
        stopped = pair(*outlines, check)
        if isinstance(stopped, Mismatch):
            stopped = _mismatch(stopped, *graphs, path)
        assert isinstance(stopped, Difference)
        return stopped, []
    for before, after in pairs:
        refusal = check(before, after)
        if refusal is not None:
            return refusal, []
    return None, check.traps


class _Check:
    """Compares the parameters of pairs of nodes; returns a refusal, and collects traps."""

    def __init__(self, graphs: Graphs, path: tuple[int, ...], owned: Owned) -> None:
        self._graphs, self._path, self._owned = graphs, path, owned
        self.traps: list[Difference] = []

    def __call__(self, old_index: int, new_index: int) -> Difference | None:
        old, new = self._graphs
        before, after = old.nodes[old_index], new.nodes[new_index]
        found = _refusal(before, after) or _owned_refusal(before.params, after.params, self._owned)
        trap = found or _trap(before.params, after.params)
        here = (*self._path, new_index)
        if found is not None:
            return _at(found, after, here)
        if trap is not None:
            self.traps.append(_at(trap, after, here))
        for graphs, inside in _inner(before, after, here):
            both = outline(graphs[0]), outline(graphs[1])
            found, traps = _predict(graphs, inside, self._owned, both, pair(*both))
            if found is not None:
                return found
            self.traps += traps
        return None


def _inner(
    before: NodeRecord, after: NodeRecord, path: tuple[int, ...]
) -> Iterator[tuple[Graphs, tuple[int, ...]]]:
    """The graphs inside two nodes of one kind, pair by pair, with the path to each."""
    if before.child is not None and after.child is not None:
        yield (before.child, after.child), path
    for number, bodies in enumerate(zip(before.bodies, after.bodies, strict=True)):
        yield bodies, (*path, number)


def _mismatch(
    found: Mismatch, old: GraphSnapshot, new: GraphSnapshot, path: tuple[int, ...]
) -> Difference:
    index = first_unlike(old, new) if found.node is None else found.node
    return Difference(
        found.result,
        found.field,
        found.rule,
        None if index is None else new.nodes[index],
        named_by_driver=found.node is not None,
        before=found.before,
        after=found.after,
        path=path if index is None else (*path, index),
    )


def _at(found: Difference, node: NodeRecord, path: tuple[int, ...]) -> Difference:
    return Difference(
        found.result,
        found.field,
        found.rule,
        node,
        found.result is not UpdateResult.SUCCESS,
        found.before,
        found.after,
        path,
    )


def _refusal(old: NodeRecord, new: NodeRecord) -> Difference | None:
    before, after = old.params, new.params
    if isinstance(before, KernelParams) and isinstance(after, KernelParams):
        return _kernel_refusal(before, after, old, new)
    if isinstance(before, MemcpyParams) and isinstance(after, MemcpyParams):
        return _memcpy_refusal(before, after)
    if isinstance(before, MemsetParams) and isinstance(after, MemsetParams):
        return _memset_refusal(before, after)
    if isinstance(before, ConditionalParams) and isinstance(after, ConditionalParams):
        rule = "an update keeps a conditional node's own parameters"
        return _first_changed(before, after, ("form", "size"), rule, UpdateResult.NOT_SUPPORTED)
    return None


def _owned_refusal(before: NodeParams, after: NodeParams, owned: Owned) -> Difference | None:
    """What nodes may not change that work on memory their graph allocates itself."""
    if isinstance(before, MemcpyParams) and isinstance(after, MemcpyParams):
        return _owned_copy_refusal(before, after, owned)
    if not isinstance(before, MemsetParams) or not isinstance(after, MemsetParams):
        return None
    was, now = before.address, after.address
    if was == now or not owned[1].gives_back(now):
        return None
    rule = "an update keeps the fills of memory that the graph allocates and frees"
    return Difference(UpdateResult.ERROR, "address", rule, before=hex(was), after=hex(now))


def _owned_copy_refusal(
    before: MemcpyParams, after: MemcpyParams, owned: Owned
) -> Difference | None:
    old, new = owned
    words = ("other memory", "the graph's own")
    for side in ("dst", "src"):
        was = old.holds(getattr(before, side).address)
        now = new.holds(getattr(after, side).address)
        if was != now:
            rule = "an update keeps whether a copy works on memory that the graph allocates"
            return Difference(
                _REFUSED, f"{side}.address", rule, before=words[was], after=words[now]
            )
    return None


def _kernel_refusal(
    before: KernelParams, after: KernelParams, old: NodeRecord, new: NodeRecord
) -> Difference | None:
    was = old.function.context if old.function is not None else 0
    now = new.function.context if new.function is not None else 0
    if was != now:
        return Difference(
            UpdateResult.UNSUPPORTED_FUNCTION_CHANGE,
            "context",
            "an update keeps the context a kernel's function was loaded in",
            before=was,
            after=now,
        )
    was, now = before.config.cooperative, after.config.cooperative
    if was != now:
        return Difference(
            UpdateResult.ATTRIBUTES_CHANGED,
            "cooperative",
            "an update keeps whether a kernel is cooperative",
            before=was,
            after=now,
        )
    return None


def _memcpy_refusal(before: MemcpyParams, after: MemcpyParams) -> Difference | None:
    for side in ("dst", "src"):
        was, now = getattr(before, side), getattr(after, side)
        if was.memory is not now.memory:
            return Difference(
                _REFUSED,
                f"{side}.memory",
                "an update keeps the kind of memory of a copy's sides",
                before=was.memory.value,
                after=now.memory.value,
            )
    if before.is_1d and after.is_1d:
        return None
    rule = "an update keeps everything of a copy of more than one row"
    fields = ("depth", "height", "width", "dst", "src")
    return _first_changed(before, after, fields, rule)


def _memset_refusal(before: MemsetParams, after: MemsetParams) -> Difference | None:
    if before.height == 1 and after.height == 1:
        return None
    rule = "an update keeps the shape of a fill of more than one row"
    return _first_changed(before, after, ("height", "width", "element_size", "pitch"), rule)


def _first_changed(
    before: Any,
    after: Any,
    fields: tuple[str, ...],
    rule: str,
    result: UpdateResult = UpdateResult.PARAMETERS_CHANGED,
) -> Difference | None:
    for field in fields:
        was, now = getattr(before, field, None), getattr(after, field, None)
        if was != now:
            return Difference(result, field, rule, before=was, after=now)
    return None


def _trap(before: NodeParams, after: NodeParams) -> Difference | None:
    if not isinstance(before, KernelParams) or not isinstance(after, KernelParams):
        return None
    accepted = UpdateResult.SUCCESS
    was, now = before.config.cluster, after.config.cluster
    if was != now:
        return Difference(accepted, "cluster", CLUSTER_RULE, before=was, after=now)
    is_other = before.function != after.function and before.arguments == after.arguments
    if before.config.cooperative and is_other:
        return Difference(accepted, "function", COOPERATIVE_RULE)
    return None
