"""Folding: a drawing of many boxes becomes one of few, each standing for a group or a run.

Boxes of one group become one folded box wherever that leaves the picture without cycles; a group
that other work interrupts becomes several. Boxes without a group fold by runs. In a comparison what
did not change folds first, so that what did stands out. Nothing is lost: the folding says which
boxes each folded one stands for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.drawing.model import (
    FOLD_LIMIT,
    Box,
    Change,
    Drawing,
    Link,
    count_changes,
    count_kinds,
    kind_counts,
)
from graphcore.drawing.order import in_cycle, topological

# a picture of groups stays legible up to about this many boxes
_LEGIBLE = 48
# comparisons of up to this many boxes are shown whole
_SHORT_COMPARISON = 24
# names listed in the tooltip of a folded box
_TOLD = 6

Part = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Folding:
    """``drawing`` has one box per entry of ``members``: the original indices it stands for."""

    drawing: Drawing
    members: tuple[tuple[int, ...], ...]


def unfolded(drawing: Drawing) -> Folding:
    """The drawing as it is."""
    return Folding(drawing, tuple((index,) for index in range(len(drawing.boxes))))


def fold(drawing: Drawing, limit: int = FOLD_LIMIT) -> Folding:
    """The drawing as it is up to ``limit`` boxes, else folded by groups, deep as stays legible.

    A comparison folds what did not change from 25 boxes on, and by groups where too much did.
    """
    if drawing.compares and len(drawing.boxes) > _SHORT_COMPARISON:
        pieces = _unchanged_runs(drawing)
        if len(pieces) <= _LEGIBLE:
            return Folding(_folded(drawing, pieces), tuple(map(tuple, pieces)))
    if len(drawing.boxes) <= limit:
        return unfolded(drawing)
    depths = max(box.group.count("/") + 1 if box.group else 0 for box in drawing.boxes)
    best = None
    for depth in range(1, depths + 1):
        members = _members(drawing, [_prefix(box.group, depth) for box in drawing.boxes])
        if best is not None and len(members) > _LEGIBLE:
            break
        best = members
    if best is None or len(best) > limit:
        best = _chunks(drawing)
    return Folding(_folded(drawing, best), tuple(tuple(entry) for entry in best))


def _prefix(group: str, depth: int) -> str:
    return "/".join(group.split("/")[:depth])


def _members(drawing: Drawing, keys: Sequence[str]) -> list[list[int]]:
    """Original indices by folded box: whole groups where that makes no cycle, else runs."""
    count = len(drawing.boxes)
    order = topological(count, [(link.source, link.target) for link in drawing.links])
    by_run = _runs(order, keys)
    whole = {key: number for number, key in enumerate(dict.fromkeys(keys)) if key}
    first_run = len(whole)
    block = [whole.get(keys[index], first_run + by_run[index]) for index in range(count)]
    # groups on a cycle fall back to their runs; runs of a topological order never form one
    for broken in _cyclic_groups(drawing, block, whole), set(whole):
        if not broken:
            break
        for index in range(count):
            if keys[index] in broken:
                block[index] = first_run + by_run[index]
        if not _cyclic_groups(drawing, block, whole):
            break
    members: dict[int, list[int]] = {}
    for index in order:
        members.setdefault(block[index], []).append(index)
    return [sorted(entry) for entry in members.values()]


def _runs(order: Sequence[int], keys: Sequence[str]) -> list[int]:
    """The number of each index's run: neighbours in ``order`` with the same key."""
    run = [0] * len(order)
    number = 0
    for at, index in enumerate(order):
        if at and keys[index] != keys[order[at - 1]]:
            number += 1
        run[index] = number
    return run


def _cyclic_groups(drawing: Drawing, block: Sequence[int], whole: dict[str, int]) -> set[str]:
    edges = [(block[link.source], block[link.target]) for link in drawing.links]
    on_cycle = in_cycle(max(block, default=-1) + 1, edges)
    return {key for key, number in whole.items() if on_cycle[number]}


