"""A drawing as Graphviz source: every box a node, groups and inner drawings as clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphcore.drawing import theme
from graphcore.drawing.model import RACE, SIGNS, Box, Drawing, Link
from graphcore.drawing.text import printable


def dot(drawing: Drawing) -> str:
    """Source for ``dot``; compound links reach a cluster through its first node."""
    lines = [
        "digraph graph_ {",
        '  graph [rankdir=TB, fontname="Helvetica", compound=true];',
        '  node [shape=box, style="rounded", fontname="Helvetica", fontsize=10];',
        "  edge [arrowsize=0.7];",
        *_title(drawing),
        *_body(drawing, "n", "  "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _body(drawing: Drawing, prefix: str, indent: str) -> Iterator[str]:
    yield from _level(drawing, range(len(drawing.boxes)), (), prefix, indent)
    for link in drawing.links:
        yield f"{indent}{prefix}{link.source} -> {prefix}{link.target}{_link_style(link)};"


def _title(drawing: Drawing) -> Iterator[str]:
    """The notices as the graph's label, above it."""
    if drawing.notices:
        text = "\\n".join(_escape(notice.text) for notice in drawing.notices)
        yield f'  graph [label="{text}", labelloc=t];'


def _link_style(link: Link) -> str:
    if link.change in theme.CHANGES:
        color, sign = theme.CHANGES[link.change][0], SIGNS[link.change]
        style = "dashed" if link.kind or link.change == "removed" else "solid"
        return f' [style="{style}", color="{color}", fontcolor="{color}", label="{sign}"]'
    if link.kind == RACE:
        color = theme.CHANGES["removed"][0]
        return f' [style="bold", dir=none, color="{color}", fontcolor="{color}", label="race"]'
    return ' [style="dashed"]' if link.kind else ""


def _level(
    drawing: Drawing, members: Sequence[int], path: tuple[str, ...], prefix: str, indent: str
) -> Iterator[str]:
    """The boxes whose group is ``path``, and a cluster for each group below it."""
    below: dict[str, list[int]] = {}
    for index in members:
        parts = tuple(drawing.boxes[index].group.split("/")) if drawing.boxes[index].group else ()
        if len(parts) > len(path):
            below.setdefault(parts[len(path)], []).append(index)
        else:
            yield from _box(drawing.boxes[index], f"{prefix}{index}", indent)
    for name, inside in below.items():
        yield f"{indent}subgraph {_quote(f'cluster_{prefix}_' + '/'.join((*path, name)))} {{"
        yield f"{indent}  label={_quote(name)}; color={_quote(theme.LIGHT.line)};"
        yield from _level(drawing, inside, (*path, name), prefix, indent + "  ")
        yield f"{indent}}}"


def _box(box: Box, name: str, indent: str) -> Iterator[str]:
    detail = f"{box.kind}, {box.detail}" if box.detail else box.kind
    sign = f"{SIGNS[box.change]} " if box.change else ""
    lines = [sign + box.label, detail, *(box.notes if box.change else ())]
    # \n is Graphviz's own line break: it goes between texts that are quoted already
    label = '"' + "\\n".join(map(_escape, lines)) + '"'
    color = theme.KINDS.get(box.kind, theme.OTHER)[0]
    tooltip = _quote(box.title or box.label)
    style = ""
    if box.change:
        color, ground = theme.CHANGES[box.change][0], theme.GROUNDS[box.change][0]
        dashed = ",dashed" if box.change == "removed" else ""
        style = f', style="rounded,filled{dashed}", fillcolor="{ground}"'
    yield f'{indent}{name} [label={label}, tooltip={tooltip}, color="{color}"{style}];'
    for number, (heading, inner) in enumerate(box.inner):
        yield f'{indent}subgraph "cluster_{name}_{number}" {{'
        yield f"{indent}  label={_quote(f'{heading} of {box.label}')}; style=dashed;"
        yield from _body(inner, f"{name}_{number}_", indent + "  ")
        yield f"{indent}}}"
        if inner.boxes:
            yield f"{indent}{name} -> {name}_{number}_0 [style=dotted, arrowhead=none];"


def _quote(text: str) -> str:
    return f'"{_escape(text)}"'


def _escape(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
