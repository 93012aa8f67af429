"""Data races: exactly the pairs that touch a byte, one writing it, without a path between them."""

from __future__ import annotations

import numpy
import pytest
from helpers.kernels import ONE_BLOCK, axpy, fill_value, scale
from helpers.plans import bytes_of, closure, conflict, plans, rebuilt, set_condition, views_of
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore import GraphPlan, PlanProblem
from graphcore.plan import shared_bytes
from graphcore.plan.records import View
from graphcore.plan.shared_bytes import Region, share_bytes, shared_range
from graphcore.resources import overlap

X = GraphPlan().buffer("x", (4, 6), "int32")


def races(plan: GraphPlan) -> list[PlanProblem]:
    found = plan.validate()
    assert {problem.kind for problem in found} <= {"race"}
    return found


# ---- bytes ----------------------------------------------------------------------------------


@given(views_of(X), views_of(X))
@settings(max_examples=250, deadline=None)
def test_views_share_exactly_the_bytes_that_both_touch(first: View, second: View) -> None:
    both = bytes_of(first) & bytes_of(second)
    assert share_bytes(first, second) == bool(both)
    if both:
        assert shared_range(first, second) == (min(both), max(both) + 1)


@given(views_of(X))
@settings(max_examples=200, deadline=None)
def test_a_dense_region_is_touched_byte_by_byte(view: View) -> None:
    region = Region.of(view)
    touched = bytes_of(view)
    assert (region.low, region.high) == (min(touched), max(touched) + 1)
    is_gapless = region.high - region.low == len(touched) == view.size * view.itemsize
    assert region.is_dense == is_gapless


def test_a_view_of_nothing_shares_nothing() -> None:
    assert not share_bytes(X[:0], X.whole)


def test_views_too_hard_to_decide_count_as_overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = GraphPlan().buffer("x", (10_000,), "uint8")
    first = buffer.whole.as_strided((2, 4), (44, 39))
    second = buffer.whole.as_strided((3, 2), (24, 51), 4)
    assert not share_bytes(first, second), "decided exactly within the bound"
    monkeypatch.setattr(overlap, "_MOST_STEPS", 0)
    overlap.overlap.cache_clear()
    assert share_bytes(first, second)
    assert shared_range(first, second) == (4, second.extent[1])
    overlap.overlap.cache_clear()


def test_large_strided_views_are_told_by_the_range_in_which_both_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = X[:, 1], X[1:3, :]
    assert shared_range(first, second) == (28, 56)
    monkeypatch.setattr(shared_bytes, "_MOST_ELEMENTS", 2)
    assert shared_range(first, second) == (24, 72)


# ---- against brute force --------------------------------------------------------------------


def expected_races(plan: GraphPlan) -> dict[tuple[str, str], set[tuple[str, int, int]]]:
    before = closure(plan)
    found: dict[tuple[str, str], set[tuple[str, int, int]]] = {}
    for second in plan.nodes:
        for first in plan.nodes[: second.index]:
            if first.index in before[second.index]:
                continue
            for buffer in plan.buffers.values():
                both = conflict(first, second, buffer)
                if both:
                    entry = (buffer.name, min(both), max(both) + 1)
                    found.setdefault((first.name, second.name), set()).add(entry)
    return found


def told(problems: list[PlanProblem]) -> dict[tuple[str, str], set[tuple[str, int, int]]]:
    found: dict[tuple[str, str], set[tuple[str, int, int]]] = {}
    for problem in problems:
        first, second = problem.nodes
        assert problem.byte_range is not None
        found.setdefault((first, second), set()).add(problem.byte_range)
    return found


@given(plans(), st.data())
@settings(max_examples=80, deadline=None)
def test_every_race_is_told_with_its_bytes_and_no_other(
    plan: GraphPlan, data: st.DataObject
) -> None:
    after = {
        node.index: tuple(data.draw(st.sets(st.integers(0, node.index - 1), max_size=2)))
        for node in plan.nodes
        if node.index and data.draw(st.booleans())
    }
    given_order = rebuilt(plan, after)
    assert told(races(given_order)) == expected_races(given_order)


@given(plans(), st.data())
@settings(max_examples=80, deadline=None)
def test_without_any_one_derived_edge_its_two_nodes_race(
    plan: GraphPlan, data: st.DataObject
) -> None:
    edges = [(source, node.index) for node in plan.nodes for source in plan.after_of(node)]
    if not edges:
        return
    source, target = data.draw(st.sampled_from(edges))
    every = {node.index: plan.after_of(node) for node in plan.nodes}
    assert races(rebuilt(plan, every)) == []
    every[target] = tuple(index for index in every[target] if index != source)
    broken = rebuilt(plan, every)
    found = told(races(broken))
    assert (broken.nodes[source].name, broken.nodes[target].name) in found
    assert found == expected_races(broken), "and only pairs that this edge kept apart"


# ---- what is reported -----------------------------------------------------------------------


def test_a_race_names_both_nodes_what_they_do_the_buffer_and_the_bytes() -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (8, 8)), plan.buffer("y", (64,))
    plan.memset(x[:, 2], 1.0, name="column")
    plan.launch(axpy, ONE_BLOCK, 2.0, x[3], y, 8, after=(), name="row")
    (race,) = races(plan)
    assert race.kind == "race"
    assert race.nodes == ("column", "row")
    assert race.byte_range == ("x", 104, 108)
    assert "'column' writes and 'row' reads bytes 104 to 107 of buffer 'x'" in race.message


def test_two_readers_do_not_race() -> None:
    plan = GraphPlan()
    x, y, z = (plan.buffer(name, (8,)) for name in "xyz")
    plan.launch(axpy, ONE_BLOCK, 2.0, x, y, 8)
    plan.launch(axpy, ONE_BLOCK, 2.0, x, z, 8, after=())
    assert races(plan) == []


