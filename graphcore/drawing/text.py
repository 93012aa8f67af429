"""A drawing as a table for a terminal: plain text, fixed columns, nothing wider than asked."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from textwrap import wrap

from graphcore.drawing.folding import Folding, fold, unfolded
from graphcore.drawing.model import (
    FOLD_LIMIT,
    SIGNS,
    Box,
    Drawing,
    edge_count,
    kind_counts,
    node_count,
)

_GAP = "  "
_PLAIN = {ord("·"): ",", ord("…"): "~", ord("→"): ">"}
# before what is known about a changed box, on the lines below it
_BELOW = "       "
# the least a name is cut to, however narrow the terminal
_SHORTEST_NAME = 16


def table(drawing: Drawing, *, width: int = 100, full: bool = False) -> str:
    """A summary line and one row per box; folded past 200 boxes unless ``full``."""
    folding = unfolded(drawing) if full else fold(drawing)
    head = f"{node_count(len(drawing.boxes))}, {edge_count(len(drawing.edges))}"
    if drawing.boxes:
        head += f" ({kind_counts(drawing.counts())})"
    changes = ", ".join(f"{SIGNS[name]}{count} {name}" for name, count in drawing.changes().items())
    heads = [printable(notice.text) for notice in drawing.notices]
    heads += [head, changes] if changes else [head]
    if folding.drawing is not drawing:
        columns: tuple[str, ...] = ("", "nodes", "group", "what")
        lines = _aligned(columns, _folded_rows(folding), width, stretch=2)
    elif drawing.boxes:
        columns = ("", "#", "kind", "name", "work", "after", "group")
        inside = not drawing.compares and (full or _size(drawing) <= FOLD_LIMIT)
        lines = _aligned(columns, _rows(drawing, inside), width, stretch=3)
    else:
        lines = []
    if drawing.compares:
        lines = lines[:1] + [
            part
            for box, line in zip(folding.drawing.boxes, lines[1:], strict=True)
            for part in (line, *(f"{_BELOW}{printable(note)}" for note in box.notes))
        ]
    whole = [cut(part, width) for line in heads for part in wrap(line, width)]
    return "\n".join([*whole, *(cut(line, width) for line in lines)])


def _folded_rows(folding: Folding) -> list[tuple[str, ...]]:
    return [
        (
            _signs(box),
            _range(members) if box.counts or not box.number else box.number,
            printable(box.label),
            printable(box.detail or box.kind),
        )
        for box, members in zip(folding.drawing.boxes, folding.members, strict=True)
    ]


def _signs(box: Box) -> str:
    if box.changes:
        return " ".join(f"{SIGNS[change]}{count}" for change, count in box.changes)
    return SIGNS[box.change] if box.change else ""


def _range(members: Sequence[int]) -> str:
    """``4-17`` where the indices run on, else ``4-17 (9)`` with how many there are."""
    first, last = members[0], members[-1]
    if first == last:
        return str(first)
    gaps = "" if last - first + 1 == len(members) else f" ({len(members)})"
    return f"{first}-{last}{gaps}"


def _size(drawing: Drawing) -> int:
    """How many boxes there are, those inside others included."""
    return sum(1 + sum(_size(inner) for _, inner in box.inner) for box in drawing.boxes)


def _rows(drawing: Drawing, inside: bool, path: str = "") -> list[tuple[str, ...]]:
    """A row for each box; what lies inside it comes right below, as ``3/0``, ``3/1``."""
    needs: list[list[str]] = [[] for _ in drawing.boxes]
    for link in drawing.edges:
        sign = SIGNS[link.change] if link.change else ""
        needs[link.target].append(f"{sign}{path}{printable(drawing.number(link.source))}")
    rows = []
    for index, box in enumerate(drawing.boxes):
        number = f"{path}{box.number or index}"
        texts = (number, box.kind, box.label, box.detail, " ".join(needs[index]), box.group)
        rows.append((_signs(box), *map(printable, texts)))
        for heading, inner in box.inner if inside else ():
            if len(box.inner) > 1:
                rows.append(("", number, "", printable(heading), "", "", ""))
            rows += _rows(inner, inside, f"{number}/")
    return rows


def _aligned(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, stretch: int
) -> list[str]:
    """Rows in columns; empty columns are left out, and column ``stretch`` gives way first."""
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    cells = [[heads[at] for at in used], *([row[at] for at in used] for row in rows)]
    sizes = [max(columns_of(row[at]) for row in cells) for at in range(len(used))]
    over = sum(sizes) + len(_GAP) * (len(sizes) - 1) - width
    if over > 0 and stretch in used:
        column = used.index(stretch)
        sizes[column] = max(sizes[column] - over, min(_SHORTEST_NAME, sizes[column]))
    return [
        cut(_GAP.join(_fitted(*cell) for cell in zip(row, sizes, strict=True)).rstrip(), width)
        for row in cells
    ]


def _fitted(text: str, size: int) -> str:
    shown = cut(text, size)
    return shown + " " * (size - columns_of(shown))


def columns_of(text: str) -> int:
    """How many columns of a terminal ``text`` takes: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """``text`` in at most so many columns of a terminal, an ellipsis where it was cut."""
    if columns_of(text) <= columns:
        return text
    taken, end = 0, 0
    for character in text:
        taken += _columns(character)
        if taken > columns - 1:
            break
        end += 1
    return text[:end] + "…"


def printable(text: str) -> str:
    """``text`` on one line, without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def in_encoding(text: str, encoding: str) -> str:
    """``text`` as a terminal of this encoding can show it: plain signs where it has no others."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        plain = text.translate(_PLAIN)
        return plain.encode("ascii", errors="replace").decode("ascii")
    return text
