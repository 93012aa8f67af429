"""What there is to see of a graph: its drawing with pointers told by name, and a page of facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from graphcore.drawing.model import kind_counts
from graphcore.executable.attributions import attributions
from graphcore.executable.memory_report import in_words, memory_report
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.attribution import Attribution

if TYPE_CHECKING:
    from graphcore.drawing import Drawing, Section
    from graphcore.executable.graph import Graph
    from graphcore.resources.fingerprint import Fingerprint

# buffers listed on a page; the rest is counted
_MOST_BUFFERS = 40


def graph_drawing(graph: Graph, names: Mapping[str, Any] | None) -> Drawing:
    """The drawing of ``graph``, its pointers attributed; see :meth:`Graph.drawing`."""
    snapshot = graph.snapshot()
    return _noted(snapshot, graph_attributions(graph, snapshot, names))


def graph_page(graph: Graph, title: str, names: Mapping[str, Any] | None, full: bool) -> str:
    """One self-contained page; see :meth:`Graph.to_html_page`."""
    snapshot = graph.snapshot()
    found = graph_attributions(graph, snapshot, names)
    drawing = _noted(snapshot, found)
    return drawing.to_html_page(title, graph_sections(graph, snapshot, found, names), full=full)


def graph_sections(
    graph: Graph,
    snapshot: GraphSnapshot,
    found: list[Attribution],
    names: Mapping[str, Any] | None,
) -> list[Section]:
    """The cards of a graph's page: what it is, what it takes, what it depends on."""
    return [
        ("Graph", summary(snapshot)),
        ("Memory", _memory(graph)),
        ("Depends on", _identity(graph.fingerprint(names))),
        ("Points into", _points_into(found) or "nothing that is known"),
    ]


def snapshot_sections(snapshot: GraphSnapshot, fingerprint: Fingerprint) -> list[Section]:
    """The cards of a page of a graph that is only a description."""
    return [("Graph", summary(snapshot)), ("Depends on", _identity(fingerprint))]


def summary(snapshot: GraphSnapshot) -> dict[str, str]:
    """Counts and where the graph lives, by name."""
    inner = sum(1 for _ in snapshot.walk()) - len(snapshot.nodes)
    kinds = {kind.replace("_", " "): count for kind, count in snapshot.summary().items()}
    functions = {node.name for node in snapshot.walk() if node.function is not None}
    return {
        "nodes": str(len(snapshot.nodes)) + (f" and {inner} inside them" if inner else ""),
        "of them": kind_counts(kinds) or "none",
        "edges": str(len(snapshot.edges)),
        "different kernels": str(len(functions)),
        "driver": f"{snapshot.driver or 'unknown'}, device {snapshot.device}",
    }


def _memory(graph: Graph) -> dict[str, str]:
    report = memory_report(graph)
    shared = " (shared)" if report.shares_pool else ""
    return {
        "pool": in_words(report.pool_bytes) + shared,
        "allocation nodes": in_words(report.allocation_bytes),
        "an executable": in_words(report.node_bytes),
        "kept alive of others": in_words(report.owner_bytes),
    }


def _identity(fingerprint: Fingerprint) -> dict[str, str]:
    return {"fingerprint": fingerprint.digest, "fields in it": str(len(fingerprint.fields))}


def _points_into(found: list[Attribution]) -> dict[str, str]:
    """How many pointers lead into each buffer, most first; its own memory as one."""
    uses = Counter(name for one in found for name in _buffers(one))
    shown = uses.most_common(_MOST_BUFFERS)
    facts = {name: f"{count} pointer{'' if count == 1 else 's'}" for name, count in shown}
    more = len(uses) - len(shown)
    return facts | ({"and": f"{more} more buffers"} if more else {})


def _buffers(found: Attribution) -> Iterator[str]:
    place = found.place
    if place.source == "graph":
        yield "(memory of its own)"
    elif place.matches:
        yield from (name for name, _ in place.matches)
    elif place.allocation is not None:
        yield f"allocation {place.allocation.base:#x}"
    else:
        yield "(memory nobody knows)"


def graph_attributions(
    graph: Graph, snapshot: GraphSnapshot, names: Mapping[str, Any] | None
) -> list[Attribution]:
    """What the pointers of ``graph`` point into; see :meth:`Graph.attributions`."""
    return attributions(snapshot, graph.driver, graph.owners, graph.private_memory(), names)


def _noted(snapshot: GraphSnapshot, found: list[Attribution]) -> Drawing:
    lines: dict[int, list[str]] = {}
    for one in found:
        lines.setdefault(id(one.node), []).append(str(one))
    return snapshot.drawing(lambda node: lines.get(id(node), ()))
