"""Touches by range: what is held against what, and that no more is than has to be."""

from __future__ import annotations

import pytest
from helpers.kernels import ONE_BLOCK, axpy
from helpers.plans import views_of
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore import GraphPlan
from graphcore.plan.accesses import Access
from graphcore.plan.records import View
from graphcore.plan.shared_bytes import Region
from graphcore.plan.touches import Touch, Touches

X = GraphPlan().buffer("x", (4, 6), "int32")
ACCESSES = st.builds(Access, st.just(X), views_of(X) | st.just(X[:0]), st.booleans())


@given(st.lists(ACCESSES, max_size=12), ACCESSES)
@settings(max_examples=200, deadline=None)
def test_every_conflict_is_near_and_what_is_near_overlaps(
    accesses: list[Access], access: Access
) -> None:
    known = Touches()
    earlier = [Touch(index // 2, each) for index, each in enumerate(accesses)]
    for touch in earlier:
        known.add(touch)
    mine = Touch(99, access)
    near = known.near(mine)
    assert {touch.index for touch in earlier if mine.conflicts(touch)} <= near
    assert mine.region is not None
    for index in near:
        regions = [touch.region for touch in known.of(index)]
        assert any(
            region is not None and region.low < mine.region.high and mine.region.low < region.high
            for region in regions
        )


@given(st.lists(ACCESSES, max_size=8), ACCESSES, ACCESSES)
@settings(max_examples=300, deadline=None)
def test_what_a_write_hides_conflicts_with_nothing_that_the_write_does_not(
    accesses: list[Access], write: Access, later: Access
) -> None:
    known = Touches()
    earlier = [Touch(index // 2, each) for index, each in enumerate(accesses)]
    for touch in earlier:
        known.add(touch)
    hiding = Touch(50, Access(X, write.view, writes=True))
    known.forget_behind(hiding)
    mine = Touch(99, later)
    for touch in earlier:
        if not known.of(touch.index) and mine.conflicts(touch):
            assert mine.conflicts(hiding)
    assert known.near(mine) <= {touch.index for touch in earlier if known.of(touch.index)}


def rows(count: int) -> GraphPlan:
    plan = GraphPlan()
    x, y = plan.buffer("x", (count, 8)), plan.buffer("y", (count, 8))
    for row in range(count):
        plan.launch(axpy, ONE_BLOCK, 1.0, x[row, ::2], y[row, ::2], 4)
    return plan


def layers(count: int) -> GraphPlan:
    plan = GraphPlan()
    sides = plan.buffer("a", (8, 8)), plan.buffer("b", (8, 8))
    for layer in range(count // 8):
        source, target = sides[layer % 2], sides[1 - layer % 2]
        for row in range(8):
            plan.launch(axpy, ONE_BLOCK, 1.0, source[row], target[(row + layer) % 8], 8)
    return plan


def readers(count: int) -> GraphPlan:
    plan = GraphPlan()
    weights, y = plan.buffer("weights", (8,)), plan.buffer("y", (count, 8))
    for row in range(count):
        plan.launch(axpy, ONE_BLOCK, 1.0, weights, y[row], 8)
    return plan


@pytest.mark.parametrize("build", [rows, layers, readers])
def test_a_plan_twice_as_long_is_compared_twice_as_often(
    build: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    meets = Region.meets

    def counting(self: Region, other: Region) -> bool:
        nonlocal compared
        compared += 1
        return meets(self, other)

    monkeypatch.setattr(Region, "meets", counting)
    counts = []
    for count in (64, 128, 256):
        compared = 0
        plan = build(count)  # type: ignore[operator]
        assert plan.validate() == []
        counts.append(compared)
    assert counts[2] <= 2 * counts[1] + 64
    assert counts[1] <= 2 * counts[0] + 64
    assert counts[2] <= 6 * 256


def test_columns_of_one_matrix_are_told_apart_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (8, 16)), plan.buffer("y", (8, 16))
    for column in range(16):
        plan.launch(axpy, ONE_BLOCK, 1.0, x[:, column], y[:, column], 8)

    def searching(*_: object) -> bool:
        raise AssertionError("searched")

    monkeypatch.setattr("graphcore.plan.shared_bytes.overlap", searching)
    assert plan.validate() == []
    assert {plan.after_of(node) for node in plan.nodes} == {()}


def test_generated_names_count_on_and_skip_those_that_are_taken() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    names = [plan.memset(x, 0).name for _ in range(3)]
    plan.memset(x, 0, name=f"{names[0]} 4")
    names.append(plan.memset(x, 0).name)
    assert names == [names[0], *(f"{names[0]} {number}" for number in (2, 3, 5))]


def test_views_of_one_buffer_are_what_they_are_held_against() -> None:
    whole: View = X.whole
    assert Touch(0, Access(X, whole, writes=True)).conflicts(
        Touch(1, Access(X, X[1], writes=False))
    )
    assert not Touch(0, Access(X, whole, writes=False)).conflicts(
        Touch(1, Access(X, X[1], writes=False))
    )
