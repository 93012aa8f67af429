"""HTML: a drawing as one self-contained page, or as a fragment for a notebook.

Picture and tables are plain markup and work without a script; the script adds opening by a click in
the picture, jumps and search. Nothing is loaded from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from graphcore.drawing import theme
from graphcore.drawing.folding import Folding, fold, unfolded
from graphcore.drawing.model import Drawing, Section, kind_counts
from graphcore.drawing.svg import svg
from graphcore.drawing.svg_box import clean
from graphcore.drawing.tables import dot, mark, summary, tables
from graphcore.errors import ConfigurationError

# notebook and documentation themes that say themselves whether they are dark: JupyterLab, VS Code,
# Sphinx themes, Bootstrap, Colab
_DARK_MARKS = (
    '[data-jp-theme-light="false"]',
    ".vscode-dark",
    '[data-theme="dark"]',
    '[data-bs-theme="dark"]',
    'html[theme="dark"]',
)
_LIGHT_MARKS = (
    '[data-jp-theme-light="true"]',
    ".vscode-light",
    '[data-theme="light"]',
    '[data-bs-theme="light"]',
    'html[theme="light"]',
)


def page(
    drawing: Drawing, title: str, sections: Sequence[Section] = (), *, full: bool = False
) -> str:
    """One self-contained page; ``sections`` become cards above the picture.

    Raises:
        ConfigurationError: A title or section of another form.
    """
    if not isinstance(title, str):
        raise ConfigurationError(f"title: expected text, got {title!r}")
    cards = "".join(section(*each) for each in _checked(sections))
    folding = unfolded(drawing) if full else fold(drawing)
    heading = f"<h1>{clean(title)}</h1>" + f'<p class="gc-sub">{summary(drawing)}</p>'
    if cards:
        heading += f'<div class="gc-sections">{cards}</div>'
    return (
        f'{head(title)}<body class="gc-page"><main class="gc" data-gc>{heading}'
        f"{_body(folding, drawing)}</main>{_script()}</body></html>\n"
    )


def fragment(drawing: Drawing) -> str:
    """The same without page and sections, with its own style, for a notebook's output cell."""
    body = _body(fold(drawing), drawing)
    return f'{style()}<div class="gc" data-gc>{body}</div>{_script()}'


def head(title: str) -> str:
    """The begin of a page, up to its body, with the style of ours."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{clean(title)}</title>{style()}</head>"
    )


@cache
def _asset(name: str) -> str:
    return (files("graphcore.drawing") / "assets" / name).read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style sheet of pages and fragments, for light and for dark."""
    dark, light = theme.variables(dark=True), theme.variables(dark=False)
    return (
        f"<style>.gc,.gc-page{{{light}}}"
        f"@media (prefers-color-scheme:dark){{.gc,.gc-page{{{dark}}}}}"
        f"{_under(_DARK_MARKS)}{{{dark}}}{_under(_LIGHT_MARKS)}{{{light}}}"
        f"{theme.SHAPES}{theme.fills_by_variables()}{theme.dots()}{_asset('page.css')}</style>"
    )


def _under(marks: Sequence[str]) -> str:
    return ",".join(f"{mark} .gc" for mark in marks)


def _script() -> str:
    return f"<script>{_asset('page.js')}</script>"


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


def section(heading: str, content: Mapping[str, object] | str) -> str:
    """A card: pairs of name and value, or preformatted text."""
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
    return (
        f"{_notices(drawing)}"
        f'<section class="gc-panel gc-picture-panel">{_tools(drawing)}'
        f'<div class="gc-view">{svg(folding)}</div></section>'
        f"{tables(folding, drawing)}"
    )


def _notices(drawing: Drawing) -> str:
    return "".join(
        f'<p class="gc-notice gc-panel gc-tone-{notice.tone or "none"}">{clean(notice.text)}</p>'
        for notice in drawing.notices
    )


def _tools(drawing: Drawing) -> str:
    changes = "".join(
        f"<li>{mark(change)}{count} {change}</li>" for change, count in drawing.changes().items()
    )
    kinds = "".join(
        f"<li>{dot(kind)}{clean(kind_counts({kind: count}))}</li>"
        for kind, count in drawing.counts().items()
    )
    races = len(drawing.links) - len(drawing.edges)
    if races:
        kinds += f'<li><b class="gc-sign gc-race">!</b>{races} race{"" if races == 1 else "s"}</li>'
    return (
        f'<div class="gc-tools"><ul class="gc-legend">{changes}{kinds}</ul>'
        '<div class="gc-search" role="search">'
        '<output aria-live="polite"></output><input type="search" placeholder="Search nodes" '
        'aria-label="Search nodes" aria-keyshortcuts="/" autocomplete="off" spellcheck="false" '
        'title="/ to search, Enter for the next match, Shift+Enter for the one before, '
        'Escape to end"><kbd aria-hidden="true">/</kbd>'
        '<button type="button" data-step="-1" aria-label="Previous match" disabled>↑</button>'
        '<button type="button" data-step="1" aria-label="Next match" disabled>↓</button>'
        "</div>"
        '<div class="gc-zoom"><button type="button" data-zoom="out" aria-label="Smaller">-</button>'
        '<button type="button" data-zoom="in" aria-label="Larger">+</button>'
        '<button type="button" data-zoom="fit" aria-label="Whole picture, or its own size">fit'
        "</button></div></div>"
    )
