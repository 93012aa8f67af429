"""A drawing as a table for a terminal: plain text, fixed columns, nothing wider than asked."""

from __future__ import annotations

from collections.abc import Sequence

from graphcore.drawing.folding import Folding, fold, unfolded
from graphcore.drawing.model import Box, Drawing, kind_counts, node_count, truncate

_GAP = "  "
# the least a name is cut to, however narrow the terminal
_SHORTEST_NAME = 16


def table(drawing: Drawing, *, width: int = 100, full: bool = False) -> str:
    """A summary line and one row per box; folded past 200 boxes unless ``full``."""
    folding = unfolded(drawing) if full else fold(drawing)
    links = len(drawing.links)
    head = f"{node_count(len(drawing.boxes))}, {links} edge{'' if links == 1 else 's'}"
    if drawing.boxes:
        head += f" ({kind_counts(drawing.counts())})"
    if folding.drawing is not drawing:
        lines = _aligned(("nodes", "group", "what"), _folded_rows(folding), width, stretch=1)
    elif drawing.boxes:
        lines = _aligned(("#", "kind", "name", "work", "after", "group"), _rows(drawing), width, 2)
    else:
        lines = []
    return "\n".join([truncate(head, width), *lines])


def _folded_rows(folding: Folding) -> list[tuple[str, ...]]:
    return [
        (_range(members), printable(box.label), printable(box.detail or box.kind))
        for box, members in zip(folding.drawing.boxes, folding.members, strict=True)
    ]


def _range(members: Sequence[int]) -> str:
    """``4-17`` where the indices run on, else ``4-17 (9)`` with how many there are."""
    first, last = members[0], members[-1]
    if first == last:
        return str(first)
    gaps = "" if last - first + 1 == len(members) else f" ({len(members)})"
    return f"{first}-{last}{gaps}"


def _rows(drawing: Drawing) -> list[tuple[str, ...]]:
    needs: list[list[str]] = [[] for _ in drawing.boxes]
    for link in drawing.links:
        needs[link.target].append(str(link.source))
    return [_row(index, box, needs[index]) for index, box in enumerate(drawing.boxes)]


def _row(index: int, box: Box, needs: Sequence[str]) -> tuple[str, ...]:
    texts = (box.kind, box.label, box.detail, " ".join(needs), box.group)
    return (str(index), *map(printable, texts))


def _aligned(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, stretch: int
) -> list[str]:
    """Rows in columns; empty columns are left out, and column ``stretch`` gives way first."""
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    cells = [[heads[at] for at in used], *([row[at] for at in used] for row in rows)]
    sizes = [max(len(row[at]) for row in cells) for at in range(len(used))]
    over = sum(sizes) + len(_GAP) * (len(sizes) - 1) - width
    if over > 0 and stretch in used:
        column = used.index(stretch)
        sizes[column] = max(sizes[column] - over, min(_SHORTEST_NAME, sizes[column]))
    return [
        truncate(
            _GAP.join(
                truncate(cell, size).ljust(size) for cell, size in zip(row, sizes, strict=True)
            ).rstrip(),
            width,
        )
        for row in cells
    ]


def printable(text: str) -> str:
    """``text`` on one line, without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)
