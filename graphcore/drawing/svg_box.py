"""One box as SVG: a node's card, a folded group with its make-up, and the mark of what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from graphcore.drawing import theme
from graphcore.drawing.layout import Place
from graphcore.drawing.model import SIGNS, Box, Change, node_count, second_line, truncate

# width of a character of the label's, the detail's and the group label's font, in pixels
_LABEL, _DETAIL, _NAME = 7.25, 6.35, 7.4
_PADDING = 15
_NARROWEST, _WIDEST, _STEP = 112, 240, 16
# a changed box may be wider: it says what changed
_WIDEST_CHANGE = 336
# characters kept free for a folded box's number of nodes
_AMOUNT = 11
_HEIGHT, _FOLDED_HEIGHT = 44, 60
# how strongly the most frequent labels of a kind are painted, and all others together
_SHADES, _REST = (1.0, 0.72, 0.86, 0.58, 0.78, 0.5), 0.36
# characters XML does not allow, whatever is escaped; line ends stay
_FORBIDDEN = dict.fromkeys({*range(0x20), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF} - {0x0A}, " ")


def clean(text: str) -> str:
    """Text for markup: escaped, and without the control characters XML forbids."""
    return escape(text.translate(_FORBIDDEN), quote=True)


def sizes(boxes: Sequence[Box]) -> list[tuple[float, float]]:
    """Widths by what is written; folded boxes share one, so that columns line up."""
    folded = max((_needed(box) for box in boxes if box.counts), default=0)
    return [(folded, _FOLDED_HEIGHT) if box.counts else (_needed(box), _HEIGHT) for box in boxes]


def _needed(box: Box) -> float:
    """The width that shows both lines, in steps, within bounds."""
    label = len(box.label) * (_NAME if box.counts else _LABEL)
    if box.counts:
        label += _AMOUNT * _DETAIL
    widest = (_WIDEST_CHANGE if box.change == "changed" else _WIDEST) - 2 * _PADDING
    detail = min(len(_detail(box)) * _DETAIL, widest)
    text = max(min(label, _WIDEST - 2 * _PADDING), detail) + 2 * _PADDING
    return float(max(-(-text // _STEP) * _STEP, _NARROWEST))


def box_markup(number: int, box: Box, place: Place, alone: bool) -> str:
    """The ``<g>`` of one box at its place; ``alone``: no table and no script says its name."""
    body = _folded_body(box, place) if box.counts else _node_body(box, place)
    change = box.change or (box.changes and _overall(box))
    name = f"gc-box gc-{change}" if change else "gc-box"
    return (
        f'<g class="{name}" data-box="{number}" '
        f'transform="translate({place.x:g} {place.y:g})">'
        f"{_title(box) if alone or box.counts else ''}{body}{_marks(box, place)}</g>"
    )


def _title(box: Box) -> str:
    """The tooltip, which is the name that a screen reader says."""
    more = () if box.counts else (box.detail, box.group)
    sign = f"{box.change}: " if box.change else ""
    notes = box.notes if box.change else ()
    text = sign + "\n".join(filter(None, (box.title or box.label, *more, *notes)))
    return f"<title>{clean(text)}</title>"


def _overall(box: Box) -> Change:
    """What became of a folded box as a whole: what became of all of it, else it changed."""
    (change, count), *others = box.changes
    return change if not others and count == sum(n for _, n in box.counts) else "changed"


def _detail(box: Box) -> str:
    """The second line; of a changed box what changed, as that is what one looks for."""
    if box.change != "changed" or not box.notes:
        return second_line(box)
    more = len(box.notes) - 1
    return box.notes[0] + (f" (+{more} more)" if more else "")


def _marks(box: Box, place: Place) -> str:
    """Signs on the upper edge, from the right: ``+``, or ``~12 +1`` on a folded box."""
    if box.changes:
        texts = [(change, f"{SIGNS[change]}{count}") for change, count in box.changes]
    else:
        texts = [(box.change, SIGNS[box.change])] if box.change else []
    x, marks = place.width - 8, []
    for change, text in reversed(texts):
        width = 18 if len(text) == 1 else len(text) * _LABEL + 10
        x -= width
        marks.append(
            f'<g class="gc-mark gc-{change}"><rect x="{x:g}" y="-9" width="{width:g}" '
            f'height="18" rx="9"/><text x="{x + width / 2:g}" y="4" text-anchor="middle">'
            f"{text}</text></g>"
        )
        x -= 3
    return "".join(marks)


def _node_body(box: Box, place: Place) -> str:
    room = place.width - 2 * _PADDING
    label = truncate(box.label, int(room / _LABEL))
    detail = truncate(_detail(box), int(room / _DETAIL))
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
    place = f' x="{x:g}" y="{y:g}"' if x or y else ""
    return f'<rect class="{name}"{place} width="{width:g}" height="{height:g}" rx="6"/>'
