"""Adversarial order: a missing dependency shows, a present one never does."""

from __future__ import annotations

import pytest
from helpers.contract import Bench
from helpers.kernels import add_one, scale

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import Edge


def results(order: str, seed: int, *, dependent: bool, launches: int = 30) -> list[float]:
    """Results of (x + 1) * 2 from x = 0 over many launches, with or without the dependency."""
    bench = Bench(EmulatedDriver(order=order, seed=seed))  # type: ignore[arg-type]
    x = bench.put([0])
    graph = bench.new_graph()
    added = bench.add_kernel(graph, add_one, x, 1)
    bench.add_kernel(graph, scale, x, 2.0, 1, after=[added] if dependent else [])
    executable = bench.instantiate(graph)
    found = []
    for _ in range(launches):
        bench.driver.write(x, b"\0\0\0\0")
        bench.replay(executable)
        found += bench.get(x, 1)
    bench.close()
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_dependency_changes_the_result_under_adversarial_order(seed: int) -> None:
    assert set(results("adversarial", seed, dependent=False)) == {1.0, 2.0}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_present_dependency_holds_under_adversarial_order(seed: int) -> None:
    assert set(results("adversarial", seed, dependent=True)) == {2.0}


def test_program_order_hides_the_missing_dependency() -> None:
    assert set(results("program", 0, dependent=False)) == {2.0}


def test_the_same_seed_draws_the_same_orders_and_another_seed_others() -> None:
    first, again = (results("adversarial", 7, dependent=False) for _ in range(2))
    assert first == again
    assert first != results("adversarial", 8, dependent=False)


def test_adversarial_order_reaches_into_child_graphs_and_bodies() -> None:
    bench = Bench(EmulatedDriver(order="adversarial"))
    x = bench.put([0])
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, "if", default=1)
    bench.add_kernel(bodies[0], add_one, x, 1)
    bench.add_kernel(bodies[0], scale, x, 2.0, 1)
    executable = bench.instantiate(graph)
    found = set()
    for _ in range(30):
        bench.driver.write(x, b"\0\0\0\0")
        bench.replay(executable)
        found.add(bench.get(x, 1)[0])
    assert found == {1.0, 2.0}
    bench.close()


def test_program_order_is_creation_order_as_far_as_edges_allow() -> None:
    bench = Bench(EmulatedDriver())
    x = bench.put([1])
    graph = bench.new_graph()
    scaled = bench.add_kernel(graph, scale, x, 10.0, 1)
    added = bench.add_kernel(graph, add_one, x, 1)
    bench.run(graph)
    assert bench.get(x, 1) == [11]
    bench.driver.add_edges(graph, [Edge(added, scaled)])
    bench.run(graph)
    assert bench.get(x, 1) == [120]
    bench.close()