def test_a_path_through_other_nodes_is_an_order() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    first = plan.memset(x, 1.0)
    middle = plan.join(after=first)
    plan.memset(x, 2.0, after=middle)
    assert races(plan) == []


def test_what_a_body_touches_races_as_its_conditional_node() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_then(more, name="choice") as body:
        body.memset(x[4:], 1.0, name="fill")
    plan.memset(x[:6], 0.0, after=(), name="clear")
    (race,) = races(plan)
    assert race.nodes == ("choice", "clear")
    assert race.byte_range == ("x", 16, 24)
    assert "'choice' (in 'choice/body 0/fill') writes" in race.message


def test_nodes_of_a_body_race_with_each_other_by_their_paths() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_else(more, name="choice") as (then, other):
        then.memset(x, 1.0, name="a")
        then.memset(x, 2.0, name="b", after=())
        other.memset(x, 3.0, name="c")
    (race,) = races(plan)
    assert race.nodes == ("choice/body 0/a", "choice/body 0/b"), "the two bodies never run both"


def embedded(*, after: tuple[int, ...] | None = None) -> GraphPlan:
    inner = GraphPlan("inner")
    a, b = inner.buffer("a", (4,)), inner.buffer("b", (4,))
    inner.launch(scale, ONE_BLOCK, a[:2], 2.0, 2, name="left")
    inner.launch(scale, ONE_BLOCK, b, 2.0, 4, name="right", after=after)
    return inner


def test_embedded_plans_race_by_the_memory_of_their_bindings() -> None:
    plan = GraphPlan()
    x, y, z = (plan.buffer(name, (4,)) for name in "xyz")
    plan.embed(embedded(), {"a": x, "b": y}, name="one")
    plan.embed(embedded(), {"a": x, "b": z}, name="two", after=())
    (race,) = races(plan)
    assert race.nodes == ("one", "two")
    assert race.byte_range == ("x", 0, 8), "of a only its first half is touched"


def test_two_bindings_over_the_same_bytes_race_inside_the_embedded_plan() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    plan.embed(embedded(), {"a": x[:4], "b": x[4:]}, name="apart")
    plan.embed(embedded(), {"a": x[:4], "b": x[1:5]}, name="over")
    plan.embed(embedded(after=(0,)), {"a": x[:4], "b": x[1:5]}, name="ordered")
    (race,) = races(plan)
    assert race.nodes == ("over/left", "over/right")
    assert race.byte_range == ("x", 4, 8)
    assert "bindings 'a' and 'b' share this memory" in race.message


def test_bindings_that_meet_two_plans_further_out_race_there() -> None:
    middle = GraphPlan("middle")
    p, q = middle.buffer("p", (4,)), middle.buffer("q", (4,))
    middle.embed(embedded(), {"a": p, "b": q}, name="deep")
    middle.embed(embedded(), {"a": p, "b": p}, name="own")
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    plan.embed(middle, {"p": x[:4], "q": x[4:]}, name="apart")
    plan.embed(middle, {"p": x[:4], "q": x[1:5]}, name="over")
    found = races(plan)
    assert [(race.nodes, race.byte_range) for race in found] == [
        (("over/deep/left", "over/deep/right"), ("x", 4, 8)),
        (("apart/own/left", "apart/own/right"), ("p", 0, 8)),  # whatever is bound to p
    ]


def test_a_race_inside_an_embedded_plan_is_told_once_however_often_it_is_embedded() -> None:
    inner = GraphPlan("inner")
    a = inner.buffer("a", (4,))
    inner.memset(a, 1.0, name="one")
    inner.memset(a[1:], 2.0, name="two", after=())
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    plan.embed(inner, {"a": x[:4]}, name="first")
    plan.embed(inner, {"a": x[4:]}, name="second")
    (race,) = races(plan)
    assert race.nodes == ("first/one", "first/two")
    assert race.byte_range == ("a", 4, 16)


def test_setting_a_condition_in_no_order_is_told() -> None:
    plan = GraphPlan()
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1, name="one")
    plan.launch(set_condition, ONE_BLOCK, more, 0, name="two", after=())
    with plan.if_then(more, after=["two"]):
        pass
    found = plan.validate()
    assert {problem.kind for problem in found} == {"condition"}
    assert [problem.nodes for problem in found] == [("one", "two"), ("one", "if more")]
    assert "'one' sets and 'if more' is decided by it" in found[1].message


def test_nodes_that_wait_for_each_other_do_not_hide_other_races() -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (8,)), plan.buffer("y", (8,))
    plan.memset(y, 0, name="a", after="b")
    plan.memset(y, 0, name="b", after="a")
    plan.memset(x, 0, name="c")
    plan.memset(x, 0, name="d", after=())
    assert [(p.kind, p.nodes) for p in plan.validate()] == [
        ("cycle", ("b", "a")),
        ("race", ("c", "d")),
    ]


def test_a_race_shows_as_a_wrong_result_in_some_order() -> None:
    """The order that program order hides, taken by hand: the second node first."""
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    plan.launch(fill_value, ONE_BLOCK, x, 1.0, 4)
    plan.launch(scale, ONE_BLOCK, x, 3.0, 4, after=())
    (race,) = races(plan)
    results = []
    for sequence in ((0, 1), (1, 0)):
        memory = numpy.zeros(4, numpy.float32)
        for index in sequence:
            work = plan.nodes[index].work
            arguments = (memory.ctypes.data, *work.arguments[1:])
            work.kernel.run_reference(work.config, work.kernel.pack(*arguments))
        results.append(memory[0])
    assert results == [3.0, 1.0]
    assert race.byte_range == ("x", 0, 16)
