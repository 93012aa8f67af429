"""The revision of a plan: another one after every change, of what it embeds too."""

from __future__ import annotations

import pytest
from helpers.kernels import ONE_BLOCK, add_one

import graphcore
from graphcore.errors import PlanError


def plan_of(name="plan"):
    plan = graphcore.GraphPlan(name)
    x = plan.buffer("x", (4,))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    return plan


def test_a_plan_that_is_only_looked_at_keeps_its_revision():
    plan = plan_of()
    before = plan.revision
    plan.check()
    assert plan.nodes
    assert plan.revision == before


def test_every_node_that_is_added_is_another_revision():
    plan = plan_of()
    seen = {plan.revision}
    for _ in range(3):
        plan.memset(plan.buffers["x"], 0.0)
        seen.add(plan.revision)
    assert len(seen) == 4


def test_a_node_in_a_body_and_one_in_an_embedded_plan_count():
    inner, outer = plan_of("inner"), graphcore.GraphPlan("outer")
    y = outer.buffer("y", (4,))
    outer.embed(inner, {"x": y})
    first = outer.revision
    inner.memset(inner.buffers["x"], 1.0)
    second = outer.revision
    with outer.if_then(outer.condition("go")) as body:
        body.memset(y, 2.0)
        third = outer.revision
    assert len({first, second, third, outer.revision}) == 4


def test_what_is_refused_is_no_change():
    plan = plan_of()
    before = plan.revision
    with pytest.raises(PlanError):
        plan.memset(plan.buffers["x"], 0.0, after=[plan_of().nodes[0]])
    assert plan.revision == before
