"""ReplayProfile: how long each node of a replay took, as a table and as notes in the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from graphcore.drawing.text import columns_of, cut, printable
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot

if TYPE_CHECKING:
    from graphcore.drawing import Drawing

EMULATED = "emulated: host time of the Python references, not GPU time"
_MOST_ROWS = 1000


@dataclass(frozen=True, slots=True)
class NodeTime:
    """One node, or one kernel that no node explains, over all replays.

    Args:
        node: The node; None where an event fits none (another stream's work, say).
        where: Indices from the outermost graph to the node, as text: ``"3"``, ``"3.0.1"`` for node
            1 of body 0 (or of the child graph) of node 3.
        name: Kernel name without namespaces, or what it does.
        label: Annotation path.
        us: Mean microseconds a replay.
        runs: How often it ran in all replays; more than the replays inside a loop.
        share: Its part of all time measured, 0 to 1.
        certain: Whether the events could be of no other node; else several nodes run one kernel
            in one launch shape and were told apart by the time they ran.
    """

    node: NodeRecord | None
    where: str
    name: str
    label: str
    us: float
    runs: int
    share: float
    certain: bool = True


@dataclass(frozen=True, slots=True)
class ReplayProfile:
    """Times of a few replays of one graph.

    Args:
        rows: In the order of the nodes; what fits none at the end.
        replays: How many were measured.
        span_us: Mean time from the first node's start to the last one's end.
        driver: Name of the driver.
        is_emulated: Whether the times are the host's.
        snapshot: The graph.
    """

    rows: tuple[NodeTime, ...]
    replays: int
    span_us: float
    driver: str
    is_emulated: bool
    snapshot: GraphSnapshot

    @property
    def busy_us(self) -> float:
        """Mean sum of all nodes' times a replay; more than ``span_us`` where they overlap."""
        return sum(row.us for row in self.rows)

    def slowest(self, count: int = 10) -> tuple[NodeTime, ...]:
        """The rows that took longest, longest first."""
        return tuple(sorted(self.rows, key=lambda row: -row.us)[:count])

    def by_label(self, depth: int = 1) -> dict[str, float]:
        """Microseconds a replay by annotation, cut to ``depth`` parts; "" is what has none."""
        sums: dict[str, float] = {}
        for row in self.rows:
            label = "/".join(row.label.split("/")[:depth])
            sums[label] = sums.get(label, 0.0) + row.us
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def drawing(self) -> Drawing:
        """The graph with the time of each node in its row."""
        times = {id(row.node): row for row in self.rows if row.node is not None}

        def note(node: NodeRecord) -> Sequence[str]:
            row = times.get(id(node))
            return () if row is None else (f"{row.us:.2f} us, {row.share:.1%}",)

        return self.snapshot.drawing(note)

    def to_text(self, *, width: int = 100, most: int | None = None) -> str:
        """A table for a terminal, nodes in order; ``most``: only the slowest."""
        rows = self.rows if most is None else self.slowest(most)
        names = [printable(row.name) for row in rows]
        labels = [printable(row.label) for row in rows]
        label_width = min(max(map(columns_of, labels), default=0), 32)
        room = max(width - 41 - label_width, 12)
        lines = [
            *self._headline().splitlines(),
            f"{'us':>10} {'share':>6} {'runs':>5}  {'node':<8} name",
        ]
        for row, name, label in zip(rows, names, labels, strict=True):
            mark = "" if row.certain else "?"
            text = f"{row.us:10.2f} {row.share:6.1%} {row.runs:5}  {row.where + mark:<8} "
            shown = cut(name, room)
            lines.append(f"{text}{shown}{' ' * (room - columns_of(shown))} {label}".rstrip())
        if len(rows) < len(self.rows):
            lines.append(f"and {len(self.rows) - len(rows)} more")
        return "\n".join(cut(line, width) for line in lines)

    def _headline(self) -> str:
        count = f"{self.replays} replay{'' if self.replays == 1 else 's'}"
        text = (
            f"{self.span_us:.1f} us a replay, {self.busy_us:.1f} us in nodes "
            f"({count}, {self.driver})"
        )
        return f"{text}\n{EMULATED}" if self.is_emulated else text

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{row.us:.2f}</td><td>{row.share:.1%}</td><td>{row.runs}</td>"
            f"<td>{escape(row.where)}{'' if row.certain else '?'}</td>"
            f"<td>{escape(printable(row.name))}</td><td>{escape(printable(row.label))}</td></tr>"
            for row in self.slowest(_MOST_ROWS)
        )
        heads = "".join(
            f"<th scope='col'>{head}</th>"
            for head in ("us", "share", "runs", "node", "name", "label")
        )
        told = "<br>".join(map(escape, self._headline().splitlines()))
        return f"<p>{told}</p><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"

    def __str__(self) -> str:
        return self.to_text(most=20)
