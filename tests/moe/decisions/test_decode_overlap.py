"""When the next step may be prepared while one runs: each rule alone forbids it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from graphcore.moe.decisions.decode_overlap import OverlapFacts, OverlapRule, Row, overlap_obstacles
from graphcore.moe.decisions.options import MoEOptions

R = OverlapRule
RUNNING = (Row(request=1, sequence=0, position=10), Row(request=2, sequence=1, position=20))
NEXT = tuple(replace(row, position=row.position + 1) for row in RUNNING)
FACTS = OverlapFacts(MoEOptions(decode_overlap=True), RUNNING, NEXT)


def test_the_next_step_is_prepared_where_every_rule_holds() -> None:
    assert overlap_obstacles(FACTS) == ()
    assert overlap_obstacles(replace(FACTS, following=NEXT[1:])) == ()  # a sequence has ended
    assert overlap_obstacles(replace(FACTS, following=NEXT[::-1])) == ()
    assert overlap_obstacles(replace(FACTS, outstanding=((0, 0), (1, 0)))) == ()


BROKEN: dict[str, tuple[dict[str, Any], set[OverlapRule]]] = {
    "the option is off": ({"options": MoEOptions(decode_boundary_overlap=True)}, {R.OPTION}),
    "tokens are chosen on the host": ({"is_sampled_on_device": False}, {R.SAMPLED_ON_DEVICE}),
    "two devices": ({"devices": 2}, {R.ONE_DEVICE}),
    "embeddings on the host": ({"embeddings_on_device": False}, {R.EMBEDDINGS}),
    "a token cannot be taken back": ({"can_roll_back": False}, {R.ROLLBACK}),
    "a token is outstanding": ({"outstanding": ((1, 1),)}, {R.OUTSTANDING}),
    "a buffer has to grow": ({"grows": True}, {R.NO_GROWTH}),
    "no input buffer is free": ({"free_buffers": 0}, {R.INPUT_BUFFER}),
    "more input buffers than there are": ({"free_buffers": 3}, {R.INPUT_BUFFER}),
    "two rows of one sequence": ({"following": (NEXT[0], NEXT[0])}, {R.SINGLE_ROWS}),
    "two running rows of one sequence": ({"running": (*RUNNING, RUNNING[0])}, {R.SINGLE_ROWS}),
    "no row": ({"following": ()}, {R.SINGLE_ROWS}),
    "a sequence that does not run": (
        {"following": (*NEXT, Row(3, 2, 1))}, {R.MATCHED},
    ),
    "a position left out": (
        {"following": (NEXT[0], replace(NEXT[1], position=22))}, {R.MATCHED},
    ),
    "the same position again": ({"following": RUNNING}, {R.MATCHED}),
    "a slot that was used again": (
        {"following": (NEXT[0], replace(NEXT[1], request=3))}, {R.REQUESTS},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "rules"), BROKEN.values(), ids=BROKEN)
def test_decoding_is_ordinary_where(change: dict[str, Any], rules: set[OverlapRule]) -> None:
    assert set(overlap_obstacles(replace(FACTS, **change))) == rules


def test_every_rule_is_tested() -> None:
    assert set().union(*(rules for _, rules in BROKEN.values())) == set(OverlapRule)


PAIRS = [
    (one, other)
    for one, other in combinations(BROKEN.values(), 2)
    if not set(one[0]) & set(other[0])
]


def test_all_that_forbids_it_is_told_in_order() -> None:
    order = list(OverlapRule)
    for (one, first), (other, second) in PAIRS:
        found = overlap_obstacles(replace(FACTS, **one, **other))
        assert first | second <= set(found) | {R.MATCHED, R.REQUESTS}
        assert list(found) == sorted(found, key=order.index)
