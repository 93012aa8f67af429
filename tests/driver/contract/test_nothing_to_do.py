"""Contract: copies, fills and graphs of no size, outside and inside captures and as nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d, refused
from helpers.kernels import add_one

from graphcore.driver.records import (
    ChildParams,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeParams,
    UpdateResult,
)

EMPTY_COPIES: dict[str, Callable[[Bench, int], MemcpyParams]] = {
    "copy_1d": lambda _, x: copy_1d(x, x + 32, 0),
    "copy_from_host": lambda bench, x: copy_1d(
        x, bench.pin(b"1234"), 0, src_memory=MemoryKind.HOST
    ),
    "copy_2d_no_width": lambda _, x: copy_2d(x, x + 32, 0, 2, 4, 4),
}
EMPTY_FILLS: dict[str, Callable[[Bench, int], MemsetParams]] = {
    "fill_1d": lambda _, x: fill_1d(x, 1, 0),
    "fill_2d_no_width": lambda _, x: MemsetParams(x, 1, 1, 0, height=2, pitch=4),
}
EMPTY: dict[str, Callable[[Bench, int], MemcpyParams | MemsetParams]] = {
    **EMPTY_COPIES,
    **EMPTY_FILLS,
}
NO_ROWS: dict[str, Callable[[int], MemcpyParams | MemsetParams]] = {
    "copy": lambda x: copy_2d(x, x + 32, 2, 0, 4, 4),
    "fill": lambda x: MemsetParams(x, 1, 1, 2, height=0, pitch=4),
}


def _do(bench: Bench, params: MemcpyParams | MemsetParams) -> None:
    if isinstance(params, MemcpyParams):
        bench.driver.copy(params, bench.stream.handle)
    else:
        bench.driver.fill(params, bench.stream.handle)


@covers("copy", "fill")
@pytest.mark.parametrize("case", EMPTY)
def test_work_on_no_bytes_does_nothing(bench: Bench, case: str) -> None:
    x = bench.alloc(64)
    _do(bench, EMPTY[case](bench, x))
    assert bench.get(x, 64, "uint8") == [255] * 64


@covers("copy", "fill", "launch")
@pytest.mark.parametrize("case", EMPTY)
def test_captured_work_on_no_bytes_does_nothing_and_keeps_the_order(
    bench: Bench, case: str
) -> None:
    x, y = bench.alloc(64), bench.put([1])
    params = EMPTY[case](bench, x)
    with bench.capturing() as captured:
        bench.launch(add_one, y, 1)
        _do(bench, params)
        bench.launch(add_one, y, 1)
    first, *_, last = bench.driver.nodes(captured[0])
    reached, edges = {first}, bench.driver.edges(captured[0])
    for _ in edges:
        reached |= {edge.target for edge in edges if edge.source in reached}
    assert last in reached
    bench.run(captured[0])
    assert bench.get(y, 1) == [3]
    assert bench.get(x, 64, "uint8") == [255] * 64


@covers("add_node")
@pytest.mark.parametrize("case", EMPTY)
def test_a_node_that_works_on_no_bytes_is_refused(bench: Bench, case: str) -> None:
    graph = bench.new_graph()
    with refused("INVALID_VALUE"):
        bench.add(graph, EMPTY[case](bench, bench.alloc(64)))
    assert bench.driver.nodes(graph) == []


@covers("copy", "fill")
@pytest.mark.parametrize("work", NO_ROWS)
def test_work_on_no_rows_does_nothing(bench: Bench, work: str) -> None:
    x = bench.alloc(64)
    _do(bench, NO_ROWS[work](x))
    assert bench.get(x, 64, "uint8") == [255] * 64


@covers("add_node")
@pytest.mark.parametrize("work", NO_ROWS)
def test_a_node_that_works_on_no_rows_is_refused(bench: Bench, work: str) -> None:
    graph = bench.new_graph()
    with refused("INVALID_VALUE"):
        bench.add(graph, NO_ROWS[work](bench.alloc(64)))
    assert bench.driver.nodes(graph) == []


@covers("set_exec_node_params", "set_node_params")
@pytest.mark.parametrize("place", ["description", "executable"])
@pytest.mark.parametrize("kind", ["memcpy", "memset"])
def test_a_node_cannot_be_changed_to_work_on_no_bytes(bench: Bench, kind: str, place: str) -> None:
    x = bench.alloc(64)
    cases: dict[str, tuple[NodeParams, NodeParams]] = {
        "memcpy": (copy_1d(x, x + 32, 4), copy_1d(x, x + 32, 0)),
        "memset": (fill_1d(x, 1, 4), fill_1d(x, 1, 0)),
    }
    before, after = cases[kind]
    graph = bench.new_graph()
    node = bench.add(graph, before)
    executable = bench.instantiate(graph)
    with refused("INVALID_VALUE"):
        if place == "description":
            bench.driver.set_node_params(node, after)
        else:
            bench.driver.set_exec_node_params(executable, node, after)
    assert bench.driver.node_params(node) == before


@covers("end_capture", "instantiate", "update_exec")
def test_a_capture_of_nothing_is_a_graph_of_nothing_that_runs_and_updates(bench: Bench) -> None:
    graphs = []
    for _ in range(2):
        with bench.capturing() as captured:
            pass
        graphs.append(captured[0])
    assert bench.driver.nodes(graphs[0]) == []
    executable = bench.run(graphs[0])
    assert bench.driver.update_exec(executable, graphs[1]).result is UpdateResult.SUCCESS
    bench.replay(executable)


@covers("add_node", "instantiate")
def test_an_empty_child_graph_runs(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    child = bench.add(graph, ChildParams(bench.new_graph()))
    bench.add_kernel(graph, add_one, x, 1, after=[child])
    bench.run(graph)
    assert bench.get(x, 1) == [2]


@covers("create_conditional", "instantiate")
@pytest.mark.parametrize("default", [0, 1])
def test_an_empty_conditional_body_runs(bench: Bench, default: int) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    _, node, _ = bench.add_conditional(graph, "if", default=default)
    bench.add_kernel(graph, add_one, x, 1, after=[node])
    bench.run(graph)
    assert bench.get(x, 1) == [2]
