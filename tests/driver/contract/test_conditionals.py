"""Contract: conditional nodes - what runs, what bodies may hold, and their one executable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, copy_1d, covers, fill_1d, refused
from helpers.kernels import add_one, count_down, fill_value, set_value

from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalParams,
    EmptyParams,
    EventParams,
    GraphHandle,
    HostParams,
    NodeKind,
)
from graphcore.errors import CudaError


@covers("create_conditional", "add_node", "instantiate", "launch_graph")
@pytest.mark.parametrize(("value", "expected"), [(0, [0, 2]), (1, [1, 0]), (7, [1, 0])])
def test_if_else_runs_one_body(bench: Bench, value: int, expected: list[float]) -> None:
    taken = bench.put([0, 0])
    graph = bench.new_graph()
    handle = bench.driver.create_conditional(graph)
    setter = bench.add_kernel(graph, set_value, handle, value)
    node = bench.add(graph, ConditionalParams(handle, "if", 2), [setter])
    params = bench.driver.node_params(node)
    assert isinstance(params, ConditionalParams)
    bench.add_kernel(params.bodies[0], fill_value, taken, 1.0, 1)
    bench.add_kernel(params.bodies[1], fill_value, taken + 4, 2.0, 1)
    bench.run(graph)
    assert bench.get(taken, 2) == expected


@covers("create_conditional")
@pytest.mark.parametrize(("default", "expected"), [(0, [1]), (1, [2])])
def test_the_default_decides_where_no_kernel_sets_the_value(
    bench: Bench, default: int, expected: list[float]
) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, "if", default=default)
    bench.add_kernel(bodies[0], add_one, x, 1)
    bench.run(graph)
    assert bench.get(x, 1) == expected


@covers("create_conditional", "launch_graph")
def test_every_launch_starts_at_the_default(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    handle, _, bodies = bench.add_conditional(graph, "if", default=1)
    added = bench.add_kernel(bodies[0], add_one, x, 1)
    bench.add_kernel(bodies[0], set_value, handle, 0, after=[added])
    bench.run(graph, times=3)
    assert bench.get(x, 1) == [3]


@covers("create_conditional", "launch_graph")
def test_without_assignment_at_launch_the_value_stays(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    handle = bench.driver.create_conditional(graph, 1, assign_at_launch=False)
    node = bench.add(graph, ConditionalParams(handle, "if"))
    params = bench.driver.node_params(node)
    assert isinstance(params, ConditionalParams)
    bench.add_kernel(params.bodies[0], add_one, x, 1)
    bench.add_kernel(graph, set_value, handle, 1, after=[node])
    executable = bench.run(graph)
    bench.driver.write(x, b"\0\0\0\0")
    bench.replay(executable, times=2)
    assert bench.get(x, 1) == [2]


@covers("create_conditional", "launch_graph")
def test_while_runs_its_body_until_the_value_is_zero(bench: Bench) -> None:
    x, counter = bench.put([0]), bench.put([5], "int32")
    graph = bench.new_graph()
    handle, _, bodies = bench.add_conditional(graph, "while", default=1)
    added = bench.add_kernel(bodies[0], add_one, x, 1)
    bench.add_kernel(bodies[0], count_down, handle, counter, after=[added])
    bench.run(graph)
    assert bench.get(x, 1) == [5]
    assert bench.get(counter, 1, "int32") == [0]


@covers("create_conditional", "launch_graph")
@pytest.mark.parametrize(
    ("value", "expected"), [(0, [1, 0, 0]), (2, [0, 0, 1]), (3, [0, 0, 0])], ids=str
)
def test_switch_runs_the_body_of_its_value_or_none(
    bench: Bench, value: int, expected: list[float]
) -> None:
    taken = bench.put([0, 0, 0])
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, "switch", 3, default=value)
    for index, body in enumerate(bodies):
        bench.add_kernel(body, add_one, taken + 4 * index, 1)
    bench.run(graph)
    assert bench.get(taken, 3) == expected


@covers("create_conditional", "add_node")
def test_a_conditional_nests_in_a_body(bench: Bench) -> None:
    x, counter = bench.put([0]), bench.put([3], "int32")
    graph = bench.new_graph()
    _, _, outer = bench.add_conditional(graph, "if", default=1)
    handle, _, inner = bench.add_conditional(outer[0], "while", default=1)
    added = bench.add_kernel(inner[0], add_one, x, 1)
    bench.add_kernel(inner[0], count_down, handle, counter, after=[added])
    bench.run(graph)
    assert bench.get(x, 1) == [3]


@covers("instantiate")
def test_bodies_hold_kernels_fills_copies_empty_and_child_nodes(bench: Bench) -> None:
    x, y = bench.put([1.0]), bench.alloc(4)
    child = bench.new_graph()
    bench.add_kernel(child, add_one, x, 1)
    graph = bench.new_graph()
    _, _, (body,) = bench.add_conditional(graph, "if", default=1)
    filled = bench.add(body, fill_1d(x, 0, 1))
    empty = bench.add(body, EmptyParams(), [filled])
    called = bench.add(body, ChildParams(child), [empty])
    bench.add(body, copy_1d(y, x, 4), [called])
    bench.run(graph)
    assert bench.get(y, 1) == [1]


FORBIDDEN: dict[str, Callable[[Bench, GraphHandle], object]] = {
    "host": lambda bench, body: bench.add(body, HostParams(lambda: None)),
    "alloc": lambda bench, body: bench.add(body, AllocParams(64)),
    "event_record": lambda bench, body: bench.add(
        body, EventParams(bench.new_event().handle, NodeKind.EVENT_RECORD)
    ),
}


@covers("instantiate", "add_node")
@pytest.mark.parametrize("kind", FORBIDDEN)
def test_a_body_with_a_forbidden_node_is_refused(bench: Bench, kind: str) -> None:
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, "if", default=1)
    # some kinds are refused when they are added, some when the graph is instantiated
    with pytest.raises(CudaError) as caught:  # noqa: PT012
        FORBIDDEN[kind](bench, bodies[0])
        bench.driver.instantiate(graph)
    assert caught.value.code in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE")


@covers("instantiate")
def test_a_graph_with_a_conditional_is_instantiated_once(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, "if", default=1)
    bench.add_kernel(bodies[0], add_one, x, 1)
    executable = bench.instantiate(graph)
    with refused("NOT_SUPPORTED"):
        bench.driver.instantiate(graph)
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("instantiate", "create_conditional")
def test_a_handle_that_no_node_uses_is_refused(bench: Bench) -> None:
    graph = bench.new_graph()
    bench.driver.create_conditional(graph)
    with pytest.raises(CudaError, match="CONDITIONAL_HANDLE_UNUSED"):
        bench.driver.instantiate(graph)


@covers("add_node", "create_conditional")
def test_a_handle_serves_one_node_of_its_own_graph(bench: Bench) -> None:
    graph = bench.new_graph()
    handle, _, _ = bench.add_conditional(graph, "if")
    with refused("INVALID_VALUE"):
        bench.add(graph, ConditionalParams(handle, "if"))
    with refused("INVALID_VALUE"):
        bench.add(bench.new_graph(), ConditionalParams(handle, "if"))


@covers("instantiate")
def test_a_body_alone_cannot_be_instantiated(bench: Bench) -> None:
    _, _, bodies = bench.add_conditional(bench.new_graph(), "if")
    with refused("NOT_SUPPORTED"):
        bench.driver.instantiate(bodies[0])
