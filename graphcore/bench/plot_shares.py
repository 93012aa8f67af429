"""Results as shares of a ceiling: of each case's floor, or of what reading memory allows.

A bar that ends at the line of 1 does what nobody can pass; targets are marked where a result has
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from graphcore.bench import svg
from graphcore.bench.targets import target_share

_LABEL, _PLOT, _GAP = 200, 340, 12
_SHARES, _WORDS = _LABEL + _PLOT + 46, _LABEL + _PLOT + 56
_TOP = svg.HEAD + 44
_CEILING = re.compile(r"(.+): the floor is (.+)")


@dataclass(frozen=True)
class _Bar:
    kind: str
    share: float
    words: str


@dataclass(frozen=True)
class _Group:
    """Bars of one case, with what stands beside them, and its target."""

    label: str
    under: Sequence[str]
    bars: Sequence[_Bar]
    target: float | None = None


def of_floor(result: dict[str, Any]) -> str | None:
    """Ours and the best peer of each case as shares of its floor; None without rows.

    Args:
        result: Content of a result file of times, in us; its notes hold the targets.
    """
    groups = [_case(row, result["notes"]) for row in result["rows"]]
    if not groups:
        return None
    title = f"{result['suite']} against the ceiling: {result['device']}, {result['date']}"
    under = f"share of each case's floor; larger is better; commit {result['commit'][:12]}"
    return _chart(title, under, "the floor", groups, has_best=True)


def of_reading(result: dict[str, Any]) -> str | None:
    """Tokens a second of suite decode as shares of what reading memory allows.

    A token reads weights, K and V once, at the rate of the streaming read of the same run. Models
    whose notes lack one of both are left out; None where all do.

    Args:
        result: Content of a result file.
    """
    figures = {note["case"]: note for note in result["notes"] if "case" in note}
    names = dict.fromkeys(_model_of(row["case"]) for row in result["rows"])
    groups = [group for name in names for group in _model(name, result["rows"], figures)]
    if not groups:
        return None
    title = f"decode against the roofline: {result['device']}, {result['date']}"
    under = (
        "share of the tokens a second at which weights, K and V are read once each, at the "
        f"streaming read of the run; commit {result['commit'][:12]}"
    )
    return _chart(title, under, "reading alone", groups, has_best=False)


def _case(row: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> _Group:
    peers = {name: float(value) for name, value in row["peers"].items() if value is not None}
    found = [_Bar("ours", row["of_floor"], f"{row['ours']:,.4g} {row['unit']} graphcore")]
    if peers:
        name = min(peers, key=peers.__getitem__)
        words = f"{peers[name]:,.4g} {row['unit']} {name}"
        found.append(_Bar("peer", row["floor"] / peers[name], words))
    told = (_CEILING.fullmatch(note.get("about", "")) for note in notes)
    ceilings = [f"of {each[2]}" for each in told if each and each[1] == row["case"]]
    targets = (target_share(note, row["case"], row["floor"]) for note in notes)
    target = next((each for each in targets if each is not None), None)
    return _Group(row["case"], ceilings[:1], found, target)


def _model_of(case: str) -> str:
    return case.removesuffix(" plain").removesuffix(" one launch").partition(" ")[0]


def _model(
    name: str, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Mapping[str, Any]]
) -> Iterator[_Group]:
    """The bars of one model, fastest first; none where bytes or the ceiling are not known."""
    read = figures.get(f"{name} streaming read")
    sizes = [figures[case] for case in figures if _is_bytes(case, name)]
    own = {row["case"]: row for row in rows if row["unit"] == "tokens/s"}
    if read is None or not sizes or name not in own:
        return
    most = read["ours"] * 1e3 / sizes[0]["ours"]  # GB/s over MB
    ways = {name: "graphcore", f"{name} one launch": "graphcore in one launch",
            f"{name} plain": "graphcore plain"}  # fmt: skip
    rates = [("ours", words, own[case]["ours"]) for case, words in ways.items() if case in own]
    rates += [("peer", peer, value) for peer, value in own[name]["peers"].items()]
    found = [
        _Bar(kind, rate / most, f"{rate:,.0f} tokens/s {words}")
        for kind, words, rate in sorted(rates, key=lambda each: -each[2])
    ]
    beside = (
        f"{sizes[0]['ours']:,.0f} MB a token",
        f"read at {read['ours'] / 1e3:.2f} TB/s:",
        f"{most:,.0f} tokens/s",
    )
    yield _Group(name, beside, found)


def _is_bytes(case: str, name: str) -> bool:
    return case.startswith(f"{name} ") and case.endswith(": bytes of a step")


def _chart(
    title: str, under: str, ceiling: str, groups: Sequence[_Group], *, has_best: bool
) -> str:
    shares = [each.share for group in groups for each in group.bars]
    shares += [group.target for group in groups if group.target is not None]
    most = max(1.0, ceil(max(shares) * 10 - 1e-9) / 10)
    digits = 2 if has_best else 3

    def place(share: float) -> float:
        return _LABEL + _PLOT * share / most

    top, bars = _TOP, list[str]()
    for group in groups:
        lines, top = _drawn(group, top, place, digits)
        bars += lines
    ticks = [tick / 5 for tick in range(int(most * 5 + 1e-9) + 1)]
    body = []
    for tick in ticks:
        kind, style = ("floor", "line") if tick == 1 else ("rule", "thin")
        body.append(svg.line([(place(tick), _TOP - 6), (place(tick), top - 4)], kind, style))
        body.append(svg.text(place(tick), _TOP - 12, f"{tick:g}", anchor="middle"))
    body += _legend(ceiling, groups, has_best=has_best)
    return svg.chart(title, under, [*body, *bars], top + 4)


def _drawn(
    group: _Group, top: int, place: Callable[[float], float], digits: int
) -> tuple[list[str], int]:
    lines = [svg.text(0, top + 12, group.label, "strong")]
    for at, words in enumerate(group.under, 1):
        lines.append(svg.text(0, top + 12 + at * svg.LINE, words))
    for at, each in enumerate(group.bars):
        y = top + at * svg.LINE
        lines.append(svg.bar(_LABEL, y + 2, place(each.share) - _LABEL, each.kind))
        emphasis = "strong" if each.kind == "ours" else "faint"
        lines.append(svg.text(_SHARES, y + 12, f"{each.share:.{digits}f}", emphasis, "end"))
        lines.append(svg.text(_WORDS, y + 12, each.words, emphasis))
    if group.target is not None:
        x = place(group.target)  # on paper, so that it is seen on a bar
        lines.append(svg.bar(x - 3, top - 1, 6, "paper", svg.LINE + 2))
        lines.append(svg.bar(x - 1.5, top - 1, 3, "target", svg.LINE + 2))
    height = max(len(group.bars), 1 + len(group.under)) * svg.LINE
    return lines, top + height + _GAP


def _legend(ceiling: str, groups: Sequence[_Group], *, has_best: bool) -> list[str]:
    x, y = _LABEL, svg.HEAD
    made: list[str] = []
    wanted = [("ours", "graphcore"), ("peer", "best peer" if has_best else "peers")]
    wanted.append(("floor", f"1: {ceiling}"))
    if any(group.target is not None for group in groups):
        wanted.append(("target", "target"))
    for kind, words in wanted:
        made += [svg.bar(x, y, 10, kind, 10), svg.text(x + 15, y + 10, words)]
        x += 15 + 7 * len(words) + 16
    return made
