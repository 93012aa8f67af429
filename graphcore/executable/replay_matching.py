"""Which node a measured event belongs to: by kernel and launch shape, then by order.

A profiler names kernels, not nodes. Nodes that run one kernel in one shape are told apart by the
number CUPTI gives each node of a graph (they grow in creation order) where there is one, else by
time; rows say when that was needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from graphcore.driver.records import Dim3, KernelParams, NodeKind
from graphcore.executable.replay_profile import NodeTime
from graphcore.graph.nodes import NodeRecord, shorten
from graphcore.graph.snapshot import GraphSnapshot

TIMED = (NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET)
"""Kinds of nodes that take time on the device."""

Key = tuple[str, ...]


@dataclass(slots=True)
class TimedEvent:
    """One run of something on the device.

    Args:
        kind: "kernel", "memcpy" or "memset".
        name: Of a kernel: its name, as demangled by the profiler.
        start_us: When it began.
        us: How long it took.
        replay: Which replay it belongs to, from 0.
        grid: Of a kernel.
        block: Of a kernel.
        node_id: The number of its node in the executable, where the profiler says it.
        node: Where :func:`match` puts its index path in words.
        label: And its node's annotation.
    """

    kind: str
    name: str
    start_us: float
    us: float
    replay: int
    grid: Dim3 | None = None
    block: Dim3 | None = None
    node_id: int | None = None
    node: str = ""
    label: str = ""


@dataclass(slots=True)
class _Found:
    events: list[TimedEvent] = field(default_factory=list)
    certain: bool = True


def match(
    events: Sequence[TimedEvent], snapshot: GraphSnapshot, replays: int
) -> tuple[NodeTime, ...]:
    """A row for every node that ran, and one for every kernel that no node explains.

    Also writes each event's ``node`` and ``label``.
    """
    nodes = list(_walk(snapshot, ""))
    found: dict[int, _Found] = {}
    left = _assign(events, nodes, found, _exact)
    # demanglers may differ in how they write template arguments
    left = _assign(left, nodes, found, _loose)
    for event in left:
        event.kind = _kind_of_own_kernel(event)
    left = _assign(left, nodes, found, _exact)
    strangers: dict[str, list[TimedEvent]] = {}
    for event in left:
        strangers.setdefault(event.name or event.kind, []).append(event)
    total = _sum(events) or 1.0
    rows = [_row(*nodes[at], found[at], replays, total) for at in sorted(found)]
    rows += [
        NodeTime(None, "", shorten(name), "", _sum(runs) / replays, len(runs), _sum(runs) / total)
        for name, runs in sorted(strangers.items())
    ]
    return tuple(rows)


def _kind_of_own_kernel(event: TimedEvent) -> str:
    """CUDA does some copies and fills with kernels of its own, such as ``memcpy32_post``."""
    kinds = ("memcpy", "memset")
    return next((kind for kind in kinds if event.name.startswith(kind)), event.kind)


def _assign(
    events: Sequence[TimedEvent],
    nodes: Sequence[tuple[str, NodeRecord]],
    found: dict[int, _Found],
    written: Callable[[str], str],
) -> list[TimedEvent]:
    """Gives events to the nodes that have none yet; returns those that fit none."""
    by_key: dict[Key, list[int]] = {}
    for at, (_, node) in enumerate(nodes):
        if node.kind in TIMED and at not in found:
            by_key.setdefault(_node_key(node, written), []).append(at)
    left = []
    for (_, key), group in _groups(events, written).items():
        chosen, certain = _chosen(by_key.get(key, []), group)
        left += group[len(chosen) :]
        for event, at in zip(group, chosen, strict=False):
            where, node = nodes[at]
            entry = found.setdefault(at, _Found())
            entry.events.append(event)
            entry.certain = entry.certain and certain
            event.node, event.label = f"{where} ({node.short_name})", node.label
    return left


def _exact(name: str) -> str:
    return "".join(name.split())


def _loose(name: str) -> str:
    return shorten(name).partition("<")[0]


def _walk(snapshot: GraphSnapshot, prefix: str) -> Iterator[tuple[str, NodeRecord]]:
    for node in snapshot.nodes:
        where = f"{prefix}{node.index}"
        yield where, node
        for number, inner in enumerate(node.inner):
            yield from _walk(inner, f"{where}.{number}.")


def _node_key(node: NodeRecord, written: Callable[[str], str]) -> Key:
    params = node.params
    if not isinstance(params, KernelParams):
        return (node.kind.value,)
    return ("kernel", written(node.name), str(params.config.grid), str(params.config.block))


def _groups(
    events: Sequence[TimedEvent], written: Callable[[str], str]
) -> dict[tuple[int, Key], list[TimedEvent]]:
    """Events by replay and key, in the order of their nodes."""
    groups: dict[tuple[int, Key], list[TimedEvent]] = {}
    for event in sorted(events, key=lambda event: (event.node_id or 0, event.start_us)):
        key: Key = (event.kind,)
        if event.kind == "kernel":
            key = ("kernel", written(event.name), str(event.grid), str(event.block))
        groups.setdefault((event.replay, key), []).append(event)
    return groups


def _chosen(candidates: Sequence[int], group: Sequence[TimedEvent]) -> tuple[list[int], bool]:
    """A node for each event of one replay and key, as far as there are; and whether it is sure."""
    if len(candidates) == 1:  # a body's node may have run often
        return [candidates[0]] * len(group), True
    numbers = sorted({event.node_id for event in group if event.node_id is not None})
    if len(numbers) == len(candidates) and all(event.node_id is not None for event in group):
        at = dict(zip(numbers, candidates, strict=True))
        return [at[event.node_id] for event in group if event.node_id is not None], True
    return list(candidates[: len(group)]), False


def _row(where: str, node: NodeRecord, found: _Found, replays: int, total: float) -> NodeTime:
    spent = _sum(found.events)
    return NodeTime(
        node,
        where,
        node.short_name,
        node.label,
        spent / replays,
        len(found.events),
        spent / total,
        found.certain,
    )


def _sum(events: Sequence[TimedEvent]) -> float:
    return sum(event.us for event in events)
