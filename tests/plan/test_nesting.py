"""Plans and bodies in each other: how deep, and what one costs that stands in many places."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from helpers.contract import Bench
from helpers.kernels import EVERY_KERNEL, ONE_BLOCK, add_one, set_value
from helpers.plan_sites import WAYS, Site

from graphcore import ConfigurationError, GraphPlan, PlanError
from graphcore.driver.emulated import EmulatedDriver

MOST = 64


def nested_bodies(site: Site, levels: int) -> None:
    """An addition in ``levels`` conditional nodes."""
    x = site.put("x", [0.0] * 4)
    with ExitStack() as blocks:
        body = site.plan
        for _ in range(levels):
            chosen = body.condition(f"chosen {len(body.conditions)}")
            body.launch(set_value, ONE_BLOCK, chosen, 1)
            body = blocks.enter_context(body.if_then(chosen))
        body.launch(add_one, ONE_BLOCK, x, 4)


def nested_plans(levels: int, times: int = 1) -> GraphPlan:
    """An addition in a plan that is embedded ``times`` times, and so on."""
    plan = GraphPlan("innermost")
    plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (4,)), 4)
    for _ in range(levels):
        inner, plan = plan, GraphPlan(f"around {plan.name}"[:20])
        x = plan.buffer("x", (4,))
        for _ in range(times):
            plan.embed(inner, {"x": x})
    return plan


@pytest.mark.parametrize("way", WAYS)
def test_bodies_nest_as_deep_as_a_plan_allows(way: str) -> None:
    site = Site(Bench(EmulatedDriver()))
    nested_bodies(site, MOST)
    site.do(way)
    assert site.read("x") == [1.0] * 4


@pytest.mark.parametrize("way", WAYS)
def test_plans_nest_as_deep_as_a_plan_allows(way: str) -> None:
    site = Site(Bench(EmulatedDriver()))
    x = site.put("x", [0.0] * 4)
    site.plan.embed(nested_plans(MOST - 1), {"x": x})
    site.do(way)
    assert site.read("x") == [1.0] * 4


def test_what_is_nested_deeper_is_refused_where_it_is_written() -> None:
    said = "expected at most 64 levels of bodies and embedded plans inside of each other, got 65"
    with pytest.raises(PlanError, match=said):
        nested_plans(MOST + 1)
    plan, inner = GraphPlan(), nested_plans(MOST - 1)
    x = plan.buffer("x", (4,))
    plan.embed(inner, {"x": x})
    with pytest.raises(PlanError, match=said), plan.if_then(plan.condition("c")) as body:
        body.embed(inner, {"x": x})
    assert len(plan) == 1


def test_a_saved_plan_that_is_nested_deeper_is_refused() -> None:
    data = json.loads(nested_plans(MOST).to_json())
    data["plans"].append({**data["plans"][-1], "name": "one more"})
    data["plans"][-1]["nodes"] = [{**data["plans"][-1]["nodes"][0], "plan": data["plan"]}]
    data["plan"] += 1
    with pytest.raises(ConfigurationError, match="at most 64 levels"):
        GraphPlan.from_json(json.dumps(data), kernels=EVERY_KERNEL)


def test_a_plan_that_stands_in_a_great_many_places_is_looked_at_once() -> None:
    """2 ** 40 places: each is seen through its bindings, none is walked."""
    plan = nested_plans(40, times=2)
    assert plan.validate() == []
    assert plan.after_of(1) == (0,)
    again = GraphPlan.from_json(plan.to_json(), kernels=EVERY_KERNEL)
    assert again.validate() == []


def test_what_comes_into_an_embedded_plan_later_is_seen_by_those_around_it() -> None:
    inner, middle, outer = GraphPlan("inner"), GraphPlan("middle"), GraphPlan("outer")
    parts = [inner.buffer(name, (4,)) for name in "ab"]
    inner.launch(add_one, ONE_BLOCK, parts[0], 4)
    middle.embed(inner, {name: middle.buffer(name, (4,)) for name in "ab"})
    x, y = outer.buffer("x", (4,)), outer.buffer("y", (4,))
    outer.launch(add_one, ONE_BLOCK, y, 4)
    node = outer.embed(middle, {"a": x, "b": y})
    assert outer.after_of(node) == ()
    inner.launch(add_one, ONE_BLOCK, parts[1], 4)
    assert outer.after_of(node) == (0,)


def test_what_is_embedded_may_not_grow_deeper_than_those_around_it_allow() -> None:
    said = "expected at most 64 levels of bodies and embedded plans inside of each other, got 65"
    inner = nested_plans(0)
    middle, outer = GraphPlan("middle"), GraphPlan("outer")
    middle.embed(inner, {"x": middle.buffer("x", (4,))})
    outer.embed(middle, {"x": outer.buffer("x", (4,))})
    deep = nested_plans(MOST - 2)
    with pytest.raises(PlanError, match=said):
        inner.embed(deep, {"x": inner.buffers["x"]})
    assert len(inner) == 1
    fitting = nested_plans(MOST - 3)
    inner.embed(fitting, {"x": inner.buffers["x"]})
    with pytest.raises(PlanError, match=said):
        GraphPlan("around").embed(outer, {"x": outer.buffers["x"]})
    del outer
    middle.embed(nested_plans(MOST - 1), {"x": middle.buffers["x"]})
    assert middle.validate() == []
