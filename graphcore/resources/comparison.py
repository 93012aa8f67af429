"""What differs between the fields of two graphs, in words, with their nodes aligned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphcore.resources.alignment import align
from graphcore.resources.fields import Group, Named, Value, words_of

_ORDER = "dependencies"


def compare_groups(old: Iterable[Group], new: Iterable[Group]) -> Iterator[str]:
    """One sentence a field that differs; groups as of ``dependencies``."""
    yield from _Comparison(_by_level(old), _by_level(new)).level("", "")


def _by_level(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Groups by the graph they lie in: the graph's own first, then its nodes in order."""
    levels: dict[str, list[Group]] = {}
    for group in groups:
        levels.setdefault(group.level, []).append(group)
    return levels


class _Comparison:
    """Two graphs, by level."""

    def __init__(self, old: dict[str, list[Group]], new: dict[str, list[Group]]) -> None:
        self._old = old
        self._new = new

    def level(self, ours: str, theirs: str) -> Iterator[str]:
        """What differs in one graph of each, and in the graphs inside them."""
        (before, *nodes), (after, *others) = self._old[ours], self._new[theirs]
        yield from _changes(before.where, before.values, after.values)
        pairs = align(*map(_wholes, (nodes, others)), *map(_names, (nodes, others)))
        partner = dict(pairs)
        met = set(partner.values())
        # (place in the first graph, lines): a node of the second alone behind its neighbour
        lines: list[tuple[float, list[str]]] = [
            (_place(index, pairs) + 0.5, [f"{node.where}: only the second graph has it"])
            for index, node in enumerate(others)
            if index not in met
        ]
        for index, node in enumerate(nodes):
            if index not in partner:
                lines.append((index, [f"{node.where}: only the first graph has it"]))
                continue
            other = others[partner[index]]
            values = tuple(_moved(pair, partner) for pair in node.values)
            found = list(_changes(node.where, node.values, other.values, values))
            lines.append((index, [*found, *self._inner(node, other)]))
        for _, found in sorted(lines, key=lambda line: line[0]):
            yield from found

    def _inner(self, node: Group, other: Group) -> Iterator[str]:
        number = 0
        while True:
            ours, theirs = (f"{each.level}{each.position}.{number}." for each in (node, other))
            is_there = ours in self._old, theirs in self._new
            if is_there == (True, True):
                yield from self.level(ours, theirs)
            elif any(is_there):
                which = "first" if is_there[0] else "second"
                yield f"graph {ours if is_there[0] else theirs}: only the {which} graph has it"
            else:
                return
            number += 1


def _wholes(nodes: list[Group]) -> list[tuple[Named, ...]]:
    """Each node but for what it depends on, which is told by index."""
    return [tuple(pair for pair in node.values if pair[0] != _ORDER) for node in nodes]


def _names(nodes: list[Group]) -> list[tuple[Value, Value]]:
    """Each node's kind, and what it is called."""
    values = (dict(node.values) for node in nodes)
    return [(each["kind"], each.get("function", each.get("form"))) for each in values]


def _place(index: int, pairs: list[tuple[int, int]]) -> int:
    """Behind which node of the first graph one that only the second has is told of."""
    return max((old for old, new in pairs if new < index), default=-1)


def _moved(pair: Named, partner: dict[int, int]) -> Named:
    """Dependencies in the indices of the second graph; -1 for nodes it does not have."""
    name, value = pair
    if name != _ORDER or not isinstance(value, tuple):
        return pair
    return name, tuple(sorted(_renumbered(each, partner) for each in value))


def _renumbered(source: Value, partner: dict[int, int]) -> tuple[int, ...]:
    """One dependency (index, edge data ...) with the index of the second graph."""
    assert isinstance(source, tuple)
    index, *data = (part for part in source if isinstance(part, int))
    return (partner.get(index, -1), *data)


def _changes(
    where: str,
    before: tuple[Named, ...],
    after: tuple[Named, ...],
    translated: tuple[Named, ...] | None = None,
) -> Iterator[str]:
    """``translated``: what of ``before`` is compared, where that is not what is told."""
    if (before if translated is None else translated) == after:
        return
    old, new = dict(before), dict(after)
    same = old if translated is None else dict(translated)
    if old.get("kind") != new.get("kind"):  # the other fields are another node's
        yield f"{where}: kind was {words_of(old['kind'])}, is {words_of(new['kind'])}"
        return
    for name in {**old, **new}:
        if name not in new:
            yield f"{where}: {name} was {words_of(old[name])}, is gone"
        elif name not in old:
            yield f"{where}: {name} is new: {words_of(new[name])}"
        elif same[name] != new[name]:
            yield f"{where}: {name} was {words_of(old[name])}, is {words_of(new[name])}"
