"""GraphSnapshot: a whole graph as plain frozen data, which draws itself.

It owns no handle and needs no driver: it can be kept, compared and drawn after the graph is gone.
:mod:`graphcore.graph.reading` makes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphcore.advice import instead
from graphcore.driver.records import NodeHandle
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.graph.nodes import NodeRecord

if TYPE_CHECKING:
    from graphcore.drawing import Drawing

_EXPECTED = "a Graph or GraphSnapshot (graphcore.Graph.adopt takes other libraries' graphs)"

EdgeData = tuple[int, int, int]
"""(from_port, to_port, type) of an edge."""

PLAIN: EdgeData = (0, 0, 0)

Notes = Mapping[int, Sequence[str]] | Callable[[NodeRecord], Sequence[str]]
"""Lines about nodes, by index or by a function of the node."""


@dataclass(frozen=True, slots=True)
class GraphSnapshot:
    """A graph as it was read.

    Args:
        nodes: In creation order; ``nodes[i].index == i``.
        edges: (source index, target index), in the driver's order.
        edge_data: (from_port, to_port, type) of each edge, in the same order.
        device: Ordinal of the device.
        context: The context's id.
        driver: Name of the driver it was read through.
    """

    nodes: tuple[NodeRecord, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_data: tuple[EdgeData, ...] = ()
    device: int = 0
    context: int = 0
    driver: str = ""

    def summary(self) -> dict[str, int]:
        """How many nodes there are of each kind, inner graphs included, most frequent first."""
        counts = Counter(node.kind.value for node in self.walk())
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def walk(self) -> Iterator[NodeRecord]:
        """Every node, each followed by the nodes of the graphs inside it."""
        for node in self.nodes:
            yield node
            for inner in node.inner:
                yield from inner.walk()

    def edges_with_data(self) -> Iterator[tuple[tuple[int, int], EdgeData]]:
        """Every edge with its data; plain data where none was read."""
        data = self.edge_data or (PLAIN,) * len(self.edges)
        return zip(self.edges, data, strict=True)

    def find(self, handle: NodeHandle | int | None) -> NodeRecord | None:
        """The node with this handle, in inner graphs too, or None."""
        return next((node for node in self.walk() if node.handle == handle), None)

    def drawing(self, notes: Notes | None = None) -> Drawing:
        """The graph as a neutral drawing.

        Args:
            notes: Lines about a node beyond what it says itself (attributions, say), shown in its
                table row: by node index, or a function, which is asked of inner graphs' nodes too.

        Raises:
            ConfigurationError: ``notes`` is something else.
        """
        from graphcore.graph.picture import draw

        if callable(notes):
            return draw(self, notes)
        return draw(self, _notes_of(self, {} if notes is None else checked_notes(notes)))

    def to_text(self, *, width: int = 100, full: bool = False) -> str:
        """A table for a terminal, folded past 200 nodes unless ``full``."""
        return self.drawing().to_text(width=width, full=full)

    def to_dot(self) -> str:
        """Graphviz source."""
        return self.drawing().to_dot()

    def to_mermaid(self) -> str:
        """Mermaid source, folded past 200 nodes."""
        return self.drawing().to_mermaid()

    def to_svg(self) -> str:
        """A picture that stands on its own, folded past 200 nodes."""
        return self.drawing().to_svg()

    def to_json(self) -> str:
        """The snapshot as versioned JSON; handles become indices."""
        from graphcore.graph.serial import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> GraphSnapshot:
        """The snapshot that :meth:`to_json` wrote; ConfigurationError for anything else."""
        from graphcore.graph.serial import from_json

        return from_json(text)

    def _repr_html_(self) -> str:
        return self.drawing().to_html()

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.summary().items())
        return (
            f"<GraphSnapshot {len(self.nodes)} nodes ({kinds or 'empty'}), {len(self.edges)} edges>"
        )


def snapshot_of(graph: Any, name: str = "graph") -> GraphSnapshot:
    """``graph`` where it is a snapshot, else what it reads of itself.

    Args:
        graph: A snapshot, or a graph with a ``snapshot`` method.
        name: Of the argument, for the error.

    Raises:
        CacheTypeError: Neither.
    """
    if isinstance(graph, GraphSnapshot):
        return graph
    read = None if isinstance(graph, type) else getattr(graph, "snapshot", None)
    found = read() if callable(read) else None
    if not isinstance(found, GraphSnapshot):
        raise CacheTypeError(
            f"{name}: expected {_EXPECTED}, got {_described(graph)}{instead(graph, 'graph')}"
        )
    return found


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the type {value.__name__}"
    return f"{value!r}" if isinstance(value, (str, int, type(None))) else type(value).__name__


def _notes_of(
    graph: GraphSnapshot, lines: Mapping[int, Sequence[str]]
) -> Callable[[NodeRecord], Sequence[str]]:
    """Lines by index as a function; nodes of inner graphs, whose indices collide, have none."""
    mine = {id(node) for node in graph.nodes}
    return lambda node: lines.get(node.index, ()) if id(node) in mine else ()


def checked_notes(notes: Any) -> Mapping[int, Sequence[str]]:
    """``notes`` as given; ConfigurationError where they are no lines by node index."""
    if not isinstance(notes, Mapping):
        raise ConfigurationError(
            f"notes: expected a mapping of node index -> lines, got {_described(notes)}"
        )
    for index, lines in notes.items():
        good = isinstance(lines, Sequence) and not isinstance(lines, (str, bytes))
        if not good or not all(isinstance(line, str) for line in lines):
            raise ConfigurationError(
                f"notes[{index!r}]: expected a list of lines, got {_described(lines)}"
            )
    return notes
