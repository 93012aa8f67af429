"""Races by their effect: what validation reports can be seen, and nothing else goes wrong.

The emulated driver's adversarial order runs independent nodes in any order, seed by seed.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from helpers.contract import Bench
from helpers.kernels import EVERY_KERNEL, ONE_BLOCK, add_one, axpy, fill_value, scale, set_value
from helpers.plan_sites import GRAPH_WAYS, Site, do
from helpers.random_plans import PROGRAMS, Program, fresh_arrays, run_numpy, write_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphcore import GraphPlan, open_driver
from graphcore.errors import CudaError, PlanError

SEEDS = range(50)


def _site(seed: int) -> Site:
    return Site(Bench(open_driver("emulated", order="adversarial", seed=seed)))


def _write_then_read(site: Site, after: Any) -> None:
    x, y = site.put("x", [1, 1]), site.put("y", [0, 0])
    site.plan.launch(fill_value, ONE_BLOCK, x, 5.0, 2)
    site.plan.launch(axpy, ONE_BLOCK, 1.0, x, y, 2, after=after)


def _read_then_write(site: Site, after: Any) -> None:
    x, y = site.put("x", [1, 1]), site.put("y", [0, 0])
    site.plan.launch(axpy, ONE_BLOCK, 1.0, x, y, 2)
    site.plan.memset(x, 0, after=after)


def _two_writes(site: Site, after: Any) -> None:
    x = site.put("x", [0] * 4)
    site.plan.memset(x[:3], 1.0)
    site.plan.memset(x[2:], 2.0, after=after)


def _copies_that_cross(site: Site, after: Any) -> None:
    x, y = site.put("x", [[1, 2], [3, 4]]), site.put("y", [[5, 6], [7, 8]])
    site.plan.memcpy(y[:, 0], x[:, 1])
    site.plan.memcpy(x, y, after=after)


def _columns(site: Site, after: Any) -> None:
    x = site.put("x", [[1, 2, 3]] * 2)
    site.plan.launch(scale, ONE_BLOCK, x, 10.0, 6, reads=[x[:, 0]], writes=[x[:, 0]])
    site.plan.memset(x[:, 0:2], 7.0, after=after)


def _body_and_outside(site: Site, after: Any) -> None:
    x = site.put("x", [1])
    taken = site.plan.condition("taken")
    setter = site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_then(taken, after=[setter]) as body:
        body.launch(scale, ONE_BLOCK, x, 3.0, 1)
    site.plan.launch(add_one, ONE_BLOCK, x, 1, after=after)


def _inside_a_body(site: Site, after: Any) -> None:
    x = site.put("x", [1])
    taken = site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_then(taken) as body:
        body.launch(scale, ONE_BLOCK, x, 3.0, 1)
        body.launch(add_one, ONE_BLOCK, x, 1, after=after)


def _embedded(site: Site, after: Any) -> None:
    x = site.put("x", [1, 1])
    inner = GraphPlan("inner")
    inner.launch(scale, ONE_BLOCK, inner.buffer("part", (1,)), 3.0, 1)
    site.plan.embed(inner, {"part": x[1:]})
    site.plan.launch(add_one, ONE_BLOCK, x, 2, after=after)


def _callback(site: Site, after: Any) -> None:
    x = site.put("x", [1.0])
    memory = (ctypes.c_float * 1).from_address(site.buffers["x"].address)

    def triple() -> None:
        memory[0] *= 3

    site.plan.callback(triple, reads=[x], writes=[x])
    site.plan.launch(add_one, ONE_BLOCK, x, 1, after=after)


# each is a race with after=(), and none where the order is derived (after=None)
RACES: dict[str, Callable[[Site, Any], None]] = {
    "write_then_read": _write_then_read,
    "read_then_write": _read_then_write,
    "two_writes": _two_writes,
    "copies_that_cross": _copies_that_cross,
    "columns": _columns,
    "body_and_outside": _body_and_outside,
    "inside_a_body": _inside_a_body,
    "embedded": _embedded,
    "callback": _callback,
}


@pytest.mark.parametrize("name", RACES)
def test_a_reported_race_is_seen_as_a_wrong_result(name: str) -> None:
    expected = Site(Bench(open_driver("emulated")))
    RACES[name](expected, ())
    problems = expected.plan.validate()
    assert {problem.kind for problem in problems} == {"race"}
    assert len({problem.nodes for problem in problems}) == 1
    with pytest.raises(PlanError, match="race"):
        expected.graph()
    expected.do("run", check=False)  # a stream runs in program order
    for way in GRAPH_WAYS:
        assert any(_outcome(name, way, seed) != _contents(expected) for seed in SEEDS), way


def _outcome(name: str, way: str, seed: int) -> dict[str, Any]:
    site = _site(seed)
    RACES[name](site, ())
    site.do(way, check=False)
    return _contents(site)


def _contents(site: Site) -> dict[str, Any]:
    return {name: site.read(name) for name in site.buffers}


@pytest.mark.parametrize("way", GRAPH_WAYS)
@pytest.mark.parametrize("name", RACES)
def test_the_same_nodes_in_derived_order_are_right_under_every_seed(name: str, way: str) -> None:
    expected = Site(Bench(open_driver("emulated")))
    RACES[name](expected, ())
    expected.do("run", check=False)
    for seed in SEEDS:
        site = _site(seed)
        RACES[name](site, None)
        site.do(way)
        assert _contents(site) == _contents(expected), seed


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(PROGRAMS)
def test_random_plans_are_right_under_every_order_that_their_edges_allow(
    program: Program,
) -> None:
    plan, expected = write_plan(program), run_numpy(program)
    for seed in range(8):
        driver = open_driver("emulated", order="adversarial", seed=seed)
        for way in GRAPH_WAYS:
            arrays = fresh_arrays()
            do(plan, arrays, way, driver.stream())
            for name, array in expected.items():
                numpy.testing.assert_array_equal(arrays[name], array, f"{way} {seed}: {name}")


def test_a_plan_without_one_of_its_edges_is_right_or_told_as_a_race() -> None:
    """Where validation is silent, no order that is left gives another result."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(PROGRAMS, st.integers(0, 30), st.integers(0, 3))
    def check(program: Program, position: int, edge: int) -> None:
        loose = _without_an_edge(write_plan(program), position, edge)
        if loose is None:
            return
        kinds = {problem.kind for problem in loose.validate()}
        right = all(_is_right(loose, program, seed) for seed in range(8))
        outcomes[f"{'told' if kinds else 'untold'} and {'right' if right else 'wrong'}"] += 1
        assert right or kinds

    check()
    assert outcomes["told and wrong"] > 5
    assert outcomes["untold and right"] > 3


def _without_an_edge(plan: GraphPlan, position: int, edge: int) -> GraphPlan | None:
    """The plan with one node coming after one node less, through its saved form."""
    node = plan.nodes[position % len(plan.nodes)]
    after = plan.after_of(node)
    if not after:
        return None
    data = json.loads(plan.to_json())
    dropped = after[edge % len(after)]
    # what the others come after stays in force, but for the path through this edge
    data["plans"][data["plan"]]["nodes"][node.index]["after"] = [
        index for index in after if index != dropped
    ]
    return GraphPlan.from_json(json.dumps(data), kernels=EVERY_KERNEL)


def _is_right(plan: GraphPlan, program: Program, seed: int) -> bool:
    driver = open_driver("emulated", order="adversarial", seed=seed)
    arrays = fresh_arrays()
    try:
        do(plan, arrays, "build", driver.stream(), check=False)
    except (CudaError, PlanError):  # memory used before it is there
        return False
    return all((arrays[name] == array).all() for name, array in run_numpy(program).items())
