"""HTML: a drawing as one self-contained page, or as a fragment for a notebook.

Picture and tables are plain markup and work without a script; the script adds opening by a click in
the picture, jumps and search. Nothing is loaded from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from graphcore.drawing import theme
from graphcore.drawing.folding import Folding, fold
from graphcore.drawing.model import Box, Drawing, Section, kind_counts, node_count
from graphcore.drawing.svg import clean, svg
from graphcore.errors import ConfigurationError

# lines of one row; the rest is counted
_MOST_LINES = 24
# notebook and documentation themes that say themselves whether they are dark
_SAYS_DARK = (
    '[data-jp-theme-light="false"] .gc,.vscode-dark .gc,[data-theme="dark"] .gc,'
    '[data-bs-theme="dark"] .gc'
)
_SAYS_LIGHT = (
    '[data-jp-theme-light="true"] .gc,.vscode-light .gc,[data-theme="light"] .gc,'
    '[data-bs-theme="light"] .gc'
)


def page(drawing: Drawing, title: str, sections: Sequence[Section] = ()) -> str:
    """One self-contained page; ``sections`` become cards above the picture.

    Raises:
        ConfigurationError: A title or section of another form.
    """
    if not isinstance(title, str):
        raise ConfigurationError(f"title: expected text, got {title!r}")
    cards = "".join(_section(*section) for section in _checked(sections))
    folding = fold(drawing)
    heading = f"<h1>{clean(title)}</h1>" + f'<p class="gc-sub">{_summary(drawing)}</p>'
    if cards:
        heading += f'<div class="gc-sections">{cards}</div>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{clean(title)}</title>{_style()}</head>"
        f'<body class="gc-page"><main class="gc" data-gc>{heading}{_body(folding, drawing)}</main>'
        f"{_script()}</body></html>\n"
    )


def fragment(drawing: Drawing) -> str:
    """The same without page and sections, with its own style, for a notebook's output cell."""
    body = _body(fold(drawing), drawing)
    return f'{_style()}<div class="gc" data-gc>{body}</div>{_script()}'


@cache
def _asset(name: str) -> str:
    return (files("graphcore.drawing") / "assets" / name).read_text(encoding="utf-8")


def _style() -> str:
    dark, light = theme.variables(dark=True), theme.variables(dark=False)
    return (
        f"<style>.gc,.gc-page{{{light}}}"
        f"@media (prefers-color-scheme:dark){{.gc,.gc-page{{{dark}}}}}"
        f"{_SAYS_DARK}{{{dark}}}{_SAYS_LIGHT}{{{light}}}"
        f"{theme.SHAPES}{theme.fills_by_variables()}{_asset('page.css')}</style>"
    )


def _script() -> str:
    return f"<script>{_asset('page.js')}</script>"


def _summary(drawing: Drawing) -> str:
    links = len(drawing.links)
    edges = f"{links} edge{'' if links == 1 else 's'}"
    parts = (node_count(len(drawing.boxes)), edges, kind_counts(drawing.counts()))
    return clean(" · ".join(filter(None, parts)))


def _checked(sections: Any) -> Sequence[Section]:
    form = "(heading, {name: value}) or (heading, text)"
    if isinstance(sections, (str, bytes, Mapping)) or not isinstance(sections, Sequence):
        raise ConfigurationError(
            f"sections: expected a list of {form}, got {type(sections).__name__}"
        )
    for index, section in enumerate(sections):
        good = isinstance(section, (tuple, list)) and len(section) == 2
        if not (good and isinstance(section[0], str) and isinstance(section[1], (Mapping, str))):
            raise ConfigurationError(f"sections[{index}]: expected {form}, got {section!r}")
    return sections


def _section(heading: str, content: Mapping[str, object] | str) -> str:
    if isinstance(content, str):
        body = f"<pre>{clean(content)}</pre>"
    else:
        pairs = (
            f"<dt>{clean(str(name))}</dt><dd>{clean(str(value))}</dd>"
            for name, value in content.items()
        )
        body = f"<dl>{''.join(pairs)}</dl>"
    return f'<section class="gc-panel"><h2>{clean(heading)}</h2>{body}</section>'


def _body(folding: Folding, drawing: Drawing) -> str:
    names = _names(drawing)
    return (
        f'<section class="gc-panel gc-picture-panel">{_tools(drawing)}'
        f'<div class="gc-view">{svg(folding, interactive=True)}</div></section>'
        f'<section class="gc-panel gc-list">{"".join(_tables(folding, drawing, names))}</section>'
        f"{_kernels(drawing, names)}"
    )


def _tools(drawing: Drawing) -> str:
    legend = "".join(
        f"<li>{_dot(kind)}{clean(kind_counts({kind: count}))}</li>"
        for kind, count in drawing.counts().items()
    )
    return (
        f'<div class="gc-tools"><ul class="gc-legend">{legend}</ul><label class="gc-search">'
        '<output></output><input type="search" placeholder="Search nodes" '
        'aria-label="Search nodes" autocomplete="off" spellcheck="false"><kbd>/</kbd>'
        "</label></div>"
    )


