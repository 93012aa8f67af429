"""A document as one self-contained page, or as a fragment for a notebook. It needs no script."""

from __future__ import annotations

from graphcore.drawing import theme
from graphcore.drawing.document import MOST_ROWS, Document, Table, share
from graphcore.drawing.html import head, section, style
from graphcore.drawing.svg_box import clean
from graphcore.drawing.tables import dot


def page(document: Document) -> str:
    """The page of ``document``."""
    return (
        f'{head(document.title)}<body class="gc-page"><main class="gc">{_body(document)}</main>'
        "</body></html>\n"
    )


def fragment(document: Document) -> str:
    """The same without a page around it."""
    return f'{style()}<div class="gc">{_body(document)}</div>'


def _body(document: Document) -> str:
    cards = "".join(section(*card) for card in document.cards)
    return (
        f"<h1>{clean(document.title)}</h1>"
        f'<p class="gc-sub">{clean(document.subtitle)}</p>'
        f'{_bar(document)}<div class="gc-sections">{cards}</div>'
        + "".join(map(_table, document.filled_tables))
    )


def _bar(document: Document) -> str:
    """The bar, and a legend that says the same in words."""
    if not document.whole:
        return ""
    shown = [part for part in document.bar if part.value]
    pieces = "".join(
        f'<i class="gc-dot {theme.kind_class(part.kind)}" style="flex-grow:{part.value:g}" '
        f'title="{clean(part.label)}"></i>'
        for part in shown
    )
    legend = "".join(
        f"<li>{dot(part.kind)}{clean(part.label)} {part.value:g} "
        f"({share(part.value / document.whole)})</li>"
        for part in shown
    )
    return (
        f'<section class="gc-panel gc-doc"><h2>{clean(document.bar_heading)}</h2>'
        f'<div class="gc-stack" aria-hidden="true">{pieces}</div>'
        f'<ul class="gc-legend">{legend}</ul></section>'
    )


def _table(table: Table) -> str:
    numeric = table.numeric
    named = zip(table.columns, numeric, strict=True)
    heads = "".join(
        f'<th{_number if is_number else ""} scope="col">{clean(name)}</th>'
        for name, is_number in named
    )
    rows = "".join(
        f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in table.rows[:MOST_ROWS]
    )
    more = len(table.rows) - MOST_ROWS
    notes = [f"and {more} more"] * (more > 0) + [table.note] * bool(table.note)
    body = (
        f'<div class="gc-scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>" + "".join(f'<p class="gc-foot">{clean(note)}</p>' for note in notes)
    )
    if table.is_folded:
        return (
            '<section class="gc-panel gc-doc gc-list"><details><summary>'
            f"<b>{clean(table.heading)}</b><span>{len(table.rows)}</span></summary>{body}"
            "</details></section>"
        )
    return f'<section class="gc-panel gc-doc"><h2>{clean(table.heading)}</h2>{body}</section>'


_number = ' class="gc-r"'


def _cell(cell: object, is_number: bool) -> str:
    if isinstance(cell, float):
        width = 100 * min(max(cell, 0.0), 1.0)
        bar = f'<i class="gc-share"><b style="width:{width:.1f}%"></b></i>'
        return f"<td{_number}>{bar}<span>{share(cell)}</span></td>"
    return f"<td{_number if is_number else ''}>{clean(str(cell))}</td>"
