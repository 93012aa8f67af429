"""Colours of pictures and pages, for light and for dark, as style sheets.

Kinds have a colour of their own, and are always written too: nothing is told by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Palette:
    """One theme: the neutral colours by role. ``mark`` is written on the colours of changes."""

    page: str
    surface: str
    raised: str
    ink: str
    muted: str
    line: str
    link: str
    accent: str
    mark: str


LIGHT = Palette(
    page="#f5f6f8",
    surface="#ffffff",
    raised="#f0f2f6",
    ink="#1a1f29",
    muted="#5d6878",
    line="#d6dbe4",
    link="#7f8b9d",
    accent="#2b66d4",
    mark="#ffffff",
)
DARK = Palette(
    page="#0f1217",
    surface="#171b22",
    raised="#20262f",
    ink="#e7eaf0",
    muted="#9ca7b8",
    line="#333b47",
    link="#75818f",
    accent="#7eabff",
    mark="#0f1217",
)

# kind -> (light, dark)
KINDS = {
    "kernel": ("#2f6bd8", "#6fa1ff"),
    "memcpy": ("#bd6a08", "#f0a548"),
    "memset": ("#0d8a7e", "#3fc6b6"),
    "host": ("#b53380", "#f27db9"),
    "child": ("#6b4cc2", "#a88dfb"),
    "conditional": ("#c03a2b", "#f47c6e"),
    "event record": ("#56708f", "#8fb0d4"),
    "event wait": ("#56708f", "#8fb0d4"),
    "alloc": ("#3c8a2e", "#7fce6d"),
    "free": ("#75862a", "#b9c969"),
    "empty": ("#8a93a2", "#8b95a5"),
}
OTHER = ("#6b7280", "#a3acba")
# change -> (light, dark) of its strokes and signs, and of the ground of its boxes
CHANGES = {
    "added": ("#1a7a35", "#56c870"),
    "removed": ("#c2242e", "#ff8078"),
    "changed": ("#8a5800", "#e3b341"),
}
GROUNDS = {
    "added": ("#e9f7ed", "#15291c"),
    "removed": ("#fdeeee", "#331b1e"),
    "changed": ("#fff6df", "#2d2614"),
}


def kind_class(kind: str) -> str:
    """The CSS class of a kind; kinds without a colour of their own share one."""
    return f"k-{kind.replace(' ', '-')}" if kind in KINDS else "k-other"


def fills(dark: bool) -> str:
    """Rules that colour a picture with one theme's own values, for a picture on its own."""
    return _rules(_values(dark))


def fills_by_variables() -> str:
    """The same rules by custom properties, for a picture in a page that sets :func:`variables`."""
    return _rules({name: f"var(--gc-{name})" for name in _values(dark=False)})


def dots() -> str:
    """Rules that colour the dots of a page's tables and legend."""
    names = [*KINDS, "other"]
    rules = (f".gc-dot.{kind_class(name)}{{background:var(--gc-{_plain(name)})}}" for name in names)
    return "".join(rules)


def _plain(kind: str) -> str:
    return kind.replace(" ", "-")


def variables(dark: bool) -> str:
    """One theme as custom properties, for a page and the pictures in it."""
    return "".join(f"--gc-{name}:{value};" for name, value in _values(dark).items())


def _values(dark: bool) -> dict[str, str]:
    palette = DARK if dark else LIGHT
    values = {name: getattr(palette, name) for name in Palette.__slots__}
    kinds = {kind.replace(" ", "-"): pair[dark] for kind, pair in KINDS.items()}
    changes = {name: pair[dark] for name, pair in CHANGES.items()}
    grounds = {f"{name}-ground": pair[dark] for name, pair in GROUNDS.items()}
    return values | kinds | {"other": OTHER[dark]} | changes | grounds


def _rules(values: dict[str, str]) -> str:
    rules = {
        ".gc-ink": f"fill:{values['ink']}",
        ".gc-muted": f"fill:{values['muted']}",
        ".gc-card": f"fill:{values['surface']};stroke:{values['line']}",
        ".gc-back": f"fill:{values['raised']};stroke:{values['line']}",
        ".gc-link": f"stroke:{values['link']}",
        ".gc-head": f"fill:{values['link']}",
        ".gc-mark text": f"fill:{values['mark']}",
        ".gc-tone-good": f"fill:{values['added']}",
        ".gc-tone-bad": f"fill:{values['removed']}",
    }
    for change in (*CHANGES, "race"):
        color, name = values["removed" if change == "race" else change], f".gc-{change}"
        if change in CHANGES:
            rules[f"{name}>.gc-card"] = f"fill:{values[f'{change}-ground']};stroke:{color}"
        rules[f"{name}>.gc-link"] = f"stroke:{color}"
        rules[f"{name}>.gc-head,.gc-mark{name}>rect,.gc-mark{name}>circle"] = f"fill:{color}"
    for kind in [kind.replace(" ", "-") for kind in KINDS] + ["other"]:
        rules[f".gc-fill.k-{kind}"] = f"fill:{values[kind]}"
    return "".join(f"{selector}{{{body}}}" for selector, body in rules.items())


SHAPES = (
    ".gc-link{fill:none;stroke-width:1.4}"
    ".gc-dashed{stroke-dasharray:5 4}"
    ".gc-card,.gc-back{stroke-width:1}"
    ".gc-added>.gc-card,.gc-changed>.gc-card{stroke-width:1.8}"
    ".gc-removed>.gc-card{stroke-width:1.8;stroke-dasharray:6 3}"
    ".gc-added>.gc-link,.gc-race>.gc-link,.gc-removed>.gc-link{stroke-width:2}"
    ".gc-removed>.gc-link{stroke-dasharray:6 3}"
    ".gc-mark text{font:700 12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".gc-note{font:600 12.5px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}"
    ".gc-label{font:600 12px ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".gc-name{font:600 13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}"
    ".gc-detail{font:10.5px ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace}"
)
"""Fonts and strokes of a picture, the same in both themes."""
