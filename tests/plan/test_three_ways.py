"""One plan, three ways, the same bytes: random plans against NumPy, and plans saved and loaded."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy
import pytest
from graphcore_kernels import strided_copy
from helpers.contract import Bench
from helpers.isolated import run_script
from helpers.kernels import EVERY_KERNEL, ONE_BLOCK, add_one, scale
from helpers.plan_sites import GRAPH_WAYS, WAYS, Site, do
from helpers.random_plans import PROGRAMS, Program, fresh_arrays, run_numpy, write_plan
from hypothesis import HealthCheck, given, settings

from graphcore import Buffer, GraphPlan
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError, PlanError


def _examples(driver: Driver) -> Any:
    return settings(
        max_examples=500 if driver.is_emulated else 200,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_random_plans_do_the_same_bytes_run_captured_built_and_saved(
    graphcore_driver: Driver,
) -> None:
    stream = graphcore_driver.stream()
    buffers = {
        name: Buffer.allocate(array.shape, str(array.dtype), driver=graphcore_driver)
        for name, array in fresh_arrays().items()
    }
    seen = {"changed": 0}

    @_examples(graphcore_driver)
    @given(PROGRAMS)
    def check(program: Program) -> None:
        plan, start, expected = write_plan(program), fresh_arrays(), run_numpy(program)
        saved = GraphPlan.from_json(plan.to_json(), kernels=EVERY_KERNEL)
        seen["changed"] += any((start[name] != expected[name]).any() for name in start)
        for each, way in [*((plan, way) for way in WAYS), (saved, "build")]:
            for name, array in start.items():
                buffers[name].write(array)
            do(each, buffers, way, stream)
            for name, array in expected.items():
                assert buffers[name].read().tobytes() == array.tobytes(), (way, name)

    check()
    assert seen["changed"] > 100


def test_build_and_capture_make_graphs_of_one_shape(graphcore_driver: Driver) -> None:
    buffers = {
        name: Buffer.allocate(array.shape, str(array.dtype), driver=graphcore_driver)
        for name, array in fresh_arrays().items()
    }
    counts: list[int] = []

    @settings(_examples(graphcore_driver), max_examples=60)
    @given(PROGRAMS)
    def check(program: Program) -> None:
        plan = write_plan(program)
        options = {"copy_kernel": strided_copy}
        built, captured = (getattr(plan, way)(buffers, **options).snapshot() for way in GRAPH_WAYS)
        assert set(built.edges) == set(captured.edges)
        kinds = [[node.kind for node in graph.walk()] for graph in (built, captured)]
        assert kinds[0] == kinds[1]
        names = [[node.name for node in graph.walk()] for graph in (built, captured)]
        assert names[0] == names[1]
        counts.append(len(kinds[0]))

    check()
    assert max(counts) > 10


def test_a_saved_plan_gives_the_same_result_in_another_process() -> None:
    program = _some_program()
    plan, expected = write_plan(program), run_numpy(program)
    script = """
        import sys
        from helpers.kernels import EVERY_KERNEL
        from helpers.random_plans import fresh_arrays
        from graphcore import GraphPlan, open_driver
        from graphcore_kernels import strided_copy

        plan = GraphPlan.from_json(sys.argv[1], kernels=EVERY_KERNEL)
        for way in ("build", "capture", "run"):
            arrays = fresh_arrays()
            driver = open_driver("emulated")
            options = {"driver": driver, "copy_kernel": strided_copy}
            if way == "run":
                plan.run(arrays, **options)
            else:
                getattr(plan, way)(arrays, **options).instantiate().launch()
            print(way, *(arrays[name].tobytes().hex() for name in sorted(arrays)))
    """
    finished = run_script(textwrap.dedent(script), plan.to_json())
    assert finished.survived, finished.stderr
    contents = " ".join(expected[name].tobytes().hex() for name in sorted(expected))
    assert finished.stdout.splitlines() == [f"{way} {contents}" for way in (*GRAPH_WAYS, "run")]


def _some_program() -> Program:
    """A program of every step that changes something; the same at each call."""
    found: list[Program] = []

    @settings(max_examples=200, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(PROGRAMS)
    def look(program: Program) -> None:
        text = repr(program)
        if all(word in text for word in ("while", "if", "copy")):
            found.append(program)

    look()
    return max(found, key=lambda program: len(repr(program)))


@pytest.mark.parametrize("way", WAYS)
def test_names_in_any_order_make_a_plan_that_runs_in_the_order_they_say(
    bench: Bench, way: str
) -> None:
    site = Site(bench)
    x = site.put("x", [1, 1])
    site.plan.launch(scale, ONE_BLOCK, x, 3.0, 2, after=["first"])
    site.plan.launch(add_one, ONE_BLOCK, x, 2, after=(), name="first")
    site.do(way)
    assert site.read("x") == [6, 6]
    site.do(way, times=2)
    assert site.read("x") == [66, 66]


@pytest.mark.parametrize("way", WAYS)
def test_a_cyclic_plan_is_refused_with_its_cycle_checked_or_not(bench: Bench, way: str) -> None:
    site = Site(bench)
    x = site.put("x", [1, 1])
    site.plan.launch(scale, ONE_BLOCK, x, 3.0, 2, after=["one"], name="three")
    site.plan.launch(add_one, ONE_BLOCK, x, 2, after=["three"], name="one")
    for check in (True, False):
        with pytest.raises(PlanError, match=r"cycle.*three.*one|cycle.*one.*three"):
            site.do(way, check=check)
    assert site.read("x") == [1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_without_nodes_does_nothing(bench: Bench, way: str) -> None:
    do(GraphPlan("empty"), {}, way, bench.stream)


@pytest.mark.parametrize("size", ["narrow", "float", "wide"])
def test_a_scalar_of_another_width_is_refused_with_its_index_before_there_is_a_node(
    size: str,
) -> None:
    from helpers.kernels import set_value

    plan = GraphPlan()
    values = {"narrow": numpy.int32(1), "float": 1.0, "wide": 2**70}
    with pytest.raises(ConfigurationError, match=r"argument 0 \(handle: u64\)"):
        plan.launch(set_value, ONE_BLOCK, values[size], 1)
    assert len(plan) == 0
