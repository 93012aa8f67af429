"""diff(a, b): what changed between two graphs, node by node and field by field.

Nodes are aligned as an update pairs them where the topologies agree, else by likeness in creation
order (alignment.py). Changes of topology are located by the nodes around them. Pure; handles never
count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from graphcore.driver.pairing import pair
from graphcore.driver.records import (
    AllocParams,
    ConditionalParams,
    CopyOperand,
    FreeParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
)
from graphcore.graph.alignment import align
from graphcore.graph.nodes import NodeRecord, words_of
from graphcore.graph.pairing import outline
from graphcore.graph.prediction import Difference, first_difference, predict, trap_differences
from graphcore.graph.snapshot import GraphSnapshot, checked_notes, snapshot_of
from graphcore.graph.topology import TopologyChange, topology_changes

if TYPE_CHECKING:
    from graphcore.drawing import Drawing

__all__ = [
    "Difference",
    "FieldChange",
    "GraphDiff",
    "NodeChange",
    "TopologyChange",
    "diff",
    "first_difference",
    "trap_differences",
]


class Word(int):
    """A number that is read in hex: an address, or what a fill writes."""

    def __str__(self) -> str:
        return hex(self)


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field of one node: its value before and after.

    An argument without a signature is its bytes; as text, what the pictures show for it.
    ``before_name`` and ``after_name`` say which named memory the addresses in them lie in; they are
    empty where no names were given.
    """

    field: str
    before: object
    after: object
    before_name: str = ""
    after_name: str = ""

    def __str__(self) -> str:
        before, after = _shown(self.before), _shown(self.after)
        if self.before_name:
            before = f"{self.before_name} ({before})"
        if self.after_name:
            after = f"{self.after_name} ({after})"
        return f"{self.field}: {before} -> {after}"


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node that both graphs have, with what changed in it (inner graphs included).

    ``inner`` are the differences of its child graph or bodies, in order, each a whole GraphDiff.
    """

    before: NodeRecord
    after: NodeRecord
    fields: tuple[FieldChange, ...]
    inner: tuple[GraphDiff, ...] = ()

    def __str__(self) -> str:
        return f"{self.after}: " + "; ".join(map(str, self.fields))


@dataclass(frozen=True, slots=True, repr=False)
class GraphDiff:
    """What changed from one graph to another.

    Args:
        changed: Aligned nodes that differ.
        removed: Nodes only the old graph has.
        added: Nodes only the new graph has.
        removed_edges: Edges between aligned nodes that only the old graph has (old indices).
        added_edges: Likewise of the new graph (new indices).
        refusal: The first difference for which the driver refuses an update, or None.
        traps: What the driver would accept and not apply.
        topology: What came or went, each change with the nodes around it.
        old: The old graph.
        new: The new graph.
        partner: New index -> old index of the nodes that both graphs have.
    """

    changed: tuple[NodeChange, ...]
    removed: tuple[NodeRecord, ...]
    added: tuple[NodeRecord, ...]
    removed_edges: tuple[tuple[int, int], ...]
    added_edges: tuple[tuple[int, int], ...]
    refusal: Difference | None
    traps: tuple[Difference, ...]
    topology: tuple[TopologyChange, ...]
    old: GraphSnapshot
    new: GraphSnapshot
    partner: Mapping[int, int]

    @property
    def is_empty(self) -> bool:
        """Whether the graphs do the same on the same addresses."""
        return not (
            self.changed or self.removed or self.added or self.removed_edges or self.added_edges
        )

    def __repr__(self) -> str:
        parts = (("changed", self.changed), ("removed", self.removed), ("added", self.added))
        counts = ", ".join(f"{len(nodes)} {what}" for what, nodes in parts)
        answer = "possible" if self.update_possible else "not possible"
        return f"<GraphDiff {counts}; update in place {answer}>"

    def __bool__(self) -> bool:
        """Whether something differs."""
        return not self.is_empty

    @property
    def update_possible(self) -> bool:
        """Whether an update in place would be accepted and carry every change."""
        return self.refusal is None and not self.traps

    def drawing(self, notes: Mapping[int, Sequence[str]] | None = None) -> Drawing:
        """Both graphs as one neutral drawing: changes marked and listed, the rest folded.

        Args:
            notes: Further lines by index in the new graph (attributions, say).

        Raises:
            ConfigurationError: ``notes`` is something else.
        """
        from graphcore.graph.diff_picture import draw_diff

        return draw_diff(self, {} if notes is None else checked_notes(notes))

    def to_text(self, *, width: int = 100, full: bool = False) -> str:
        """A table for a terminal: the verdict on an update, nodes, and what changed in each."""
        return self.drawing().to_text(width=width, full=full)

    def to_svg(self) -> str:
        """A picture that stands on its own."""
        return self.drawing().to_svg()

    def to_html_page(self, title: str = "What changed") -> str:
        """One self-contained page."""
        return self.drawing().to_html_page(title)

    def to_dot(self) -> str:
        """Graphviz source."""
        return self.drawing().to_dot()

    def to_mermaid(self) -> str:
        """Mermaid source."""
        return self.drawing().to_mermaid()

    def _repr_html_(self) -> str:
        return self.drawing().to_html()

    def __str__(self) -> str:
        lines = [str(change) for change in self.changed]
        lines += [str(change) for change in self.topology]
        if self.refusal is not None:
            lines.append(f"update: {self.refusal.result.value}: {self.refusal}")
        lines += [f"update: accepted but not applied: {trap}" for trap in self.traps]
        return "\n".join(lines) or "no difference"


class HasSnapshot(Protocol):
    """Anything that can be read: a Graph."""

    def snapshot(self) -> GraphSnapshot: ...


def diff(a: GraphSnapshot | HasSnapshot, b: GraphSnapshot | HasSnapshot) -> GraphDiff:
    """What changed from ``a`` to ``b``: snapshots, or graphs that are read first.

    Addresses are told as numbers; :func:`graphcore.diff` takes names for them.

    Raises:
        CacheTypeError: One of them is neither.
    """
    old, new = snapshot_of(a, "a"), snapshot_of(b, "b")
    outlines = outline(old), outline(new)
    pairs = pair(*outlines)
    partner = align(old, new, pairs)
    changed = []
    for index, before in partner.items():
        found = _node_change(old.nodes[before], new.nodes[index])
        if found is not None:
            changed.append(found)
    forward = {before: after for after, before in partner.items()}
    # an edge of other data (a programmatic one) is another edge
    old_edges = {
        (forward.get(s), forward.get(t), data): (s, t) for (s, t), data in old.edges_with_data()
    }
    new_edges = {
        (s, t, data): (s, t)
        for (s, t), data in new.edges_with_data()
        if s in partner and t in partner
    }
    removed = tuple(node for node in old.nodes if node.index not in forward)
    added = tuple(node for node in new.nodes if node.index not in partner)
    removed_edges = tuple(
        edge for key, edge in old_edges.items() if None not in key and key not in new_edges
    )
    added_edges = tuple(edge for key, edge in new_edges.items() if key not in old_edges)
    refusal, traps = predict(old, new, outlines, pairs)
    return GraphDiff(
        tuple(changed),
        removed,
        added,
        removed_edges,
        added_edges,
        refusal,
        tuple(traps),
        topology_changes(old, new, (removed, added), (removed_edges, added_edges)),
        old,
        new,
        partner,
    )


def _node_change(before: NodeRecord, after: NodeRecord) -> NodeChange | None:
    # most nodes of two captures differ in arguments alone, or in nothing: no field is listed
    if _same_launch(before, after):
        fields = tuple(_argument_changes(before, after))
        return NodeChange(before, after, fields) if fields else None
    if before.params == after.params and before.name == after.name and not after.inner:
        return None
    inner = tuple(diff(*pair) for pair in zip(before.inner, after.inner, strict=False))
    fields = tuple(_changes(before, after, inner))
    return NodeChange(before, after, fields, inner) if fields else None


def _same_launch(before: NodeRecord, after: NodeRecord) -> bool:
    """Whether both launch one function in one shape, with arguments of one signature."""
    old, new = before.params, after.params
    return (
        isinstance(old, KernelParams)
        and isinstance(new, KernelParams)
        and old.config == new.config
        and before.kernel is after.kernel
        and (before.function is after.function or before.function == after.function)
        and len(old.arguments) == len(new.arguments)
    )


def _argument_changes(before: NodeRecord, after: NodeRecord) -> Iterator[FieldChange]:
    assert isinstance(before.params, KernelParams)
    assert isinstance(after.params, KernelParams)
    pairs = zip(before.params.arguments, after.params.arguments, strict=True)
    for index, (was, now) in enumerate(pairs):
        if was == now:
            continue
        values = _argument_value(before, index, was), _argument_value(after, index, now)
        if values[0] != values[1]:
            yield FieldChange(f"argument {index}", *values)


def _argument_value(node: NodeRecord, index: int, data: bytes) -> object:
    """The value of an argument where its type is known, pointers as numbers; else its bytes."""
    if node.kernel is None:
        return data
    parameter = node.kernel.parameters[index]
    return Word.from_bytes(data, "little") if parameter.is_pointer else parameter.unpack(data)


def _changes(
    before: NodeRecord, after: NodeRecord, inner: tuple[GraphDiff, ...]
) -> Iterator[FieldChange]:
    old, new = dict(fields_of(before)), dict(fields_of(after))
    for name in {**old, **new}:
        was, now = old.get(name), new.get(name)
        if was != now:
            yield FieldChange(name, was, now)
    for number, found in enumerate(inner):
        where = "child" if before.child is not None else f"body {number}"
        for change in found.changed:
            prefix = f"{where} node {change.after.index}"
            for inside in change.fields:
                yield FieldChange(f"{prefix} {inside.field}", inside.before, inside.after)
        if found.topology:
            yield FieldChange(f"{where} topology", _size(found.old), _size(found.new))


def _shown(value: object) -> str:
    """A value as text; bytes in full, because a change may be anywhere in them."""
    return words_of(value, limit=None) if isinstance(value, bytes) else str(value)


def _size(graph: GraphSnapshot) -> str:
    return f"{len(graph.nodes)} nodes, {len(graph.edges)} edges"


def fields_of(node: NodeRecord) -> Iterator[tuple[str, object]]:
    """The fields of a node that mean something, by name; handles left out, pointers as numbers."""
    yield "kind", node.kind.value
    params = node.params
    if isinstance(params, KernelParams):
        yield from _kernel_fields(node, params)
    elif isinstance(params, MemcpyParams):
        for side in ("dst", "src"):
            yield from _operand_fields(side, getattr(params, side))
        yield from (("width", params.width), ("height", params.height), ("depth", params.depth))
    elif isinstance(params, MemsetParams):
        for name in ("address", "value", "element_size", "width", "height", "pitch"):
            value = getattr(params, name)
            yield name, Word(value) if name in ("address", "value") else value
    elif isinstance(params, ConditionalParams):
        yield from (("form", params.form), ("size", params.size))
    elif isinstance(params, AllocParams):
        yield from (("size", params.size), ("address", Word(params.address)))
    elif isinstance(params, FreeParams):
        yield "address", Word(params.address)


def _kernel_fields(node: NodeRecord, params: KernelParams) -> Iterator[tuple[str, object]]:
    yield "function", node.name
    config = params.config
    for name in (
        "grid",
        "block",
        "shared_bytes",
        "cluster",
        "cooperative",
        "priority",
        "programmatic",
    ):
        yield name, getattr(config, name)
    for index, data in enumerate(params.arguments):
        yield f"argument {index}", _argument_value(node, index, data)


def _operand_fields(side: str, operand: CopyOperand) -> Iterator[tuple[str, object]]:
    yield f"{side}.address", Word(operand.address)
    yield f"{side}.memory", operand.memory.value
    yield f"{side}.pitch", operand.pitch
    yield f"{side}.rows", operand.rows
