"""The order of a plan: derived from what nodes touch or given by after=, and only as needed."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.kernels import ONE_BLOCK, axpy, fill_value, scale
from helpers.plans import closure, conflict, plans, set_condition
from hypothesis import given, settings

from graphcore import ConfigurationError, GraphPlan, PlanError
from graphcore.plan.shared_bytes import Region


def test_kernels_on_one_buffer_come_one_after_the_other() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    for _ in range(3):
        plan.launch(scale, ONE_BLOCK, x, 2.0, 8)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (0,), (1,)]


def test_readers_run_beside_each_other_between_two_writers() -> None:
    plan = GraphPlan()
    x, y, z = (plan.buffer(name, (8,)) for name in "xyz")
    plan.launch(fill_value, ONE_BLOCK, x, 1.0, 8)
    plan.launch(axpy, ONE_BLOCK, 1.0, x, y, 8)
    plan.launch(axpy, ONE_BLOCK, 1.0, x, z, 8)
    plan.launch(fill_value, ONE_BLOCK, x, 2.0, 8)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (0,), (0,), (1, 2)]


def test_interleaved_columns_are_no_conflict_and_crossing_rows_are() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4, 4))
    plan.memset(x[:, 0], 1.0)
    plan.memset(x[:, 1], 1.0)
    plan.memset(x[2, 1:], 1.0)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (), (1,)]


def test_the_bytes_count_not_the_element_type() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,), "float32")
    plan.memset(x[:2].view("uint8")[7:], 1)
    plan.memset(x[0], 1.0)
    plan.memset(x[1], 1.0)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (), (0,)]


@given(plans())
@settings(max_examples=100, deadline=None)
def test_the_derived_order_has_no_race_and_only_needed_edges(plan: GraphPlan) -> None:
    before = closure(plan)
    for second in plan.nodes:
        direct = plan.after_of(second)
        for first in plan.nodes[: second.index]:
            if conflict(first, second):
                assert first.index in before[second.index]
            if first.index in direct:
                assert conflict(first, second)
                assert not any(first.index in before[other] for other in direct)
    assert plan.validate() == []


@given(plans(most=5))
@settings(max_examples=50, deadline=None)
def test_the_same_plan_has_the_same_order(plan: GraphPlan) -> None:
    again = GraphPlan.from_json(plan.to_json(), kernels=[n.work.kernel for n in plan.nodes])
    assert [plan.after_of(i) for i in range(len(plan))] == [
        again.after_of(i) for i in range(len(plan))
    ]


# ---- after= ---------------------------------------------------------------------------------


def three_fills(**after: object) -> GraphPlan:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    for name in "abc":
        plan.memset(x, 1.0, name=name, after=after.get(name))
    return plan


def test_after_replaces_derivation_for_that_node_only() -> None:
    plan = three_fills(b=())
    assert [plan.after_of(name) for name in "abc"] == [(), (), (0, 1)]


def test_after_takes_nodes_names_positions_and_sequences_of_them() -> None:
    plan = three_fills()
    node = plan.join(after=[plan.nodes[0], ("b", [2])])
    assert node.after == (0, 1, 2)
    assert plan.after_of(node) == (2,), "what another one implies is left out"
    assert plan.join(after="a").after == (0,)


def test_after_may_name_a_later_node() -> None:
    plan = three_fills(a=["b"], b=())
    assert [plan.after_of(name) for name in "abc"] == [(1,), (), (0,)]
    assert plan.validate() == []


@pytest.mark.parametrize("after", [3, -1, True, 1.5, object()])
def test_an_after_that_is_no_node_is_refused_and_adds_nothing(after: object) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    with pytest.raises(ConfigurationError, match=r"after: expected nodes|has no node"):
        plan.memset(x, 1.0, after=after)
    assert plan.nodes == ()


def test_a_node_of_another_plan_or_body_is_refused() -> None:
    other = three_fills()
    plan = three_fills()
    with pytest.raises(PlanError, match="'b' belongs to another plan"):
        plan.join(after=other.nodes[1])
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_then(more) as body, pytest.raises(PlanError, match="belongs to another plan"):
        body.join(after=plan.nodes[0])


def test_a_position_is_that_of_the_nodes_own_plan() -> None:
    plan = three_fills()
    with pytest.raises(PlanError, match="has no node 'zzz'"):
        plan.after_of("zzz")
    assert plan.index_of("c") == 2


# ---- what is not memory ---------------------------------------------------------------------


def test_a_record_comes_after_all_before_it_and_a_wait_before_all_after_it() -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (8,)), plan.buffer("y", (8,))
    done = plan.event("done")
    plan.memset(x, 0)
    plan.memset(y, 0)
    plan.record(done)
    plan.memset(x, 1.0)
    plan.wait(done)
    plan.memset(y, 1.0)
    plan.memset(x, 2.0)
    orders = [plan.after_of(node) for node in plan.nodes]
    assert orders == [(), (), (0, 1), (0,), (2,), (4,), (3, 4)]
    assert plan.validate() == []


def test_a_join_gathers_what_comes_before_unless_told() -> None:
    plan = GraphPlan()
    x, y, z = (plan.buffer(name, (8,)) for name in "xyz")
    plan.memset(x, 0)
    plan.memset(y, 0)
    plan.join()
    plan.memset(z, 0)
    plan.join(after=[3])
    plan.memset(plan.buffer("w", (8,)), 0)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (), (0, 1), (2,), (3,), (2,)]


def test_callbacks_keep_their_order_and_unknown_ones_hold_everything() -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (8,)), plan.buffer("y", (8,))
    plan.memset(x, 0)
    plan.memset(y, 0)
    plan.callback(print, reads=[x])
    plan.callback(print, reads=[y])
    plan.callback(print)
    plan.memset(x, 0)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (), (0,), (1, 2), (3,), (4,)]


def test_a_call_touches_its_views_or_what_is_said_or_anything() -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (8,)), plan.buffer("y", (8,))
    plan.memset(x, 0)
    plan.memset(y, 0)
    views = plan.call(print, x, 3)
    said = plan.call(print, x, y, reads=[], writes=[y])
    unknown = plan.call(print)
    assert [plan.after_of(node) for node in (views, said, unknown)] == [(0,), (1,), (2, 3)]
    assert plan.after_of(plan.memset(plan.buffer("z", (1,)), 0)) == (unknown.index,)


def test_allocation_use_and_end_come_in_this_order() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (8,))
    tmp = plan.allocate("tmp", (8,))
    plan.memcpy(tmp, x)
    plan.memcpy(x, tmp)
    plan.deallocate(tmp)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (0,), (1,), (2,)]
    assert plan.validate() == []


def test_what_sets_a_condition_comes_before_the_node_it_decides() -> None:
    plan = GraphPlan()
    y = plan.buffer("y", (8,))
    more = plan.condition("more")
    plan.memset(y, 0)
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.while_loop(more) as body:
        body.launch(scale, ONE_BLOCK, y, 2.0, 8)
        body.launch(set_condition, ONE_BLOCK, more, 1)
        body.launch(set_condition, ONE_BLOCK, more, 0)
    plan.launch(scale, ONE_BLOCK, y, 2.0, 8)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (), (0, 1), (2,)]
    loop = plan.nodes[2].work.bodies[0]
    assert [loop.after_of(node) for node in loop.nodes] == [(), (), (1,)]
    assert plan.validate() == []


def test_embedded_plans_are_ordered_by_what_their_bindings_touch() -> None:
    inner = GraphPlan("inner")
    a, b = inner.buffer("a", (4,)), inner.buffer("b", (4,))
    inner.memcpy(b[:2], a[:2])
    plan = GraphPlan()
    x, y = plan.buffer("x", (8,)), plan.buffer("y", (8,))
    plan.embed(inner, {"a": x[:4], "b": y[:4]})
    plan.embed(inner, {"a": x[:4], "b": y[4:]})
    plan.memset(y[2:4], 0)  # inside the first binding, and never touched by it
    plan.memset(y[1], 0)
    plan.memset(x[4:], 0)
    assert [plan.after_of(node) for node in plan.nodes] == [(), (), (), (0,), ()]


def test_a_change_of_an_embedded_plan_or_body_changes_the_order() -> None:
    inner = GraphPlan("inner")
    a = inner.buffer("a", (4,))
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    plan.memset(x, 0)
    node = plan.embed(inner, {"a": x})
    assert plan.after_of(node) == ()
    inner.memset(a, 1.0)
    assert plan.after_of(node) == (0,)


def test_few_views_are_compared_in_a_long_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Region] = []
    meets = Region.meets

    def noting(self: Region, other: Region) -> bool:
        compared.append(self)
        return meets(self, other)

    monkeypatch.setattr(Region, "meets", noting)
    plan = GraphPlan()
    cache = plan.buffer("cache", (64, 128))
    hidden = plan.buffer("hidden", (128,))
    for step in range(200):
        plan.memcpy(cache[step % 64], hidden)
        plan.launch(axpy, ONE_BLOCK, 1.0, cache, hidden, 128)
    assert plan.validate() == []
    assert 0 < len(compared) < 8 * len(plan)


def test_an_after_that_holds_itself_is_refused() -> None:
    plan = GraphPlan()
    first = plan.join()
    after: list[Any] = [first]
    after.append([after])
    with pytest.raises(ConfigurationError, match="got one that holds itself"):
        plan.join(after=after)
    twice = [first]
    assert plan.after_of(plan.join(after=[twice, twice])) == (0,)
    assert len(plan) == 2
