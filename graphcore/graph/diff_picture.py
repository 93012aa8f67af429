"""A GraphDiff as a Drawing: nodes that both graphs have once, what changed marked and listed.

The nodes of the new graph in order, removed ones where they were. Pure; graphs inside nodes are
compared inside their box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphcore.drawing import Box, Change, Drawing, Link, Notice
from graphcore.graph.diff import FieldChange, GraphDiff, NodeChange
from graphcore.graph.nodes import NodeRecord, dim_text
from graphcore.graph.picture import box_of, inner_heading, link_kind
from graphcore.graph.snapshot import EdgeData, GraphSnapshot

_DIMENSIONS = ("grid", "block", "cluster")


def draw_diff(found: GraphDiff, notes: Mapping[int, Sequence[str]]) -> Drawing:
    """The drawing of a comparison; ``notes`` are further lines by index in the new graph."""
    union = _Union(found, notes)
    return Drawing(tuple(union.boxes()), tuple(union.links()), tuple(_verdict(found)), True)


def _verdict(found: GraphDiff) -> Iterator[Notice]:
    """What an update in place would do, as far as can be predicted."""
    if found.refusal is not None:
        result = found.refusal.result.value
        yield Notice(f"update in place: would be refused ({result}): {found.refusal}", "bad")
    for trap in found.traps:
        yield Notice(f"update in place: would be accepted and not applied: {trap}", "bad")
    if found.update_possible:
        said = "carries every change" if found else "nothing to change"
        yield Notice(f"update in place: possible, {said}", "good")


def _no_notes(node: NodeRecord) -> Sequence[str]:
    del node
    return ()


class _Union:
    """The nodes of both graphs in one order, and where each of them is in it."""

    def __init__(self, found: GraphDiff, notes: Mapping[int, Sequence[str]]) -> None:
        self._old, self._new = found.old, found.new
        self._notes = notes
        self._old_of = found.partner
        self._changed = {change.after.index: change for change in found.changed}
        entries = list(self._entries(found))
        self._entries_in_order = entries
        self._place_of_new = {n: at for at, (_, n) in enumerate(entries) if n is not None}
        self._place_of_old = {o: at for at, (o, _) in enumerate(entries) if o is not None}

    def _entries(self, found: GraphDiff) -> Iterator[tuple[int | None, int | None]]:
        """(old index, new index) of every box; a removed node follows what it followed."""
        new_of = {before: after for after, before in found.partner.items()}
        behind: dict[int, list[int]] = {}
        last = -1
        for node in found.old.nodes:
            if node.index in new_of:
                last = new_of[node.index]
            else:
                behind.setdefault(last, []).append(node.index)
        for new in (-1, *range(len(found.new.nodes))):
            if new >= 0:
                yield self._old_of.get(new), new
            for old in behind.get(new, ()):
                yield old, None

    def boxes(self) -> Iterator[Box]:
        for old, new in self._entries_in_order:
            if new is None:
                assert old is not None
                node = self._old.nodes[old]
                yield replace(box_of(node, _no_notes), change="removed", number=str(old))
                continue
            box = box_of(self._new.nodes[new], _no_notes)
            box = replace(box, notes=tuple(self._notes.get(new, ())))
            if old is None:
                yield replace(box, change="added", number=str(new))
                continue
            box = replace(box, number=str(new) if old == new else f"{old}->{new}")
            yield _changed_box(box, self._changed[new]) if new in self._changed else box

    def links(self) -> Iterator[Link]:
        before = self._placed(self._old, self._place_of_old)
        after = self._placed(self._new, self._place_of_new)
        for pair in {**after, **before}:
            change: Change = ""
            if pair not in before:
                change = "added"
            elif pair not in after:
                change = "removed"
            elif before[pair] != after[pair]:
                change = "changed"
            data = after.get(pair) or before[pair]
            yield Link(*pair, link_kind(data), change)

    @staticmethod
    def _placed(graph: GraphSnapshot, place: Mapping[int, int]) -> dict[tuple[int, int], EdgeData]:
        return {(place[s], place[t]): data for (s, t), data in graph.edges_with_data()}


def _changed_box(box: Box, change: NodeChange) -> Box:
    fields = tuple(map(_said, change.fields))
    inner = tuple(
        (inner_heading(change.after, number), draw_diff(inside, {}))
        for number, inside in enumerate(change.inner)
    )
    return replace(box, change="changed", notes=fields + box.notes, lines=(), inner=inner)


def _said(change: FieldChange) -> str:
    """A change in words; launch dimensions as the pictures write them, ``8x2``."""
    name = change.field.rpartition(" ")[2]
    if name not in _DIMENSIONS:
        return str(change)
    before, after = (
        dim_text(value) if isinstance(value, tuple) else value
        for value in (change.before, change.after)
    )
    return f"{change.field}: {before} -> {after}"
