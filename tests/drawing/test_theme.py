"""Colours: legible in both themes, told apart without them, and switched by what a page says."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.snapshots import drawing

from graphcore.drawing import theme
from graphcore.drawing.html import _DARK_MARKS, _LIGHT_MARKS

THEMES = {"light": (theme.LIGHT, 0), "dark": (theme.DARK, 1)}


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.2 of ``#rrggbb``."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_the_standard_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", THEMES)
def test_text_is_legible_on_every_ground_it_stands_on(name: str) -> None:
    palette, at = THEMES[name]
    grounds = [palette.page, palette.surface, palette.raised]
    grounds += [pair[at] for pair in theme.GROUNDS.values()]
    inks = {"ink": palette.ink, "muted": palette.muted}
    pairs = {(ink, ground): contrast(inks[ink], ground) for ink, ground in product(inks, grounds)}
    assert {pair: ratio for pair, ratio in pairs.items() if ratio < 4.5} == {}
    assert contrast(palette.accent, palette.surface) >= 4.5
    assert contrast(palette.accent, palette.raised) >= 4.5


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("change", theme.CHANGES)
def test_signs_and_verdicts_are_legible(name: str, change: str) -> None:
    palette, at = THEMES[name]
    color = theme.CHANGES[change][at]
    assert contrast(palette.mark, color) >= 4.5
    assert contrast(color, palette.surface) >= 4.5
    assert contrast(color, theme.GROUNDS[change][at]) >= 4.5


@pytest.mark.parametrize("name", THEMES)
def test_kinds_and_links_stand_out_from_the_card(name: str) -> None:
    palette, at = THEMES[name]
    colors = {kind: pair[at] for kind, pair in theme.KINDS.items()} | {"other": theme.OTHER[at]}
    weak = {k: round(contrast(c, palette.surface), 2) for k, c in colors.items()}
    assert {kind: ratio for kind, ratio in weak.items() if ratio < 3} == {}
    assert contrast(palette.link, palette.surface) >= 3


def test_the_marks_of_notebooks_choose_the_theme_over_the_systems_choice() -> None:
    text = drawing(1).to_html()
    media = text.index("prefers-color-scheme:dark")
    dark, light = theme.variables(dark=True), theme.variables(dark=False)
    for marks, values in ((_DARK_MARKS, dark), (_LIGHT_MARKS, light)):
        rule = ",".join(f"{mark} .gc" for mark in marks) + "{" + values + "}"
        assert text.index(rule) > media
    assert len(_DARK_MARKS) == len(_LIGHT_MARKS)


def test_every_colour_of_both_themes_is_set_for_a_page() -> None:
    dark, light = (
        dict(entry.split(":") for entry in theme.variables(dark=dark).split(";") if entry)
        for dark in (True, False)
    )
    assert dark.keys() == light.keys()
    used = set(theme.fills_by_variables().split("var(")[1:])
    assert {name.split(")")[0] for name in used} <= light.keys()
