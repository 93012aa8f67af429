"""Tables: the rows of a page's boxes, by folded box, with the graphs inside them and full names.

Plain markup that works without a script. A full name that many rows share is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphcore.drawing import theme
from graphcore.drawing.folding import Folding, fold
from graphcore.drawing.model import (
    SIGNS,
    Box,
    Change,
    Drawing,
    Link,
    edge_count,
    kind_counts,
    node_count,
)
from graphcore.drawing.svg import svg
from graphcore.drawing.svg_box import clean

# lines of one row, and rows of the list of changes; the rest is counted
_MOST_LINES = 24
_MOST_CHANGES = 200


def tables(folding: Folding, drawing: Drawing) -> str:
    """The tables of a drawing, folded as its picture is."""
    names = _names(drawing)
    parts = _changes(drawing) + "".join(_tables(folding, drawing, names))
    return f'<section class="gc-panel gc-list">{parts}</section>{_kernels(drawing, names)}'


def summary(drawing: Drawing) -> str:
    """Nodes, edges and kinds on one line, escaped."""
    parts = (
        node_count(len(drawing.boxes)),
        edge_count(len(drawing.edges)),
        kind_counts(drawing.counts()),
    )
    return clean(" · ".join(filter(None, parts)))


def dot(kind: str) -> str:
    """A dot in the colour of a kind."""
    return f'<i class="gc-dot {theme.kind_class(kind)}"></i>'


def mark(change: Change, count: int | None = None) -> str:
    """The sign of a change in its colour, with how many where that is known."""
    if not change:
        return ""
    text = SIGNS[change] if count is None else f"{SIGNS[change]}{count}"
    return f'<b class="gc-sign gc-{change}" title="{change}">{text}</b>'


def _names(drawing: Drawing) -> dict[str, int]:
    """The full names that are longer than their labels, numbered; each is written once."""
    titles = (box.title for box in drawing.boxes if box.title and box.title != box.label)
    return {title: number for number, title in enumerate(dict.fromkeys(titles))}


def _kernels(drawing: Drawing, names: Mapping[str, int]) -> str:
    if not names:
        return ""
    uses: dict[str, int] = {}
    for box in drawing.boxes:
        uses[box.title] = uses.get(box.title, 0) + 1
    rows = "".join(
        f'<tr><td>{uses[name]}</td><td class="gc-n" data-name>{clean(name)}</td></tr>'
        for name in names
    )
    return (
        '<section class="gc-panel gc-names"><details><summary><b>Full names</b>'
        f"<span>{len(names)}</span></summary>"
        '<div class="gc-scroll"><table><thead><tr><th>nodes</th><th>name</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details></section>"
    )


def _changes(drawing: Drawing) -> str:
    """Of a comparison: all that changed in one list, each with a way to its row."""
    nodes = [index for index, box in enumerate(drawing.boxes) if box.change]
    lone = {"", "changed"}  # edges of added and removed nodes go without saying
    edges = [
        link
        for link in drawing.links
        if link.change and {drawing.boxes[end].change for end in link[:2]} <= lone
    ]
    if not nodes and not edges:
        return ""
    rows = "".join(_changed_row(drawing, index) for index in nodes[:_MOST_CHANGES])
    rows += "".join(_changed_edge(drawing, link) for link in edges[:_MOST_CHANGES])
    more = max(len(nodes) - _MOST_CHANGES, 0) + max(len(edges) - _MOST_CHANGES, 0)
    told = f"<p>and {more} more, in the tables below</p>" if more else ""
    counts = [node_count(len(nodes))] if nodes else []
    counts += [edge_count(len(edges))] if edges else []
    return (
        f"<details open><summary><b>What changed</b><span>{', '.join(counts)}</span>"
        '</summary><div class="gc-scroll"><table><thead><tr><th scope="col">#</th>'
        '<th scope="col">kind</th><th scope="col">name</th><th scope="col">what changed</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>{told}</details>"
    )


def _changed_row(drawing: Drawing, index: int) -> str:
    box = drawing.boxes[index]
    return (
        f'<tr><td>{mark(box.change)}<a href="#" data-to="{index}">'
        f"{clean(box.number or str(index))}</a></td>"
        f'<td>{dot(box.kind)}{clean(box.kind)}</td><td class="gc-n">{clean(box.label)}</td>'
        f'<td class="gc-a">{_lines(box.notes, ()) or clean(box.change)}</td></tr>'
    )


def _changed_edge(drawing: Drawing, link: Link) -> str:
    source, target = (
        f'<a href="#" data-to="{end}">{clean(drawing.number(end))}</a> '
        f"{clean(drawing.boxes[end].label)}"
        for end in link[:2]
    )
    return (
        f'<tr><td>{mark(link.change)}</td><td>edge</td><td class="gc-n">{source} → {target}</td>'
        f'<td class="gc-a">{link.change}</td></tr>'
    )


def _tables(folding: Folding, drawing: Drawing, names: Mapping[str, int]) -> Iterator[str]:
    """One table per folded box; one in all where nothing was folded."""
    box_of = {node: box for box, members in enumerate(folding.members) for node in members}
    rows = _Rows(drawing, names, box_of)
    if len(folding.members) == len(drawing.boxes):
        yield (
            f"<details open><summary><b>Nodes</b><span>{len(drawing.boxes)}</span></summary>"
            f"{rows.table(range(len(drawing.boxes)))}</details>"
        )
        return
    for number, members in enumerate(folding.members):
        box = folding.drawing.boxes[number]
        detail = box.detail if box.counts else box.kind
        marks = mark(box.change) + "".join(mark(change, count) for change, count in box.changes)
        yield (
            f'<details data-box="{number}"><summary><b>{clean(box.label)}</b>{marks}'
            f"<span>{clean(detail)}</span><span>{node_count(len(members))}</span></summary>"
            f"{rows.table(members, box.group)}</details>"
        )


class _Rows:
    """Rows of one drawing's boxes.

    Args:
        drawing: The boxes.
        names: Full name -> its number.
        box_of: Box of the picture by index.
        data: Name of the attribute that holds a row's index.
    """

    def __init__(
        self,
        drawing: Drawing,
        names: Mapping[str, int],
        box_of: Mapping[int, int],
        data: str = "row",
    ) -> None:
        self._drawing, self._names, self._box_of, self._data = drawing, names, box_of, data
        self._needs: list[list[tuple[int, Change]]] = [[] for _ in drawing.boxes]
        for link in drawing.edges:
            self._needs[link.target].append((link.source, link.change))

    def table(self, members: Sequence[int], group: str = "") -> str:
        """The table of some boxes, shown under the heading of ``group``."""
        boxes = [self._drawing.boxes[index] for index in members]
        with_part = any(_part(box, group) for box in boxes)
        with_lines = any(box.lines or box.notes for box in boxes)
        heads = ["#", "kind", *(["part"] if with_part else []), "name", "work"]
        if with_lines:
            heads.append("what changed" if self._drawing.compares else "arguments")
        head = "".join(f'<th scope="col">{name}</th>' for name in [*heads, "after"])
        rows = "".join(
            self._row(index, box, group, with_part, with_lines)
            for index, box in zip(members, boxes, strict=True)
        )
        return (
            f'<div class="gc-scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _row(self, index: int, box: Box, group: str, with_part: bool, with_lines: bool) -> str:
        number = self._names.get(box.title)
        reference = "" if number is None else f' data-n="{number}"'
        cells = [f"<td>{mark(box.change)}{clean(box.number or str(index))}</td>"]
        cells.append(f"<td>{dot(box.kind)}{clean(box.kind)}</td>")
        if with_part:
            cells.append(f'<td class="gc-w">{clean(_part(box, group))}</td>')
        cells.append(f'<td class="gc-n"{reference}>{clean(box.label)}</td>')
        cells.append(f'<td class="gc-k">{clean(box.detail)}</td>')
        if with_lines:
            cells.append(f'<td class="gc-a">{_lines(box.notes, box.lines)}</td>')
        cells.append(f'<td class="gc-w">{self._after(index)}</td>')
        data = f' data-{self._data}="{index}" data-box="{self._box_of[index]}"'
        if group:
            data += f' data-group="{clean(box.group)}"'
        row = f"<tr{data}>{''.join(cells)}</tr>"
        if box.inner:
            span = 5 + with_part + with_lines
            row += f'<tr class="gc-inside"><td></td><td colspan="{span}">{_inside(box)}</td></tr>'
        return row

    def _after(self, index: int) -> str:
        return ", ".join(
            f'{mark(change)}<a href="#" data-to="{need}">{clean(self._drawing.number(need))}</a>'
            for need, change in self._needs[index]
        )


def _part(box: Box, group: str) -> str:
    """The part of a box's path that the heading does not say."""
    return box.group.removeprefix(group).strip("/")


def _lines(notes: Sequence[str], lines: Sequence[str]) -> str:
    strong = "".join(f"<b>{clean(line)}</b>" for line in notes)
    shown = "".join(f"<span>{clean(line)}</span>" for line in lines[:_MOST_LINES])
    more = len(lines) - _MOST_LINES
    return strong + shown + (f"<span>and {more} more</span>" if more > 0 else "")


def _inside(box: Box) -> str:
    """The graphs inside a box: each a picture and a table of its own."""
    parts = []
    for heading, drawing in box.inner:
        members = range(len(drawing.boxes))
        rows = _Rows(drawing, {}, dict(enumerate(members)), "inner").table(members)
        parts.append(
            f"<details><summary><b>{clean(heading)}</b><span>{summary(drawing)}</span></summary>"
            f'<div class="gc-scroll">{svg(fold(drawing))}</div>{rows}</details>'
        )
    return "".join(parts)
