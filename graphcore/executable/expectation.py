"""What a capture was expected to hold at least, and what of it is missing.

Compares by what nodes are and how often: kernels by name, other nodes by kind, inner graphs
included. Order, arguments and launch shapes do not count: a diff is for those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from graphcore.drawing.model import node_count
from graphcore.driver.records import NodeKind
from graphcore.errors import ConfigurationError
from graphcore.graph.nodes import shorten

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph
    from graphcore.graph.nodes import NodeRecord

Expectation = Any
"""A number of nodes, a Graph, a GraphSnapshot, or a GraphPlan (which lies above this layer)."""

WHERE_WORK_GOES = (
    "Work that is missing ran on the host, on another stream (the legacy stream, one that a "
    "library chose itself, a side stream that was not forked from the capture), on another device, "
    "or on another thread."
)

_COPY, _FILL = "memcpy", "memset"
# how a plan's work shows in a captured graph, by the name of its record; what is lowered in
# several ways (calls, joins, events, allocations) is not counted
_PLANNED = {"Memcpy": _COPY, "Memset": _FILL, "Callback": "host", "Conditional": "conditional"}
# nodes that only hold or order others
_UNCOUNTED = frozenset({NodeKind.CHILD, NodeKind.EMPTY})


def check_expectation(expect: Expectation) -> None:
    """Raises ConfigurationError for what says nothing about nodes."""
    if getattr(expect, "is_closed", False):
        raise ConfigurationError("expect: expected an open graph, got a closed one")
    if isinstance(expect, bool) or not isinstance(expect, int):
        if _nodes_of(expect) is not None or hasattr(expect, "snapshot"):
            return
    elif expect >= 0:
        return
    raise ConfigurationError(
        "expect: expected a number of nodes, a GraphPlan, a GraphSnapshot, a Graph or None, got "
        f"{expect!r}"
    )


def unmet(expect: Expectation, graph: Graph) -> str | None:
    """What ``graph`` lacks of ``expect``, in words; None where it has all of it."""
    if isinstance(expect, int):
        count = len(graph.driver.nodes(graph.handle))
        return None if count >= expect else f"expected at least {node_count(expect)}, got {count}"
    if hasattr(expect, "snapshot"):
        expect = expect.snapshot()
    wanted = Counter(_wanted(_nodes_of(expect) or ()))
    found = Counter(_captured(graph.snapshot().walk()))
    missing = wanted - found
    if not _is_plan(expect):
        return _in_words(missing, wanted)
    # a copy or a fill of a plan may have become a launch of a kernel that does it
    spare = sum(count for name, count in (found - wanted).items() if name.startswith("kernel "))
    for kind in (_COPY, _FILL):
        done = min(missing[kind], spare)
        missing[kind] -= done
        spare -= done
    return _in_words(+missing, wanted)


def _in_words(missing: Counter[str], wanted: Counter[str]) -> str | None:
    if not missing:
        return None
    parts = [f"{name} ({count} of {wanted[name]})" for name, count in sorted(missing.items())]
    return f"of {wanted.total()} expected nodes {missing.total()} are missing: {', '.join(parts)}"


def _nodes_of(expect: Any) -> Iterable[Any] | None:
    nodes = getattr(expect, "nodes", None)
    return nodes if isinstance(nodes, (tuple, list)) else None


def _is_plan(expect: Any) -> bool:
    return all(
        hasattr(node, "work") and not hasattr(node, "params") for node in _nodes_of(expect) or ()
    )


def _wanted(nodes: Iterable[Any]) -> Iterator[str]:
    """The names of expected nodes: of a snapshot's records, or of a plan's."""
    for node in nodes:
        if hasattr(node, "params"):
            yield from _captured([node])
            for inner in node.inner:
                yield from _wanted(inner.nodes)
        else:
            yield from _planned(node.work)


def _planned(work: Any) -> Iterator[str]:
    name = type(work).__name__
    if name == "Launch":
        yield f"kernel {work.kernel.name}"
    elif name in _PLANNED:
        yield _PLANNED[name]
    elif name == "Embed":
        yield from _wanted(work.plan.nodes)
    elif name == "EmbedGraph":
        yield from _captured(work.graph.snapshot().walk())
    for body in getattr(work, "bodies", ()):
        yield from _wanted(body.nodes)


def _captured(nodes: Iterable[NodeRecord]) -> Iterator[str]:
    for node in nodes:
        if node.kind is NodeKind.KERNEL:
            yield f"kernel {shorten(node.name)}"
        elif node.kind not in _UNCOUNTED:
            yield node.kind.value
