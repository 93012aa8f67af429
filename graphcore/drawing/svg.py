"""SVG: a drawing as a picture, alone in a file or inside a page.

The picture carries its data as attributes (``data-box``, ``data-link``), which the page's script
uses; it needs no script itself, and no font or colour from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from graphcore.drawing import theme
from graphcore.drawing.folding import Folding, fold
from graphcore.drawing.layout import GAP_Y, Layout, Place, Route, lay_out
from graphcore.drawing.model import Box, Drawing, Link, node_count, second_line, truncate

# width of a character of the label's, the detail's and the group label's font, in pixels
_LABEL, _DETAIL, _NAME = 7.25, 6.35, 7.4
_PADDING = 15
_NARROWEST, _WIDEST, _STEP = 112, 240, 16
# characters kept free for a folded box's number of nodes
_AMOUNT = 11
_HEIGHT, _FOLDED_HEIGHT = 44, 60
_RADIUS = 9
# how far below and above boxes a link turns into the gap between columns
_TURN = 12
# how strongly the most frequent labels of a kind are painted, and all others together
_SHADES, _REST = (1.0, 0.72, 0.86, 0.58, 0.78, 0.5), 0.36
# characters XML does not allow, whatever is escaped; line ends stay
_FORBIDDEN = dict.fromkeys({*range(0x20), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF} - {0x0A}, " ")


def picture(drawing: Drawing) -> str:
    """A picture that stands on its own; folded past 200 boxes."""
    style = (
        f"<style>{theme.SHAPES}{theme.fills(dark=False)}"
        f"@media (prefers-color-scheme:dark){{{theme.fills(dark=True)}}}</style>"
    )
    return svg(fold(drawing), style=style)


def svg(folding: Folding, *, style: str = "", interactive: bool = False) -> str:
    """The picture of a folding.

    Args:
        folding: What to draw.
        style: A ``<style>`` element to put inside.
        interactive: Whether boxes can take the keyboard's focus.
    """
    drawing = folding.drawing
    layout = lay_out(drawing, _sizes(drawing))
    title = f"graph of {node_count(sum(map(len, folding.members)))}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gc-picture" role="img" '
        f'aria-label="{title}" width="{layout.width:g}" height="{layout.height:g}" '
        f'viewBox="0 0 {layout.width:g} {layout.height:g}">',
        style,
        *_links(drawing, layout),
        *(
            _box(number, box, place, interactive)
            for number, (box, place) in enumerate(zip(drawing.boxes, layout.places, strict=True))
        ),
        "</svg>",
    ]
    return "".join(parts)


def clean(text: str) -> str:
    """Text for markup: escaped, and without the control characters XML forbids."""
    return escape(text.translate(_FORBIDDEN), quote=True)


def _sizes(drawing: Drawing) -> list[tuple[float, float]]:
    """Widths by what is written; folded boxes share one, so that columns line up."""
    folded = max((_needed(box) for box in drawing.boxes if box.counts), default=0)
    return [
        (folded, _FOLDED_HEIGHT) if box.counts else (_needed(box), _HEIGHT) for box in drawing.boxes
    ]


def _needed(box: Box) -> float:
    """The width that shows both lines, in steps, within bounds."""
    label = len(box.label) * (_NAME if box.counts else _LABEL)
    if box.counts:
        label += _AMOUNT * _DETAIL
    text = max(label, len(second_line(box)) * _DETAIL) + 2 * _PADDING
    return float(min(max(-(-text // _STEP) * _STEP, _NARROWEST), _WIDEST))


def _box(number: int, box: Box, place: Place, interactive: bool) -> str:
    more = () if box.counts else (box.detail, box.group)
    title = "\n".join(filter(None, (box.title or box.label, *more)))
    focus = ' tabindex="0" role="button"' if interactive else ""
    body = _folded_body(box, place) if box.counts else _node_body(box, place)
    return (
        f'<g class="gc-box" data-box="{number}"{focus} '
        f'transform="translate({place.x:g} {place.y:g})">'
        f"<title>{clean(title)}</title>{body}</g>"
    )


def _node_body(box: Box, place: Place) -> str:
    room = place.width - 2 * _PADDING
    label = truncate(box.label, int(room / _LABEL))
    detail = truncate(second_line(box), int(room / _DETAIL))
    back = _rectangle("gc-back", 4, 4, place.width, place.height) if box.inner else ""
    return (
        f"{back}{_rectangle('gc-card', 0, 0, place.width, place.height)}"
        f'<path class="gc-fill {theme.kind_class(box.kind)}" d="M6 0H5A5 5 0 0 0 0 5V'
        f'{place.height - 5:g}A5 5 0 0 0 5 {place.height:g}H6z"/>'
        f'<text class="gc-label gc-ink" x="{_PADDING}" y="{19 if detail else 27}">'
        f"{clean(label)}</text>"
        f'<text class="gc-detail gc-muted" x="{_PADDING}" y="34">{clean(detail)}</text>'
    )


def _folded_body(box: Box, place: Place) -> str:
    total = sum(count for _, count in box.counts)
    amount = node_count(total)
    room = place.width - 2 * _PADDING
    label = truncate(box.label, int((room - (len(amount) + 1) * _DETAIL) / _NAME))
    detail = truncate(box.detail, int(room / _DETAIL))
    return (
        f"{_rectangle('gc-back', 4, 4, place.width, place.height)}"
        f"{_rectangle('gc-card', 0, 0, place.width, place.height)}"
        f'<text class="gc-name gc-ink" x="{_PADDING}" y="21">{clean(label)}</text>'
        f'<text class="gc-detail gc-muted" x="{place.width - _PADDING:g}" y="21" '
        f'text-anchor="end">{amount}</text>'
        f'<text class="gc-detail gc-muted" x="{_PADDING}" y="37">{clean(detail)}</text>'
        f"{''.join(_bar(box, total, room))}"
    )


def _bar(box: Box, total: int, room: float) -> Iterator[str]:
    """The parts as one stacked bar: a colour per kind, a shade per label, slivers at least."""
    segments = list(_segments(box.parts))
    shares = [max(count / total, 0.02) for _, _, count in segments]
    x = float(_PADDING)
    for (kind, shade, _), share in zip(segments, shares, strict=True):
        width = share / sum(shares) * room
        opacity = f' opacity="{shade}"' if shade < 1 else ""
        yield (
            f'<rect class="gc-fill {theme.kind_class(kind)}"{opacity} x="{x:.1f}" y="45" '
            f'width="{max(width - 1, 1):.1f}" height="5" rx="1"/>'
        )
        x += width


def _segments(parts: Sequence[tuple[str, str, int]]) -> Iterator[tuple[str, float, int]]:
    """(kind, shade, count) of each piece of a bar; the rarest labels of a kind share one."""
    by_kind: dict[str, list[int]] = {}
    for kind, _, count in parts:
        by_kind.setdefault(kind, []).append(count)
    for kind, counts in by_kind.items():
        shown, rest = counts[: len(_SHADES)], sum(counts[len(_SHADES) :])
        for shade, count in zip(_SHADES, shown, strict=False):
            yield kind, shade, count
        if rest:
            yield kind, _REST, rest


def _rectangle(name: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{name}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    )


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
    return (
        f'<g data-link="{link.source} {link.target}">'
        f'<path class="gc-link{dashed}" d="{"".join(steps)}"/>'
        f'<path class="gc-head" d="M{x - 4:g} {y - 8:g}h8l-4 8z"/></g>'
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
