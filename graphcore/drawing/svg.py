"""SVG: a drawing as a picture, alone in a file or inside a page.

The picture carries its data as attributes (``data-box``, ``data-link``), which the page's script
uses; it needs no script itself, and no font or colour from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from graphcore.drawing import theme
from graphcore.drawing.folding import Folding, fold, unfolded
from graphcore.drawing.layout import GAP_Y, Layout, Route, lay_out
from graphcore.drawing.model import RACE, SIGNS, Change, Drawing, Link, node_count
from graphcore.drawing.svg_box import box_markup, sizes
from graphcore.drawing.svg_head import Head

_RADIUS = 9
# how far below and above boxes a link turns into the gap between columns
_TURN = 12


def picture(drawing: Drawing, *, full: bool = False) -> str:
    """A picture that stands on its own; folded past 200 boxes unless ``full``."""
    style = (
        f"<style>{theme.SHAPES}{theme.fills(dark=False)}"
        f"@media (prefers-color-scheme:dark){{{theme.fills(dark=True)}}}</style>"
    )
    return svg(unfolded(drawing) if full else fold(drawing), style=style, alone=True)


def svg(folding: Folding, *, style: str = "", alone: bool = False) -> str:
    """The picture of a folding.

    Args:
        folding: What to draw.
        style: A ``<style>`` element to put inside.
        alone: Whether it says itself what a page says around it: notices and the key to the signs
            above it, full names in its tooltips.
    """
    drawing = folding.drawing
    layout = lay_out(drawing, sizes(drawing.boxes))
    head = Head(drawing if alone else Drawing(()), layout.width)
    width, height = head.width, layout.height + head.height
    title = f"graph of {node_count(sum(map(len, folding.members)))}"
    role = "img" if alone else "group"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gc-picture" role="{role}" '
        f'aria-label="{title}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 {-head.height:g} {width:g} {height:g}">',
        style,
        head.markup,
        *_links(drawing, layout),
        *(
            box_markup(number, box, place, alone)
            for number, (box, place) in enumerate(zip(drawing.boxes, layout.places, strict=True))
        ),
        "</svg>",
    ]
    return "".join(parts)


def _links(drawing: Drawing, layout: Layout) -> Iterator[str]:
    for route in layout.routes:
        link = drawing.links[route.link]
        yield _link(link, route, layout)


def _link(link: Link, route: Route, layout: Layout) -> str:
    (x, y, _), *_ = route.points
    steps = [f"M{x:g} {y:g}"]
    last = len(route.points) - 1
    for index, (here, there) in enumerate(pairwise(route.points)):
        end = there if index + 1 < last else (there[0], there[1] - 6, there[2])
        steps.append(_step(here, end, layout))
    x, y, _ = route.points[-1]
    dashed = " gc-dashed" if link.kind else ""
    mark = link.change or ("race" if link.kind == RACE else "")
    change = f' class="gc-{mark}"' if mark else ""
    return (
        f'<g data-link="{link.source} {link.target}"{change}>'
        f'<path class="gc-link{dashed}" d="{"".join(steps)}"/>'
        f'<path class="gc-head" d="M{x - 4:g} {y - 8:g}h8l-4 8z"/>{_sign(mark, route)}</g>'
    )


def _sign(mark: Change | Literal["race"], route: Route) -> str:
    """The sign of an added, removed or racing link, in the middle of its first step."""
    if not mark:
        return ""
    sign = "!" if mark == "race" else SIGNS[mark]
    (x1, y1, column), (x2, y2, other) = route.points[0], route.points[1]
    # a link that changes columns runs around: its sign stands at its foot
    x, y = ((x1 + x2) / 2, (y1 + y2) / 2) if column == other else (x1, y1 + _TURN)
    return (
        f'<g class="gc-mark gc-{mark}"><circle cx="{x:g}" cy="{y:g}" r="7"/>'
        f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle">{sign}</text></g>'
    )


def _step(here: tuple[float, float, int], there: tuple[float, float, int], layout: Layout) -> str:
    (x1, y1, column1), (x2, y2, column2) = here, there
    if column1 != column2:
        return _around(here, there, layout)
    if abs(x1 - x2) < 0.5:
        return f"V{y2:g}"
    bend = min(max((y2 - y1) / 2, GAP_Y / 2), GAP_Y)
    return f"C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"


def _around(here: tuple[float, float, int], there: tuple[float, float, int], layout: Layout) -> str:
    """From the foot of one column through the gap beside it to the head of another."""
    (x1, y1, column), (x2, y2, _) = here, there
    gutter = layout.gutters[column]
    low, high = y1 + _TURN, y2 - _TURN + 6
    r = min(_RADIUS, _TURN)
    right = 1 if gutter >= x1 else -1
    onward = 1 if x2 >= gutter else -1
    out, back = right * r, onward * r
    return (
        f"V{low - r:g}q0 {r} {out} {r}H{gutter - out:g}q{out} 0 {out} {-r}"
        f"V{high + r:g}q0 {-r} {back} {-r}H{x2 - back:g}q{back} 0 {back} {r}V{y2:g}"
    )
