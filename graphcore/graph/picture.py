"""A snapshot as a Drawing: one box per node, labels as groups, inner graphs inside their box."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphcore.drawing import Box, Drawing, Link
from graphcore.driver.records import (
    AllocParams,
    CopyOperand,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeParams,
)
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import EdgeData, GraphSnapshot

# CUDA's number for programmatic dependency edges
_PROGRAMMATIC = 1


NotesOf = Callable[[NodeRecord], Sequence[str]]
"""What is known about a node beyond itself, as lines; of nodes of inner graphs too."""


def draw(snapshot: GraphSnapshot, notes: NotesOf) -> Drawing:
    """The drawing of a snapshot, with the graphs inside its nodes."""
    boxes = tuple(box_of(node, notes) for node in snapshot.nodes)
    links = tuple(
        Link(source, target, link_kind(data))
        for (source, target), data in snapshot.edges_with_data()
    )
    return Drawing(boxes, links)


def link_kind(data: EdgeData) -> str:
    """What kind of link an edge with this data is."""
    return "programmatic" if data[2] == _PROGRAMMATIC else ""


def inner_heading(node: NodeRecord, number: int) -> str:
    """The heading of a node's inner graph ``number``."""
    return "child graph" if node.child is not None else f"body {number}"


def box_of(node: NodeRecord, notes: NotesOf) -> Box:
    """The box of one node."""
    kind = node.kind.value.replace("_", " ")
    inner = tuple(
        (inner_heading(node, number), draw(graph, notes)) for number, graph in enumerate(node.inner)
    )
    return Box(
        label=node.short_name,
        kind=kind,
        detail=node.work,
        group=node.label,
        title=node.name,
        lines=_lines(node),
        notes=tuple(notes(node)),
        inner=inner,
    )


def _lines(node: NodeRecord) -> tuple[str, ...]:
    params = node.params
    if isinstance(params, KernelParams):
        arguments = (str(argument) for argument in node.arguments)
        return (*_attributes(params), *arguments)
    return _operands(params)


def _attributes(params: KernelParams) -> tuple[str, ...]:
    config = params.config
    lines = []
    if config.cooperative:
        lines.append("cooperative")
    if config.programmatic:
        lines.append("programmatic launch")
    if config.priority:
        lines.append(f"priority {config.priority}")
    return tuple(lines)


def _operands(params: NodeParams) -> tuple[str, ...]:
    if isinstance(params, MemcpyParams):
        return (f"dst {_side(params.dst)}", f"src {_side(params.src)}")
    if isinstance(params, MemsetParams):
        return (f"address {params.address:#x}", f"value {params.value:#x}")
    if isinstance(params, (AllocParams, FreeParams)):
        return (f"address {params.address:#x}",)
    if isinstance(params, EventParams):
        return (f"event {params.event:#x}",)
    if isinstance(params, HostParams):
        name = getattr(params.callback, "__qualname__", None)
        return (f"callback {name or hex(params.function)}",)
    return ()


def _side(operand: CopyOperand) -> str:
    pitch = f", pitch {operand.pitch}" if operand.pitch else ""
    return f"{operand.address:#x} ({operand.memory.value}{pitch})"
