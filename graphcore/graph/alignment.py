"""Which node of an old graph is which of a new one, where an update would not say.

Pure. Common beginnings and ends are found first, so that the cost stays linear for what people
compare: two captures of one step with a few nodes more, less or replaced.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from graphcore.driver.pairing import Mismatch, Pairs
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot

# past this many possible pairs the middle parts are not searched for likeness any more
_MOST_PAIRS = 4_000_000

Token = tuple[Hashable, ...]


def align(old: GraphSnapshot, new: GraphSnapshot, pairs: Pairs | Mismatch) -> dict[int, int]:
    """New index -> old index of the nodes that both graphs have.

    As an update pairs them (``pairs``) where the topologies agree; else by likeness in creation
    order, and what stands in the place of something else of as many nodes is taken for its
    replacement.
    """
    if not isinstance(pairs, Mismatch):
        return {after: before for before, after in sorted(pairs, key=lambda pair: pair[1])}
    before, after = _tokens(old.nodes), _tokens(new.nodes)
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    found = {index: index for index in range(start)}
    stops = len(before) - end, len(after) - end
    found.update(_middle(before, after, (start, stops[0]), (start, stops[1])))
    found.update({stops[1] + step: stops[0] + step for step in range(end)})
    return found


def _tokens(nodes: Sequence[NodeRecord]) -> list[Token]:
    return [(node.kind, node.name, node.label) for node in nodes]


def _common(before: Sequence[Token], after: Sequence[Token]) -> int:
    """How many first tokens are the same."""
    count = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        count += 1
    return count


def _middle(
    before: list[Token], after: list[Token], old: tuple[int, int], new: tuple[int, int]
) -> dict[int, int]:
    sizes = old[1] - old[0], new[1] - new[0]
    if sizes[0] * sizes[1] > _MOST_PAIRS:
        return _in_place(before, after, old, new)
    matcher = SequenceMatcher(None, before[slice(*old)], after[slice(*new)], autojunk=False)
    found: dict[int, int] = {}
    for what, a, a_end, b, b_end in matcher.get_opcodes():
        if what in ("equal", "replace"):
            here = (old[0] + a, old[0] + a_end), (new[0] + b, new[0] + b_end)
            found.update(_in_place(before, after, *here))
    return found


def _in_place(
    before: list[Token], after: list[Token], old: tuple[int, int], new: tuple[int, int]
) -> dict[int, int]:
    """Node by node where there are as many, else those of one kind in order."""
    if old[1] - old[0] == new[1] - new[0]:
        return {new[0] + step: old[0] + step for step in range(new[1] - new[0])}
    found: dict[int, int] = {}
    at = old[0]
    for index in range(*new):
        same = next((i for i in range(at, old[1]) if before[i][0] == after[index][0]), None)
        if same is not None:
            found[index] = same
            at = same + 1
    return found
