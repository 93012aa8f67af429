"""Drawing: boxes, links and groups as neutral data. It knows no graph and no driver.

Whoever wants to be seen builds a Drawing; the modules beside this one turn it into SVG, HTML, DOT,
Mermaid or terminal text. The same drawing always gives the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphcore.errors import ConfigurationError

FOLD_LIMIT = 200
"""Drawings of more boxes than this are folded by their groups."""

Section = tuple[str, Mapping[str, object] | str]
"""(heading, what is under it): pairs of name and value, or preformatted text."""

RACE = "race"
"""Kind of a link between two boxes that must not run at once and may; marked ``!``."""

Change = Literal["", "added", "removed", "changed"]
SIGNS: dict[Change, str] = {"added": "+", "removed": "-", "changed": "~"}
"""How a change is written wherever it is coloured: nothing is told by colour alone."""


class Link(NamedTuple):
    """An arrow between two boxes, by index. ``kind`` "" is drawn solid, others dashed."""

    source: int
    target: int
    kind: str = ""
    change: Change = ""


class Notice(NamedTuple):
    """A sentence above the picture; ``tone`` is what it means for the reader."""

    text: str
    tone: Literal["", "good", "bad"] = ""


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a picture, and one row of a table.

    Args:
        label: First line, short.
        kind: What it is, in one word: chooses the colour, and is written too.
        detail: Second line.
        group: Path of the groups it lies in, ``"layer 3/attention"``; empty where none.
        title: The label in full.
        lines: Further lines of its table row.
        notes: Lines that somebody found out about it; shown before the others, and stronger.
        inner: (heading, drawing) of what lies inside the box.
        parts: Of a folded group: (kind, label, how many) of the boxes it stands for, those of one
            kind together.
        change: In a comparison: what became of the box; empty where nothing did.
        number: What it is called in tables, ``"4->3"`` where that changed; empty is its index.
        changes: Of a folded group in a comparison: (change, how many) of the boxes inside.
    """

    label: str
    kind: str
    detail: str = ""
    group: str = ""
    title: str = ""
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inner: tuple[tuple[str, Drawing], ...] = ()
    parts: tuple[tuple[str, str, int], ...] = ()
    change: Change = ""
    number: str = ""
    changes: tuple[tuple[Change, int], ...] = ()

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """Of a folded group: how many boxes of each kind it stands for."""
        totals: dict[str, int] = {}
        for kind, _, count in self.parts:
            totals[kind] = totals.get(kind, 0) + count
        return tuple(totals.items())


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes, and links between them by index.

    Args:
        boxes: The boxes, in the order of the table.
        links: Arrows between them.
        notices: Sentences above the picture.
        compares: Whether it shows two states of one thing: what did not change is folded away.
    """

    boxes: tuple[Box, ...]
    links: tuple[Link, ...] = ()
    notices: tuple[Notice, ...] = ()
    compares: bool = False

    def counts(self) -> dict[str, int]:
        """How many boxes there are of each kind, most frequent first."""
        return count_kinds(self.boxes)

    @property
    def edges(self) -> tuple[Link, ...]:
        """The links that are an order; not the races."""
        return tuple(link for link in self.links if link.kind != RACE)

    def number(self, index: int) -> str:
        """What box ``index`` is called in tables, by where it is now."""
        return self.boxes[index].number.rpartition("->")[2] or str(index)

    def changes(self) -> dict[Change, int]:
        """How many boxes were added, removed and changed; those that are none are left out."""
        return count_changes(self.boxes)

    def to_svg(self, *, full: bool = False) -> str:
        """A picture that stands on its own, light and dark; folded past 200 boxes unless full."""
        from graphcore.drawing.svg import picture

        return picture(self, full=full)

    def to_html(self) -> str:
        """A fragment for a notebook: picture, search and tables."""
        from graphcore.drawing.html import fragment

        return fragment(self)

    def to_html_page(
        self, title: str, sections: Sequence[Section] = (), *, full: bool = False
    ) -> str:
        """One self-contained page.

        Args:
            title: The heading.
            sections: Cards above the picture: (heading, {name: value}) or (heading, text).
            full: Draw every box, however many there are.

        Raises:
            ConfigurationError: A title or section of another form.
        """
        from graphcore.drawing.html import page

        return page(self, title, sections, full=full)

    def to_dot(self) -> str:
        """Graphviz source, every box, groups as clusters."""
        from graphcore.drawing.dot import dot

        return dot(self)

    def to_mermaid(self) -> str:
        """Mermaid flowchart source; folded past 200 boxes."""
        from graphcore.drawing.mermaid import mermaid

        return mermaid(self)

    def to_text(self, *, width: int = 100, full: bool = False) -> str:
        """A table for a terminal of ``width`` columns; folded past 200 boxes unless ``full``.

        Raises:
            ConfigurationError: A width below 1.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ConfigurationError(f"width: expected 1 column or more, got {width!r}")
        from graphcore.drawing.text import table

        return table(self, width=width, full=full)

    def _repr_html_(self) -> str:
        return self.to_html()


def count_kinds(boxes: Sequence[Box]) -> dict[str, int]:
    """Boxes per kind, most frequent first, then by name."""
    counts = Counter(box.kind for box in boxes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def count_changes(boxes: Iterable[Box]) -> dict[Change, int]:
    """Boxes per change, in the order of the signs; a folded box counts what it stands for."""
    counts: Counter[Change] = Counter()
    for box in boxes:
        for change, count in box.changes or ((box.change, 1),):
            counts[change] += count
    return {change: counts[change] for change in SIGNS if counts[change]}


def kind_counts(counts: Mapping[str, int]) -> str:
    """Counts as people read them: ``12 kernels · 1 memcpy``."""
    return " · ".join(
        f"{count} {'kernels' if kind == 'kernel' and count != 1 else kind}"
        for kind, count in counts.items()
    )


def edge_count(count: int) -> str:
    """``1 edge``, ``2 edges``."""
    return f"{count} edge{'' if count == 1 else 's'}"


def node_count(count: int) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} node{'' if count == 1 else 's'}"


def second_line(box: Box) -> str:
    """What stands under a box's label: the kind where the label does not say it, and how much."""
    if box.kind in ("kernel", "group", box.label):
        return box.detail
    return f"{box.kind} · {box.detail}" if box.detail else box.kind


def truncate(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters, an ellipsis where it was cut."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"
