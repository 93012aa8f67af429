"""moe_grouped_gemm in captures: replayed on other tables and data, without any update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import pytest
from graphcore_kernels import Fault, GemmFault, moe_grouped_gemm
from helpers.gemm_problems import Case, Placed, Problem, encode, placed, poison

import graphcore
from graphcore.driver.records import KernelParams, NodeKind

CASE = Case((4, 0, 9, 3), choices=2, has_gather=True, has_scale=True, columns=80, slack=4)


@contextmanager
def captured(driver, stream, plan):
    """An executable with the plan's launches, and its graph."""
    driver.begin_capture(stream.handle, "thread_local")
    try:
        plan.launch(stream)
    finally:
        graph = driver.end_capture(stream.handle)
    made = driver.instantiate(graph)
    try:
        yield made, graph
    finally:
        driver.destroy_exec(made)
        driver.destroy_graph(graph)


def replay(driver, stream, made, operands) -> None:
    out = operands.problem.arrays["out"]
    operands.change("out", poison(out.shape, operands.problem.case.dtype))
    driver.launch_graph(made, stream.handle)
    stream.synchronize()


FORMS = ["direct", "flow", "tile64", "tile128", "warpgroup64", "warpgroup256"]


@pytest.mark.parametrize("form", FORMS)
def test_one_executable_follows_counts_slots_and_data(graphcore_driver, form):
    driver = graphcore_driver
    if form.startswith("warpgroup") and driver.device_info().capability != (9, 0):
        pytest.skip("a device of another capability than (9, 0)")
    with (
        placed(driver, CASE) as operands,
        driver.stream() as stream,
        captured(driver, stream, operands.plan(form=form)) as (made, _),
    ):
        replay(driver, stream, made, operands)
        operands.check()
        seen = {operands.read("out").tobytes()}
        for seed, counts in enumerate([(0, 0, 20, 0), (1, 1, 1, 1), (0, 0, 0, 0), (5, 6, 0, 9)]):
            other = Problem(CASE, seed + 10)
            for name in ("x", "weights", "slots", "gather", "scale", "scatter"):
                operands.change(name, other.arrays[name])
            operands.change("offsets", numpy.cumsum([0, *counts], dtype=numpy.int32))
            replay(driver, stream, made, operands)
            operands.check()
            seen.add(operands.read("out").tobytes())
        assert len(seen) == 5


PLAIN = Case((40, 0, 70, 9), columns=300, depth=200, slack=4)


@pytest.mark.parametrize(
    "forms", [("warpgroup64", "warpgroup256"), ("warpgroup256", "warpgroup64")]
)
def test_an_executable_follows_graphs_with_and_without_clusters(graphcore_driver, forms):
    """The driver takes another cluster size and keeps the old one: is it told of these?"""
    driver = graphcore_driver
    if driver.device_info().capability != (9, 0):
        pytest.skip("a device of another capability than (9, 0)")
    with placed(driver, PLAIN) as operands, driver.stream() as stream:
        graphs = []
        for form in forms:
            plan = operands.plan(form=form)
            with graphcore.capture(driver=driver) as capture:
                plan.launch()
            graphs.append(capture.graph)
        made = graphs[0].instantiate()
        for graph in (*graphs, graphs[0]):
            assert made.update(graph).is_current
            operands.change("out", poison(operands.problem.arrays["out"].shape, PLAIN.dtype))
            made.launch(stream)
            stream.synchronize()
            operands.check()
        made.close()
        for graph in graphs:
            graph.close()


def test_an_expert_moves_by_one_table_write(graphcore_driver):
    driver = graphcore_driver
    with (
        placed(driver, CASE) as operands,
        driver.stream() as stream,
        captured(driver, stream, operands.plan()) as (made, _),
    ):
        replay(driver, stream, made, operands)
        before = operands.read("out").tobytes()
        move(operands, 2)
        replay(driver, stream, made, operands)
        assert operands.read("out").tobytes() == before


def routings(count: int) -> Iterator[numpy.ndarray]:
    """Offsets [5] of 4 experts over 16 rows: uniform, skewed, with empty ones, all to one."""
    random = numpy.random.default_rng(5)
    for number in range(count):
        shares = random.dirichlet([(1.0, 0.3, 0.05, 10.0)[number % 4]] * 4)
        counts = random.multinomial(16, shares)
        yield numpy.cumsum([0, *counts], dtype=numpy.int32)


def move(operands: Placed, expert: int) -> None:
    """Another slot for the expert: its weights go there, NaN stays where they were."""
    arrays = operands.problem.arrays
    slots, weights = arrays["slots"].copy(), arrays["weights"].copy()
    free = min(set(range(len(weights))) - set(slots.tolist()))
    weights[free] = weights[slots[expert]]
    weights[slots[expert]] = encode(numpy.full(weights.shape[1:], numpy.nan), CASE.dtype)
    slots[expert] = free
    operands.change("weights", weights)
    operands.change("slots", slots)


