"""Document: cards, one bar and tables as neutral data, for reports that show no graph.

The modules beside this one turn it into HTML and text; the same document always gives the same
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphcore.drawing.model import Section
from graphcore.errors import ConfigurationError

MOST_ROWS = 200
"""Rows of a table that are shown; the rest is counted."""

_NUMBER = re.compile(r"[\d.e+-]+(?: (?:bytes?|[KMGTP]iB))?")


class Part(NamedTuple):
    """A part of the bar: how much of it, and the kind whose colour it has."""

    label: str
    value: float
    kind: str


class Table(NamedTuple):
    """A table.

    Args:
        heading: Above it.
        columns: Their names.
        rows: Their cells, as they are to be read; a float is a share from 0 to 1, drawn as one.
        note: A sentence under it.
        is_folded: Whether its page shows it only when it is asked for.
    """

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    note: str = ""
    is_folded: bool = False

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Of each column, whether its cells are numbers or sizes; "-" may stand among them."""
        return tuple(
            all(_NUMBER.fullmatch(str(cell)) for cell in column)
            for column in zip(*self.rows, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Args:
        title: Of its page.
        subtitle: One line under it.
        cards: (heading, {name: value}) or (heading, text).
        bar: Parts of a whole; no bar where they come to nothing.
        bar_heading: What the whole is.
        tables: In order; one without rows is left out.

    Raises:
        ConfigurationError: A row that has not a cell for each column, or a part below zero.
    """

    title: str
    subtitle: str = ""
    cards: Sequence[Section] = ()
    bar: Sequence[Part] = ()
    bar_heading: str = ""
    tables: Sequence[Table] = ()

    def __post_init__(self) -> None:
        for part in self.bar:
            if part.value < 0:
                raise ConfigurationError(f"bar: expected parts of 0 or more, got {part}")
        for table in self.tables:
            for row in table.rows:
                if len(row) != len(table.columns):
                    raise ConfigurationError(
                        f"table {table.heading!r}: expected {len(table.columns)} cells in a row, "
                        f"got {row!r}"
                    )

    @property
    def whole(self) -> float:
        """What the parts of the bar come to."""
        return sum(part.value for part in self.bar)

    @property
    def filled_tables(self) -> tuple[Table, ...]:
        """The tables that have rows."""
        return tuple(table for table in self.tables if table.rows)

    def to_text(self) -> str:
        """As lines for a terminal."""
        from graphcore.drawing.document_text import text

        return text(self)

    def to_html(self) -> str:
        """As a fragment with its own style, for a notebook's output cell."""
        from graphcore.drawing.document_html import fragment

        return fragment(self)

    def to_html_page(self) -> str:
        """As one self-contained page, light or dark as the reader's system is."""
        from graphcore.drawing.document_html import page

        return page(self)


def share(value: float) -> str:
    """A share in words."""
    if 0.999 <= value < 1:
        return "99.9 %"  # all is only said of all
    return f"{100 * value:.1f} %"
