"""A document as lines of text: headings, aligned pairs, aligned tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphcore.drawing.document import MOST_ROWS, Document, Table, share

_WIDEST = 76


def text(document: Document) -> str:
    """The lines of ``document``, without trailing spaces."""
    return "\n".join(line.rstrip() for line in _lines(document))


def _lines(document: Document) -> Iterator[str]:
    yield _plain(document.title)
    if document.subtitle:
        yield _plain(document.subtitle)
    for heading, content in document.cards:
        yield ""
        yield _plain(heading)
        if isinstance(content, Mapping):
            yield from _pairs({_plain(str(k)): _plain(str(v)) for k, v in content.items()})
        else:
            yield from (f"  {_plain(line)}" for line in content.splitlines())
    for table in document.filled_tables:
        yield ""
        yield _plain(table.heading)
        yield from _table(table)
        if table.note:
            yield f"  {_plain(table.note)}"


def _pairs(pairs: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, pairs), default=0)
    return (f"  {name:<{width}}  {value}" for name, value in pairs.items())


def _table(table: Table) -> Iterator[str]:
    rows = [[_cell(cell) for cell in row] for row in table.rows[:MOST_ROWS]]
    numeric = table.numeric
    lines = [[_plain(name) for name in table.columns], *rows]
    # the last column is not padded, so that a long text in it costs no width
    widths = [min(max(len(line[at]) for line in lines), _WIDEST) for at in range(len(numeric))]
    for line in lines:
        yield "  " + "  ".join(_padded(line, widths, numeric))
    if len(table.rows) > MOST_ROWS:
        yield f"  ... and {len(table.rows) - MOST_ROWS} more"


def _padded(line: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> Iterator[str]:
    for cell, width, is_number in zip(line, widths, numeric, strict=True):
        yield cell.rjust(width) if is_number else cell.ljust(width)


def _cell(cell: object) -> str:
    return share(cell) if isinstance(cell, float) else _plain(str(cell))


def _plain(words: str) -> str:
    """On one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in words)
