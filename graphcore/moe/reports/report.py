"""ReuseReport: what a GraphReuse did, as values that can be read, printed and shown as a page.

Pure: made of counters, totals and records; :mod:`graphcore.moe.reports.report_facts` gathers those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from graphcore.drawing.document import Document
from graphcore.moe.decisions.counters import MoECounters
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.layers.staged import StagedTotals
from graphcore.moe.manifests.names import Kind, Way
from graphcore.moe.overlap.overlap_totals import OverlapTotals
from graphcore.moe.slots.slot_state import SlotFault, SlotTotals
from graphcore.moe.steps.step_record import StepTotals


class OutcomeLine(NamedTuple):
    """How many calls were of one kind for one reason."""

    kind: Kind
    reason: Reason
    calls: int


class BoundaryLine(NamedTuple):
    """Calls that found a graph changed, or were refused one, in one way.

    Args:
        graph: Name of the graph.
        kind: What they did.
        reason: Why.
        detail: What exactly.
        way: How their work ran.
        calls: How many, of those that are remembered.
        last: Number of the newest.
    """

    graph: str
    kind: Kind
    reason: Reason
    detail: str
    way: Way
    calls: int
    last: int


class VariantLine(NamedTuple):
    """One variant.

    Args:
        name: Graph, phase, namespace and rows in words.
        nodes: Of its graph; None where it is not captured.
        bytes: Of its graph and executable; None where it is not captured.
        uses: How often its executable was asked for.
    """

    name: str
    nodes: int | None
    bytes: int | None
    uses: int

    @property
    def is_captured(self) -> bool:
        return self.bytes is not None


class DepartureLine(NamedTuple):
    """A graph that went, and why. ``bytes`` of its graph and executable."""

    name: str
    cause: str
    bytes: int


class GroupLine(NamedTuple):
    """A group of experts in slots.

    Args:
        name: Of the group.
        experts: How many there are.
        slots: How many can be resident.
        totals: What its steps came to.
        expert_bytes: What a miss copies.
        fault: The steps that were refused, whose results are zero.
    """

    name: str
    experts: int
    slots: int
    totals: SlotTotals
    expert_bytes: int
    fault: SlotFault

    @property
    def moved_bytes(self) -> int:
        """What its misses copied."""
        return self.totals.misses * self.expert_bytes


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What was done since the start.

    ``str()`` is text; :meth:`html` is one self-contained page; a notebook shows a fragment.

    Args:
        driver: Name and ordinal.
        options: What is switched on, and where that was said.
        refused: Why that is less than was asked for; "".
        counters: All of them.
        totals: Calls and host seconds of each kind.
        outcomes: Calls by kind and reason.
        boundaries: Of the calls that are remembered, newest first.
        variants: What is known of each.
        departures: Of the graphs that went, newest last.
        groups: Experts in slots, by group; empty without a pool.
        pool_bytes: Device memory of the slots.
        device_seconds: Seconds between a launch's first and last work, of each kind, where a trace
            measured them: (calls, seconds).
        is_emulated: Whether times say nothing about a GPU.
        overlap: What was queued ahead, and why the rest was not.
        hidden: Host seconds of a trace's steps, and those while the step before still ran.
        staged: What went through scratch memory, by group; empty where nobody said.
    """

    driver: str
    options: str
    refused: str
    counters: MoECounters
    totals: dict[Kind, StepTotals]
    outcomes: tuple[OutcomeLine, ...] = ()
    boundaries: tuple[BoundaryLine, ...] = ()
    variants: tuple[VariantLine, ...] = ()
    departures: tuple[DepartureLine, ...] = ()
    groups: tuple[GroupLine, ...] = ()
    pool_bytes: int = 0
    device_seconds: tuple[tuple[Kind, int, float], ...] = ()
    is_emulated: bool = False
    overlap: OverlapTotals | None = None
    hidden: tuple[float, float] | None = None
    staged: tuple[tuple[str, StagedTotals], ...] = ()

    @property
    def hit_rate(self) -> float | None:
        """Of the experts that were asked for; None where none was."""
        asked = self.hits + self.admissions
        return self.hits / asked if asked else None

    @property
    def hits(self) -> int:
        """Experts that were resident when a step asked for them."""
        return sum(group.totals.hits for group in self.groups)

    @property
    def admissions(self) -> int:
        """Experts that were copied into slots."""
        return sum(group.totals.misses for group in self.groups)

    @property
    def moved_bytes(self) -> int:
        """What those copies came to; staged ones are apart."""
        return sum(group.moved_bytes for group in self.groups)

    @property
    def staged_bytes(self) -> int:
        """What was copied through scratch memory."""
        return sum(totals.nbytes for _, totals in self.staged)

    @property
    def graph_bytes(self) -> int:
        """Of the graphs and executables that are held."""
        return sum(variant.bytes or 0 for variant in self.variants)

    def declined(self) -> Iterator[BoundaryLine]:
        """The boundaries at which no graph was launched, newest first."""
        return (line for line in self.boundaries if line.way is not Way.GRAPH)

    def document(self) -> Document:
        """Its cards and tables."""
        from graphcore.moe.reports.report_document import document

        return document(self)

    def to_html_page(self) -> str:
        """One self-contained page."""
        return self.document().to_html_page()

    def __str__(self) -> str:
        return self.document().to_text()

    def _repr_html_(self) -> str:
        return self.document().to_html()
