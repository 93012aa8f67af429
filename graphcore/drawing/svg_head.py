"""The head of a picture that stands alone: its notices, and the key to the signs."""

from __future__ import annotations

from textwrap import wrap

from graphcore.drawing.layout import MARGIN
from graphcore.drawing.model import SIGNS, Drawing
from graphcore.drawing.svg_box import clean

_LINE = 19
# width of a character of the notices' font, in pixels
_CHARACTER = 6.9
_LEAST = 420


class Head:
    """Markup above a picture of ``width`` pixels; it may need more width than the picture.

    Drawn from ``-height`` to 0, so that the picture itself stays where it is.
    """

    def __init__(self, drawing: Drawing, width: float) -> None:
        self.width, self.height, self.markup = width, 0.0, ""
        changes = drawing.changes()
        if not drawing.notices and not drawing.compares:
            return
        self.width = max(width, float(_LEAST))
        room = int((self.width - 2 * MARGIN) / _CHARACTER)
        lines = [
            (part, notice.tone)
            for notice in drawing.notices
            for part in wrap(notice.text, room, subsequent_indent="   ") or [""]
        ]
        self.height = float(len(lines) * _LINE + (_LINE + 8 if changes else 0) + MARGIN)
        y = MARGIN + 10 - self.height
        parts = []
        for text, tone in lines:
            name = f"gc-note gc-tone-{tone}" if tone else "gc-note gc-ink"
            parts.append(f'<text class="{name}" x="{MARGIN}" y="{y:g}">{clean(text)}</text>')
            y += _LINE
        x = float(MARGIN)
        for change, count in changes.items():
            said = f"{count} {change}"
            parts.append(
                f'<g class="gc-mark gc-{change}"><circle cx="{x + 8:g}" cy="{y + 2:g}" r="8"/>'
                f'<text x="{x + 8:g}" y="{y + 6:g}" text-anchor="middle">{SIGNS[change]}</text></g>'
                f'<text class="gc-note gc-muted" x="{x + 21:g}" y="{y + 6:g}">{said}</text>'
            )
            x += 21 + len(said) * _CHARACTER + 18
        self.markup = "".join(parts)
