"""What a chart shows, read from its SVG: texts with the room they take, bars, lines, colours.

Widths of letters are those of a wide font, so that narrower ones fit too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

_SIZE = 12.0
_WIDTHS = {"title": 0.68 * 15, "strong": 0.68 * _SIZE, "faint": 0.55 * _SIZE}


@dataclass(frozen=True)
class Box:
    """A rectangle and what it is: a text's words, or a bar's class."""

    what: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


class Chart:
    """A parsed picture."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        left, top, width, height = map(float, self.root.get("viewBox").split())
        self.paper = Box("paper", left, top, left + width, top + height)
        self.texts = [_text_box(each) for each in self._all("text")]
        self.bars = [_bar_box(each) for each in self._all("rect")]

    def words(self) -> list[str]:
        return [each.what for each in self.texts]

    def bars_of(self, kind: str) -> list[Box]:
        """Bars of the charts, without those of a legend, which are as wide as high."""
        return [bar for bar in self.bars if bar.what == kind and not _is_square(bar)]

    def lines_of(self, kind: str) -> list[list[tuple[float, float]]]:
        found = [each for each in self._all("polyline") if f"{kind}-line" in each.get("class")]
        return [
            [tuple(map(float, point.split(","))) for point in each.get("points").split()]
            for each in found
        ]

    def clashes(self) -> list[tuple[str, str]]:
        """Texts that meet each other or a bar, or leave the paper."""
        bars = [bar for bar in self.bars if bar.what not in ("paper", "target")]
        found = [(a.what, b.what) for a, b in combinations(self.texts, 2) if a.meets(b)]
        found += [(a.what, b.what) for a in self.texts for b in bars if a.meets(b)]
        inside = self.paper
        return found + [
            (each.what, "the edge")
            for each in self.texts
            if each.left < inside.left or each.right > inside.right or each.bottom > inside.bottom
        ]

    def _all(self, tag: str) -> list[ElementTree.Element]:
        return list(self.root.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def _is_square(bar: Box) -> bool:
    return bar.right - bar.left == bar.bottom - bar.top


def _text_box(text: ElementTree.Element) -> Box:
    x, y, words = float(text.get("x")), float(text.get("y")), text.text or ""
    width = len(words) * _WIDTHS[text.get("class")]
    left = x - width * {None: 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
    return Box(words, left, y - 10, left + width, y + 2)


def _bar_box(bar: ElementTree.Element) -> Box:
    x, y, width, height = (float(bar.get(name)) for name in ("x", "y", "width", "height"))
    return Box(bar.get("class"), x, y, x + width, y + height)


def contrast(one: str, other: str) -> float:
    """Of two colours as #rrggbb: 1 to 21, as WCAG 2 defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part, 16) / 255 for part in re.findall(r"[0-9a-f]{2}", colour)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