def _chunks(drawing: Drawing) -> list[list[int]]:
    """Pieces of about equal size along a topological order, for drawings without useful groups."""
    count = len(drawing.boxes)
    order = topological(count, [(link.source, link.target) for link in drawing.links])
    size = -(-count // 32)
    return [sorted(order[start : start + size]) for start in range(0, count, size)]


def _unchanged_runs(drawing: Drawing) -> list[list[int]]:
    """Original indices by box: what changed and its neighbours alone, the rest in runs."""
    changed = {index for index, box in enumerate(drawing.boxes) if box.change}
    changed |= {end for link in drawing.links if link.change for end in link[:2]}
    shown = set(changed)
    for link in drawing.links:
        if link.source in changed or link.target in changed:
            shown |= {link.source, link.target}
    count = len(drawing.boxes)
    order = topological(count, [(link.source, link.target) for link in drawing.links])
    run = _runs(order, [f"box {index}" if index in shown else "" for index in range(count)])
    members: dict[int, list[int]] = {}
    for index in order:
        members.setdefault(run[index], []).append(index)
    return [sorted(entry) for entry in members.values()]


def _folded(drawing: Drawing, members: Sequence[Sequence[int]]) -> Drawing:
    block = {index: number for number, entry in enumerate(members) for index in entry}
    between: dict[tuple[int, int], set[Change]] = {}
    for link in drawing.links:
        pair = block[link.source], block[link.target]
        if pair[0] != pair[1]:
            between.setdefault(pair, set()).add(link.change)
    links = (
        Link(*pair, change=changes.pop() if len(changes) == 1 else "")
        for pair, changes in between.items()
    )
    boxes = tuple(_group_box(drawing, entry) for entry in members)
    return Drawing(boxes, tuple(links), drawing.notices, drawing.compares)


def _group_box(drawing: Drawing, members: Sequence[int]) -> Box:
    boxes = [drawing.boxes[index] for index in members]
    group = _common([box.group for box in boxes])
    if len(boxes) == 1 and (drawing.compares or not group):
        return boxes[0]
    label = group or f"nodes {members[0]}-{members[-1]}"
    parts = _parts(boxes)
    detail = _detail(boxes, parts)
    changes = tuple(count_changes(boxes).items())
    if drawing.compares and not changes:
        label, detail = group or "unchanged", (not group and _from_to(boxes)) or detail
    title = f"{label}\n{_most_frequent(parts)}"
    return Box(label, "group", detail, group, title, parts=parts, changes=changes)


def _from_to(boxes: Sequence[Box]) -> str:
    """The first and the last group of some boxes; empty where they have one or none."""
    groups = list(dict.fromkeys(box.group for box in boxes if box.group))
    return f"{groups[0]} to {groups[-1]}" if len(groups) > 1 else ""


def _parts(boxes: Sequence[Box]) -> tuple[Part, ...]:
    """(kind, label, count), the most frequent kind first and in it the most frequent label."""
    kinds = list(count_kinds(boxes))
    counts = Counter((box.kind, box.label) for box in boxes)
    ranked = sorted(counts, key=lambda key: (kinds.index(key[0]), -counts[key], key[1]))
    return tuple((kind, label, counts[kind, label]) for kind, label in ranked)


def _detail(boxes: Sequence[Box], parts: Sequence[Part]) -> str:
    """Counts per kind; where there is one kind, how many different ones there are."""
    counts = count_kinds(boxes)
    text = kind_counts(counts)
    return f"{text}, {len(parts)} different" if len(counts) == 1 < len(parts) else text


def _most_frequent(parts: Sequence[Part]) -> str:
    """The labels met most often, one a line."""
    ranked = sorted(parts, key=lambda part: -part[2])
    lines = [f"{count} x {label}" for _, label, count in ranked[:_TOLD]]
    more = len(ranked) - _TOLD
    return "\n".join([*lines, f"and {more} other names"] if more > 0 else lines)


def _common(groups: Sequence[str]) -> str:
    """The path that all of ``groups`` share."""
    paths = [group.split("/") if group else [] for group in groups]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)
