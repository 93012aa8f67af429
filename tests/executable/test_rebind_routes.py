"""The routes of GraphExec.rebind: node by node or one update, and what is known afterwards."""

from __future__ import annotations

import logging
import random
from itertools import pairwise
from typing import Any

import pytest
from helpers.contract import Bench, copy_2d
from helpers.graph_specs import Pieces, build
from helpers.kernels import add_one, fill_value
from helpers.rebinding import edge, graph_of, many, run, values

import graphcore
from graphcore import (
    ConfigurationError,
    Graph,
    LifecycleError,
    UpdateRefused,
)
from graphcore.driver.emulated import EmulatedDriver
from graphcore.executable import RebindRoute
from graphcore.executable.known_versions import MOST_VERSIONS

# ---- routes, and what is known afterwards -------------------------------------------------------


@pytest.mark.parametrize(("touching", "route"), [(4, RebindRoute.PER_NODE), (5, RebindRoute.WHOLE)])
def test_under_a_quarter_of_the_nodes_goes_one_by_one(
    bench: Bench, caplog: pytest.LogCaptureFixture, touching: int, route: RebindRoute
) -> None:
    x, y, out = bench.put([0.0] * 4), bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = many(bench, x, out, touching, 20).instantiate()
    handle = executable.handle
    with caplog.at_level(logging.INFO, "graphcore"):
        outcome = executable.rebind([((x, 16), (y, 16))])
    assert outcome.route is route
    assert executable.handle == handle
    assert "quarter" in outcome.reason
    assert f"{route.value}: {touching} pointers in {touching} nodes" in caplog.messages[-1]
    run(executable, bench)
    assert [values(bench, each)[0] for each in (x, y, out)] == [0, touching, 20 - touching]
    # what is known is what runs
    expected = many(bench, y, out, touching, 20)
    assert executable.fingerprint().digest == expected.fingerprint().digest
    assert executable.graph.fingerprint().digest == expected.fingerprint().digest


def test_going_back_and_forth_makes_no_new_graphs(bench: Bench) -> None:
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = graph_of(bench, bench.kernel_params(add_one, x, 4)).instantiate()
    graphs, routes, reasons = set(), set(), []
    for turn in range(8):
        old, new = ((x, 16), (y, 16)) if turn % 2 == 0 else ((y, 16), (x, 16))
        outcome = executable.rebind([(old, new)])
        assert dict(outcome.words) == {"old 0": 1}
        routes.add(outcome.route)
        reasons.append(outcome.reason)
        graphs.add(executable._current.version.resource.handle)
        run(executable, bench)
    assert (values(bench, x), values(bench, y)) == ([4.0] * 4, [4.0] * 4)
    assert routes == {RebindRoute.WHOLE}
    assert len(graphs) == 2
    assert set(reasons[3:]) == {"a graph of an earlier exchange"}
    # a change of a node in between is not forgotten, and comes back with its graph only
    executable.set_params(0, {"n": 2})
    executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert values(bench, y) == [5.0, 5.0, 4.0, 4.0]
    assert executable.snapshot().nodes[0].arguments[1].value == 2