def _dot(kind: str) -> str:
    name = theme.kind_class(kind).removeprefix("k-")
    return f'<i class="gc-dot" style="--gc-dot:var(--gc-{name})"></i>'


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
        '<section class="gc-panel" style="margin-top:14px"><details><summary><b>Full names</b>'
        f"<span>{len(names)}</span></summary>"
        '<div class="gc-scroll"><table><thead><tr><th>nodes</th><th>name</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details></section>"
    )


def _tables(folding: Folding, drawing: Drawing, names: Mapping[str, int]) -> Iterator[str]:
    """One table per folded box; one in all where nothing was folded."""
    box_of = {node: box for box, members in enumerate(folding.members) for node in members}
    needs = _needs(drawing)
    if len(folding.members) == len(drawing.boxes):
        rows = _Rows(drawing, names, needs, box_of, "").table(range(len(drawing.boxes)))
        yield (
            f"<details open><summary><b>Nodes</b><span>{len(drawing.boxes)}</span></summary>"
            f"{rows}</details>"
        )
        return
    for number, members in enumerate(folding.members):
        box = folding.drawing.boxes[number]
        rows = _Rows(drawing, names, needs, box_of, box.group).table(members)
        detail = box.detail if box.counts else box.kind
        yield (
            f'<details data-box="{number}"><summary><b>{clean(box.label)}</b>'
            f"<span>{clean(detail)}</span><span>{node_count(len(members))}</span></summary>"
            f"{rows}</details>"
        )


def _needs(drawing: Drawing) -> list[list[int]]:
    needs: list[list[int]] = [[] for _ in drawing.boxes]
    for link in drawing.links:
        needs[link.target].append(link.source)
    return needs


class _Rows:
    """Rows of one drawing's boxes, shown under the group ``shown_group``."""

    def __init__(
        self,
        drawing: Drawing,
        names: Mapping[str, int],
        needs: Sequence[Sequence[int]],
        box_of: Mapping[int, int],
        shown_group: str,
    ) -> None:
        self.drawing, self.names, self.needs, self.box_of = drawing, names, needs, box_of
        self.shown_group = shown_group

    def table(self, members: Sequence[int]) -> str:
        boxes = [self.drawing.boxes[index] for index in members]
        with_part = any(self._part(box) for box in boxes)
        with_lines = any(box.lines or box.notes for box in boxes)
        heads = ["#", "kind", *(["part"] if with_part else []), "name", "work"]
        heads += [*(["arguments"] if with_lines else []), "after"]
        head = "".join(f"<th>{name}</th>" for name in heads)
        rows = "".join(
            self._row(index, box, with_part, with_lines)
            for index, box in zip(members, boxes, strict=True)
        )
        return (
            f'<div class="gc-scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _part(self, box: Box) -> str:
        return box.group.removeprefix(self.shown_group).strip("/")

    def _row(self, index: int, box: Box, with_part: bool, with_lines: bool) -> str:
        number = self.names.get(box.title)
        reference = "" if number is None else f' data-n="{number}"'
        cells = [f"<td>{index}</td><td>{_dot(box.kind)}{clean(box.kind)}</td>"]
        if with_part:
            cells.append(f'<td class="gc-w">{clean(self._part(box))}</td>')
        cells.append(f'<td class="gc-n"{reference}>{clean(box.label)}</td>')
        cells.append(f'<td class="gc-k">{clean(box.detail)}</td>')
        if with_lines:
            cells.append(f'<td class="gc-a">{_lines(box)}</td>')
        after = ", ".join(f'<a href="#" data-to="{need}">{need}</a>' for need in self.needs[index])
        cells.append(f'<td class="gc-w">{after}</td>')
        group = f' data-group="{clean(box.group)}"' if self.shown_group else ""
        row = f'<tr data-row="{index}" data-box="{self.box_of[index]}"{group}>{"".join(cells)}</tr>'
        if box.inner:
            span = 5 + with_part + with_lines
            row += f'<tr class="gc-inside"><td></td><td colspan="{span}">{_inside(box)}</td></tr>'
        return row


def _lines(box: Box) -> str:
    notes = "".join(f"<b>{clean(line)}</b>" for line in box.notes)
    shown = "".join(f"<span>{clean(line)}</span>" for line in box.lines[:_MOST_LINES])
    more = len(box.lines) - _MOST_LINES
    return notes + shown + (f"<span>and {more} more</span>" if more > 0 else "")


def _inside(box: Box) -> str:
    """The graphs inside a box: each a picture and a table of its own."""
    parts = []
    for heading, drawing in box.inner:
        members = range(len(drawing.boxes))
        rows = _Rows(drawing, {}, _needs(drawing), dict(enumerate(members)), "")
        plain = rows.table(members).replace("<tr data-row=", "<tr data-inner=")
        parts.append(
            f"<details><summary><b>{clean(heading)}</b><span>{_summary(drawing)}</span></summary>"
            f"{svg(fold(drawing))}{plain}</details>"
        )
    return "".join(parts)
