"""SVG of charts: files that stand on their own, on paper of their own, light and dark.

Nothing but rectangles, lines, marks and text, so that a document's readers need no program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH, MARGIN, HEAD = 900, 14, 56
LINE = 17
"""From one line of text, or bar, to the next."""

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#12161d"),
    "ink": ("#1c2433", "#e6e9ef"),
    "faint": ("#5b6577", "#9aa4b5"),
    "rule": ("#d9dee6", "#2b3340"),
    "ours": ("#2a6bd8", "#6ea2ff"),
    "floor": ("#0e8a78", "#4fd1b8"),
    "peer": ("#b9c2d0", "#4a5364"),
    "target": ("#c2410c", "#ffa657"),
    "first": ("#b3307d", "#f08cc8"),
    "second": ("#a35a00", "#f0b45e"),
    "third": ("#6d3fc4", "#bba4f7"),
    "fourth": ("#61701a", "#c3d06a"),
}
"""Light, dark. Ours stands out; the floor is what nobody can pass; the last four tell peers."""
PEERS = ("first", "second", "third", "fourth")


def text(x: float, y: float, words: str, kind: str = "faint", anchor: str = "start") -> str:
    """A line of text whose "start", "middle" or "end" is at (x, y).

    Args:
        x: From the left, in pixels.
        y: Of the base line.
        words: What is written.
        kind: "title", "strong" or "faint".
        anchor: What of it is at x.
    """
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{at}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, kind: str, height: float = LINE - 4) -> str:
    """A bar from x on, its upper edge at y; one that would not be seen is a pixel wide."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(1.0, width):.1f}" height="{height:.0f}" '
        f'rx="2" class="{kind}"/>'
    )


def line(points: Sequence[tuple[float, float]], kind: str, style: str = "line") -> str:
    """A line through points, in the colour of a kind; style "line", "thin" or "dashed"."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="{style} {kind}-line"/>'


def mark(x: float, y: float, kind: str, shape: str) -> str:
    """A mark around (x, y): shape "circle", "square", "diamond", "triangle" or "ring"."""
    if shape in ("circle", "ring"):
        filled = kind if shape == "circle" else f"line ring {kind}-line"
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{filled}"/>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
    }[shape]
    path = " ".join(f"{x + right:.1f},{y + down:.1f}" for right, down in corners)
    return f'<polygon points="{path}" class="{kind}"/>'


def chart(title: str, under: str, body: Iterable[str], height: float) -> str:
    """The file: title and a line under it, then ``body``, which begins at HEAD.

    Args:
        title: In words.
        under: What a reader needs beside it.
        body: Made of the functions above, in a width of WIDTH.
        height: Of all.
    """
    box = f"{-MARGIN} 0 {WIDTH + 2 * MARGIN} {height:.0f}"
    size = f'viewBox="{box}" width="{WIDTH + 2 * MARGIN}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            _style(),
            f'<rect x="{-MARGIN}" y="0" width="{WIDTH + 2 * MARGIN}" height="{height:.0f}" '
            'class="paper"/>',
            text(0, 24, title, "title"),
            text(0, 43, under),
            *body,
            "</svg>\n",
        ]
    )


def _style() -> str:
    def fills(column: int) -> str:
        colour = {kind: both[column] for kind, both in COLOURS.items()}
        texts = f".title,.strong{{fill:{colour['ink']}}}.faint{{fill:{colour['faint']}}}"
        rest = (kind for kind in COLOURS if kind not in ("ink", "faint"))
        return texts + "".join(
            f".{kind}{{fill:{colour[kind]}}}.{kind}-line{{stroke:{colour[kind]}}}" for kind in rest
        ) + f".ring{{fill:{colour['paper']}}}"  # fmt: skip

    fonts = "text{font:12px ui-sans-serif,system-ui,sans-serif}.title{font-size:15px}"
    bold = ".title,.strong{font-weight:600}"
    lines = (
        ".line,.thin,.dashed{fill:none;stroke-width:2}.thin{stroke-width:1}"
        ".dashed{stroke-dasharray:5 4}"
    )
    dark = f"@media (prefers-color-scheme:dark){{{fills(1)}}}"
    return f"<style>{fonts}{bold}{lines}{fills(0)}{dark}</style>"
