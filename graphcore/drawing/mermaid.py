"""A drawing as a Mermaid flowchart, small enough for what renders it: folded past 200 boxes."""

from __future__ import annotations

from collections.abc import Iterator

from graphcore.drawing import theme
from graphcore.drawing.folding import fold
from graphcore.drawing.model import RACE, SIGNS, Box, Drawing, second_line
from graphcore.drawing.text import printable


def mermaid(drawing: Drawing) -> str:
    """Flowchart source; consecutive boxes of one group share a subgraph."""
    shown = fold(drawing).drawing
    lines = [f"%% {_text(notice.text)}" for notice in shown.notices]
    lines += ["flowchart TD", *_boxes(shown)]
    for link in shown.links:
        if link.kind == RACE:
            lines.append(f"  n{link.source} -. race .- n{link.target}")
            continue
        arrow = "-.->" if link.kind or link.change == "removed" else "-->"
        sign = f'|"{_text(SIGNS[link.change])}"|' if link.change else ""
        lines.append(f"  n{link.source} {arrow}{sign} n{link.target}")
    return "\n".join([*lines, *_styles(shown)]) + "\n"


def _styles(drawing: Drawing) -> Iterator[str]:
    """A class per change that occurs, and the boxes and links it colours."""
    for change, (color, _) in theme.CHANGES.items():
        ground = theme.GROUNDS[change][0]
        boxes = [f"n{at}" for at, box in enumerate(drawing.boxes) if box.change == change]
        links = [str(at) for at, link in enumerate(drawing.links) if link.change == change]
        if boxes:
            yield f"  classDef {change} fill:{ground},stroke:{color},color:{theme.LIGHT.ink}"
            yield f"  class {','.join(boxes)} {change}"
        if links:
            yield f"  linkStyle {','.join(links)} stroke:{color},stroke-width:2px"


def _boxes(drawing: Drawing) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    for index, box in enumerate(drawing.boxes):
        groups.setdefault("" if box.counts else box.group, []).append(index)
    for number, (group, members) in enumerate(groups.items()):
        indent = "    " if group else "  "
        if group:
            yield f'  subgraph g{number}["{_text(group)}"]'
        for index in members:
            yield f"{indent}n{index}{_shape(drawing.boxes[index])}"
        if group:
            yield "  end"


def _shape(box: Box) -> str:
    detail = second_line(box)
    signs = [f"{SIGNS[change]}{count}" for change, count in box.changes]
    signs += [SIGNS[box.change]] if box.change else []
    label = _text(" ".join([*signs, box.label])) + (f"<br/>{_text(detail)}" if detail else "")
    opening, closing = ("[[", "]]") if box.counts or box.inner else ("[", "]")
    return f'{opening}"{label}"{closing}'


def _text(text: str) -> str:
    """Text as Mermaid takes it in quotes: all but plain characters as entity codes."""
    return "".join(
        character if character.isalnum() or character in " .,:-_/+·" else f"#{ord(character)};"
        for character in printable(text)
    )