@pytest.mark.parametrize("other_turn", ["another buffer", "no other"])
def test_from_the_second_time_on_an_exchange_is_one_update(
    other_turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(EmulatedDriver())
    x, y, z = (bench.put([0.0] * 4) for _ in range(3))
    handle = bench.driver.clone_graph(
        graph_of(bench, *[bench.kernel_params(add_one, x, 4)] * 4).handle
    )
    executable = Graph(bench.driver, handle).instantiate()
    ring = [x, y, z, x] if other_turn == "another buffer" else [x, y, x]
    calls: list[str] = []
    for name in ("clone_graph", "nodes", "node_params", "set_node_params", "update_exec"):
        call = getattr(EmulatedDriver, name)

        def noting(*given: Any, name: str = name, call: Any = call, **named: Any) -> Any:
            calls.append(name)
            return call(*given, **named)

        monkeypatch.setattr(EmulatedDriver, name, noting)
    for turn in range(3):
        for old, new in pairwise(ring):
            calls.clear()
            assert executable.rebind([((old, 16), (new, 16))]).nodes == 4
            if turn:
                assert calls == ["update_exec"]
            run(executable, bench)
    assert [values(bench, each) for each in ring[1:]] == [[12.0] * 4] * (len(ring) - 1)
    executable.update(executable.graph)
    assert not executable._current.known._made, "an update lets go of them"
    bench.close()


def test_many_buffers_in_turn_keep_a_few_graphs_only(bench: Bench) -> None:
    buffers = [bench.put([0.0] * 4) for _ in range(MOST_VERSIONS + 3)]
    executable = graph_of(bench, bench.kernel_params(add_one, buffers[0], 4)).instantiate()
    for _ in range(2):
        for old, new in zip(buffers, [*buffers[1:], buffers[0]], strict=True):
            executable.rebind([((old, 16), (new, 16))])
            run(executable, bench)
    assert [values(bench, each) for each in buffers] == [[2.0] * 4] * len(buffers)
    assert len(executable._current.known._made) <= MOST_VERSIONS


def test_later_changes_and_rebinds_build_on_the_new_pointers(bench: Bench) -> None:
    x, y, z = (bench.put([0.0] * 4) for _ in range(3))
    graph = graph_of(bench, bench.kernel_params(fill_value, x, 1.0, 4))
    node = graph.snapshot().nodes[0]
    executable = graph.instantiate()
    bound = executable.bind_params(node)
    executable.rebind([((x, 16), (y, 16))])
    executable.set_params(node, {"value": 2.0})  # the records of before still name the node
    run(executable, bench)
    assert (values(bench, x), values(bench, y)) == ([0.0] * 4, [2.0] * 4)
    executable.rebind([((y, 16), (z, 16))])
    run(executable, bench)
    assert values(bench, z) == [2.0] * 4
    bound(x, 7.0, 4)
    executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert values(bench, y) == [7.0] * 4
    with pytest.raises(ConfigurationError, match="not found"):
        executable.rebind([((x, 16), (z, 16))])


def test_an_update_after_a_rebind_brings_its_own_pointers(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    graph = graph_of(bench, bench.kernel_params(fill_value, x, 1.0, 4))
    executable = graph.instantiate()
    executable.rebind([((x, 16), (y, 16))])
    assert executable.update(graph).is_current
    run(executable, bench)
    assert values(bench, x) == [1.0] * 4


def test_copies_of_rows_are_re_pointed_by_a_new_executable(bench: Bench) -> None:
    x, y, out = bench.put([1.0] * 8), bench.put([2.0] * 8), bench.alloc(32)
    graph = graph_of(bench, copy_2d(out, x, 8, 2, 16, 16), bench.kernel_params(add_one, x, 1))
    executable = graph.instantiate()
    executable.enable(1, False)
    with pytest.raises(UpdateRefused, match="memcpy"):
        executable.rebind([((x, 32), (y, 32))], reinstantiate=False)
    run(executable, bench)
    assert values(bench, out, 2) == [1.0] * 2
    outcome = executable.rebind([((x, 32), (y, 32))])
    assert outcome.route is RebindRoute.REINSTANTIATED
    assert executable.is_enabled(1) is False
    run(executable, bench)
    assert values(bench, out, 2) == [2.0] * 2
    assert values(bench, y, 1) == [2.0]


def test_switched_off_nodes_stay_off(bench: Bench) -> None:
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = graph_of(bench, bench.kernel_params(add_one, x, 4)).instantiate()
    executable.enable(0, False)
    executable.rebind([((x, 16), (y, 16))])
    assert executable.is_enabled(0) is False
    run(executable, bench)
    assert values(bench, y) == [0.0] * 4


def test_what_a_capture_embeds_works_on_the_new_buffers(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, bench.kernel_params(fill_value, x, 1.0, 4)).instantiate()
    executable.rebind([((x, 16), (y, 16))])
    with graphcore.capture(driver=bench.driver) as capture:
        executable.launch(capture.stream)
    run(capture.graph.instantiate(), bench)
    assert values(bench, y) == [1.0] * 4


@pytest.mark.parametrize("seed", range(25))
def test_a_rebound_executable_is_one_of_the_graph_built_over_the_new_buffer(
    bench: Bench, seed: int
) -> None:
    """Random graphs, nested ones and copies of rows among them."""
    pieces = Pieces(bench, seed)
    first = Graph(bench.driver, build(bench, pieces.spec()), owned=False)
    old, pieces.a, pieces.random = pieces.a, bench.alloc(4096), random.Random(seed)
    second = Graph(bench.driver, build(bench, pieces.spec()), owned=False)
    executable = first.instantiate()
    if first.fingerprint().digest == second.fingerprint().digest:
        with pytest.raises(ConfigurationError, match="not found"):
            executable.rebind([((old, 4096), (pieces.a, 4096))])
        return
    executable.rebind([((old, 4096), (pieces.a, 4096))])
    assert executable.fingerprint().digest == second.fingerprint().digest
    assert executable.graph.fingerprint().digest == second.fingerprint().digest
    run(executable, bench)
    back = executable.rebind([((pieces.a, 4096), (old, 4096))])
    assert executable.fingerprint().digest == first.fingerprint().digest, back
    run(executable, bench)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_lists_its_nodes_in_the_order_of_the_original(bench: Bench, seed: int) -> None:
    """A copy's nodes are known by their places only."""
    pieces = Pieces(bench, seed)
    handle = build(bench, pieces.spec(most=12))
    # an edge from a later node to an earlier one: the order of creation is not that of the work
    late = bench.add_kernel(handle, add_one, pieces.a, 1)
    bench.driver.add_edges(handle, [edge(late, bench.driver.nodes(handle)[0])])
    graph = Graph(bench.driver, handle, owned=False)
    pairs = list(zip(graph.snapshot().walk(), graph.clone().snapshot().walk(), strict=True))
    for original, copy in pairs:
        assert (original.index, original.kind, original.name) == (copy.index, copy.kind, copy.name)
        if not original.inner:
            assert original.params == copy.params


def test_a_graph_that_was_edited_since_is_not_copied_blindly(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    graph = graph_of(bench, bench.kernel_params(add_one, x, 4))
    executable = graph.instantiate()
    node = executable.snapshot().nodes[0]
    bench.driver.set_node_params(node.handle, bench.kernel_params(fill_value, x, 1.0, 4))
    with pytest.raises(LifecycleError, match="edited since"):
        executable.rebind([((x, 16), (y, 16))])