def test_one_graph_follows_200_routings_and_50_moves_as_fresh_captures_do(graphcore_driver):
    driver = graphcore_driver
    seen, moved = set(), set()
    with (
        placed(driver, CASE) as operands,
        driver.stream() as stream,
        captured(driver, stream, operands.plan()) as (made, graph),
    ):
        nodes = [driver.node_params(node) for node in driver.nodes(graph)]
        for number, offsets in enumerate(routings(200)):
            operands.change("offsets", offsets)
            if number % 4 == 3:
                move(operands, number // 4 % 4)
                moved.add(tuple(operands.problem.arrays["slots"].tolist()))
            replay(driver, stream, made, operands)
            operands.check()
            out = operands.read("out").tobytes()
            seen.add(out)
            with captured(driver, stream, operands.plan()) as (fresh, again):
                replay(driver, stream, fresh, operands)
                assert operands.read("out").tobytes() == out
                # nothing of the routing or of the slots is in a graph: there is nothing to update
                assert [driver.node_params(node) for node in driver.nodes(again)] == nodes
    assert len(seen) == len({offsets.tobytes() for offsets in routings(200)}) > 100
    assert len(moved) > 20


def test_a_replay_with_bad_tables_says_so_and_the_next_is_right(graphcore_driver):
    driver = graphcore_driver
    with placed(driver, CASE) as operands, driver.stream() as stream:
        plan = operands.plan()
        with captured(driver, stream, plan) as (made, _):
            good = operands.problem.arrays["offsets"].copy()
            operands.change("offsets", good + numpy.array([0, 0, 0, 9, 0], numpy.int32))
            replay(driver, stream, made, operands)
            assert plan.read_fault() == GemmFault(Fault.BAD_OFFSETS, 3)
            assert not operands.read("out").any()
            operands.change("offsets", good)
            operands.change("error", numpy.zeros(1, numpy.int32))
            replay(driver, stream, made, operands)
            operands.check()


def test_a_product_is_one_node_and_combining_another(graphcore_driver):
    driver = graphcore_driver
    for case, count in ((Case((3, 4)), 1), (CASE, 2)):
        with placed(driver, case) as operands, driver.stream() as stream:
            plan = operands.plan()
            with captured(driver, stream, plan) as (_, graph):
                nodes = driver.nodes(graph)
                assert [driver.node_kind(node) for node in nodes] == [NodeKind.KERNEL] * count
                params = driver.node_params(nodes[0])
                assert isinstance(params, KernelParams)
                assert params.config == plan.launches[0].config


def test_the_graph_keeps_the_operands(graphcore_driver):
    driver = graphcore_driver
    with placed(driver, CASE) as operands:
        plan = operands.plan()
        with graphcore.capture(driver=driver) as capture:
            plan.launch()
        with capture.graph as graph:
            labels = set(graph.owners.labels())
            assert {f"moe_grouped_gemm {name}" for name in plan.operands} <= labels
            with graph.instantiate() as made, driver.stream() as stream:
                made.launch(stream)
                stream.synchronize()
                operands.check()


def test_torch_tensors_are_multiplied_in_a_capture_among_torchs_own_work():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.randn(6, 16, dtype=torch.bfloat16)
    weights = torch.randn(3, 8, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    out = torch.full((6, 8), torch.nan, dtype=torch.bfloat16)
    error = torch.zeros(1, dtype=torch.int32)
    with graphcore.capture(driver=graphcore.open_driver("emulated")) as capture:
        moe_grouped_gemm(x, weights, offsets, slots, out, error=error)
        doubled = out * 2
    with capture.graph as graph, graph.instantiate() as made:
        assert out.isnan().all()
        for first in (2, 5):
            offsets[1] = first
            out.fill_(torch.nan)
            made.launch()
            wide = weights.double()
            expected = torch.cat([x[:first].double() @ wide[2].T, x[first:].double() @ wide[0].T])
            assert torch.allclose(out.double(), expected, rtol=1e-2, atol=5e-2)
            assert torch.equal(doubled, out * 2)
            assert error.item() == 0


def test_a_graph_plan_has_it_as_a_call_on_its_own_buffers():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = {
        "x": torch.randn(6, 16),
        "weights": torch.randn(3, 8, 16),
        "offsets": torch.tensor([0, 2, 6], dtype=torch.int32),
        "slots": torch.tensor([2, 0], dtype=torch.int32),
        "routes": torch.tensor([4, 0, 1, 3, 2, 5], dtype=torch.int32),
        "out": torch.full((3, 8), torch.nan),
        "workspace": torch.empty(moe_grouped_gemm.workspace_bytes(6, 8), dtype=torch.uint8),
        "error": torch.zeros(1, dtype=torch.int32),
    }
    plan = graphcore.GraphPlan("experts")
    names = {torch.float32: "float32", torch.int32: "int32", torch.uint8: "uint8"}
    buffers = {
        name: plan.buffer(name, tuple(tensor.shape), names[tensor.dtype])
        for name, tensor in tensors.items()
    }

    def multiply(x, weights, offsets, slots, routes, out, workspace, error):
        moe_grouped_gemm(
            x, weights, offsets, slots, out, scatter=routes, workspace=workspace, error=error
        )

    written = [buffers[name] for name in ("out", "workspace", "error")]
    plan.call(
        multiply, *buffers.values(), reads=list(buffers.values()), writes=written, name="experts"
    )
    plan.memset(buffers["workspace"], 0xFF, name="poison")
    assert plan.after_of(1) == (0,)
    driver = graphcore.open_driver("emulated")
    with plan.capture(tensors, driver=driver) as graph, graph.instantiate() as made:
        assert graph.snapshot().summary()["kernel"] == 2
        for first in (2, 5):
            tensors["offsets"][1] = first
            made.launch()
            products = torch.empty(6, 8)
            x, weights, routes = tensors["x"], tensors["weights"], tensors["routes"].long()
            products[routes[:first]] = x[:first] @ weights[2].T
            products[routes[first:]] = x[first:] @ weights[0].T
            assert torch.allclose(tensors["out"], products.view(3, 2, 8).sum(1), atol=1e-4)
