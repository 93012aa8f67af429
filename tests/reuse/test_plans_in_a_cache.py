"""Graphs that are built, of plans, in a cache beside captured ones."""

from __future__ import annotations

from helpers.caching import add_up, reasons
from helpers.kernels import ONE_BLOCK, scale
from helpers.tensors import filled, replay

import graphcore
from graphcore import GraphCache
from graphcore.driver import Driver


def test_plans_that_are_built_share_the_executable_of_their_family(
    graphcore_driver: Driver,
) -> None:
    plan = graphcore.GraphPlan("scaling")
    x = plan.buffer("x", (4,), "float32")
    plan.launch(scale, ONE_BLOCK, x, 3.0, 4)
    cache = GraphCache(driver=graphcore_driver)
    tensors = {name: filled(graphcore_driver, 2.0) for name in ("one", "two")}

    def executable_for(name: str) -> graphcore.GraphExec:
        return cache.get_or_build(
            name, lambda: plan.build({"x": tensors[name]}, driver=graphcore_driver), family="scale"
        )

    first = executable_for("one")
    replay(first)
    second = executable_for("two")
    assert second is first
    replay(second)
    assert [tensor.tolist() for tensor in tensors.values()] == [[6.0] * 4] * 2
    assert "update instead of an instantiation" in reasons(cache)[-1]
    add_up(cache)
    cache.close()
