"""Aligning two lists of nodes: which of the second is which of the first, in order.

Equal nodes come first. Between them, as many of each count as the same ones changed; where the
numbers differ, those of the same name do. So one node more or less does not make every node behind
it look changed. About linear where the lists are mostly equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher

# beyond this product of lengths, nodes that occur very often are no landmarks
_EXACT = 1_000_000

Pairs = list[tuple[int, int]]


def align(
    old: Sequence[Hashable],
    new: Sequence[Hashable],
    old_names: Sequence[Hashable],
    new_names: Sequence[Hashable],
) -> Pairs:
    """(index in old, index in new) of the nodes that both have, rising in both.

    Args:
        old: What each node is, completely.
        new: Likewise.
        old_names: What each node is called: less than what it is.
        new_names: Likewise.
    """
    pairs: Pairs = []
    for (start, stop), (begin, end) in _gaps(old, new, pairs):
        names, others = old_names[start:stop], new_names[begin:end]
        if len(names) == len(others):
            near: Pairs = [(at, at) for at in range(len(names))]
        else:
            near = []
            for _ in _gaps(names, others, near):
                pass
        pairs += [(start + at, begin + to) for at, to in near]
    return sorted(pairs)


def _gaps(
    old: Sequence[Hashable], new: Sequence[Hashable], pairs: Pairs
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Adds equal elements to ``pairs`` and yields the ranges between them."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        pairs.append((head, head))
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    last, end = len(old) - tail, len(new) - tail
    pairs += zip(range(last, len(old)), range(end, len(new)), strict=True)
    middle, other = old[head:last], new[head:end]
    is_long = len(middle) * len(other) > _EXACT
    matcher = SequenceMatcher(None, middle, other, autojunk=is_long)
    at, to = 0, 0
    for block in matcher.get_matching_blocks():
        if at < block.a or to < block.b:
            yield (head + at, head + block.a), (head + to, head + block.b)
        pairs += ((head + block.a + i, head + block.b + i) for i in range(block.size))
        at, to = block.a + block.size, block.b + block.size
