"""GraphExec.rebind: every pointer into a buffer goes to another one, all or nothing, explained."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.graph_specs import Child, Pieces, Step, build
from helpers.kernels import ONE_BLOCK, add_one, axpy, fill_value, scale
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    CudaError,
    Graph,
    GraphExec,
    LifecycleError,
    StaleGraphError,
    UpdateRefused,
)
from graphcore.driver import Driver, Kernel, kernel
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import LaunchConfig, MemsetParams, NodeParams
from graphcore.executable import RebindRoute
from graphcore.executable.known_versions import MOST_VERSIONS
from graphcore.resources.buffer import Buffer
from graphcore.resources.lifetime import OwnerSet


def graph_of(bench: Bench, *steps: Any) -> Graph:
    spec = tuple(step if isinstance(step, Step) else Step(step) for step in steps)
    return Graph(bench.driver, build(bench, spec), owned=False)


def values(bench: Bench, address: int, count: int = 4) -> list[float]:
    return bench.get(address, count)


def run(executable: GraphExec, bench: Bench) -> None:
    replay(executable, bench.stream)


def captured(driver: Driver, step: Callable[[], object], **kept: Any) -> tuple[Graph, Any]:
    """A capture of ``step`` that keeps tensors under their names, and its stream."""
    capturing = graphcore.capture(driver=driver)
    capturing.warm_up(step, 2)
    with capturing:
        for name, tensor in kept.items():
            capturing.keep(tensor, name)
        step()
    return capturing.graph, capturing.stream


# ---- every kind of node -------------------------------------------------------------------------


def test_a_pair_goes_by_the_name_that_names_gives_it(bench: Bench) -> None:
    old, new = filled(bench.driver, 1.0), filled(bench.driver, 2.0)
    graph = graph_of(bench, bench.kernel_params(add_one, old.data_ptr(), 4))
    executable = graph.instantiate()
    outcome = executable.rebind([(old, new)], names={"cache": old})
    assert dict(outcome.words) == {"cache": 1}
    assert str(outcome).startswith("whole update: 1 pointer in 1 node: ")
    with pytest.raises(ConfigurationError, match="cache: not found"):
        executable.rebind([(old, new)], names={"cache": old})


def test_arguments_copies_and_fills_all_go_to_the_new_buffer(bench: Bench) -> None:
    x, y, out = bench.put([1.0] * 8), bench.put([2.0] * 8), bench.alloc(32)
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, x, 4),
        Step(copy_1d(out, x, 32), (0,)),
        Step(fill_1d(x + 16, 0x40A00000, 4), (1,)),  # 5.0
    )
    executable = graph.instantiate()
    run(executable, bench)
    assert values(bench, out, 8) == [2.0] * 4 + [1.0] * 4
    before = values(bench, x, 8)
    outcome = executable.rebind([((x, 32), (y, 32))])
    assert (outcome.nodes, dict(outcome.words)) == (3, {"old 0": 3})
    bench.poison(out, 32)
    run(executable, bench)
    assert values(bench, out, 8) == [3.0] * 4 + [2.0] * 4
    assert values(bench, y, 8) == [3.0] * 4 + [5.0] * 4
    assert values(bench, x, 8) == before


def test_pointers_into_the_middle_keep_their_offset_and_the_end_is_no_part(bench: Bench) -> None:
    x = bench.put([0.0] * 12)
    y = bench.put([0.0] * 8)
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, x + 8, 2),
        bench.kernel_params(add_one, x + 32, 4),  # the first byte past the old buffer
    )
    executable = graph.instantiate()
    outcome = executable.rebind([((x, 32), (y, 32))])
    assert outcome.nodes == 1
    run(executable, bench)
    assert values(bench, y, 8) == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert values(bench, x, 12) == [0.0] * 8 + [1.0] * 4


def test_nodes_of_child_graphs_and_bodies_are_re_pointed_too(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    inner = Child((Step(bench.kernel_params(fill_value, x, 1.0, 4)),))
    handle = build(bench, (Step(Child((Step(inner),))),))
    _, _, bodies = bench.add_conditional(handle, "if", default=1)
    bench.add(bodies[0], bench.kernel_params(add_one, x, 4), ())
    bench.driver.add_edges(handle, [_edge(*bench.driver.nodes(handle))])
    executable = Graph(bench.driver, handle, owned=False).instantiate()
    outcome = executable.rebind([((x, 16), (y, 16))])
    assert (outcome.nodes, outcome.route) == (2, RebindRoute.PER_NODE)
    assert "conditional" in outcome.reason
    bench.poison(x, 16)
    run(executable, bench)
    assert values(bench, y) == [2.0] * 4
    assert values(bench, x) != [2.0] * 4


def _edge(source: Any, target: Any) -> Any:
    from graphcore.driver.records import Edge

    return Edge(source, target)


def test_child_graphs_go_along_in_a_whole_update(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    child = Child((Step(bench.kernel_params(fill_value, x, 3.0, 4)),))
    executable = graph_of(bench, child).instantiate()
    outcome = executable.rebind([((x, 16), (y, 16))])
    assert outcome.route is RebindRoute.WHOLE
    run(executable, bench)
    assert values(bench, y) == [3.0] * 4


packed = kernel(
    "packed",
    "bytes:24 work",
    "struct Work { float* x; long long tag; float* y; }; "
    'extern "C" __global__ void packed(Work work) '
    "{ if (threadIdx.x == 0) { work.y[0] = work.x[0] + (float)(work.tag & 7); } }",
    lambda _config, work: _run_packed(work),
)
tagged = kernel(
    "tagged",
    "f32* x, u64 tag",
    'extern "C" __global__ void tagged(float* x, unsigned long long tag) '
    "{ if (threadIdx.x == 0) x[0] = (float)(tag & 0xff); }",
    lambda _config, x, tag: _run_tagged(x, tag),
)


def _run_packed(work: bytes) -> None:
    from graphcore.driver.kernel import Pointer

    x, tag, y = (int.from_bytes(work[at : at + 8], "little") for at in (0, 8, 16))
    Pointer(y, "float32").array(1)[0] = Pointer(x, "float32").array(1)[0] + (tag & 7)


def _run_tagged(x: Any, tag: int) -> None:
    x.array(1)[0] = tag & 0xFF


def structure(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)


def test_words_in_structures_are_found_and_declared_numbers_are_left_alone(bench: Bench) -> None:
    for each in (packed, tagged):
        bench.driver.function(each)
    x, y = bench.put([1.0] * 4), bench.put([4.0] * 4)
    out, other = bench.alloc(16), bench.alloc(16)
    graph = graph_of(
        bench,
        bench.kernel_params(packed, structure(x, 3, out)),
        bench.kernel_params(tagged, other, x + 8),  # a number that is an address by its value
    )
    executable = graph.instantiate()
    outcome = executable.rebind([((x, 16), (y, 16))])
    assert (outcome.nodes, dict(outcome.words)) == (1, {"old 0": 1})
    run(executable, bench)
    assert values(bench, out, 1) == [7.0]
    assert values(bench, other, 1) == [float((x + 8) & 0xFF)]


# ---- simultaneous -------------------------------------------------------------------------------


def test_two_buffers_trade_places(bench: Bench) -> None:
    a, b = bench.put([1.0] * 4), bench.put([10.0] * 4)
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, a, 4),
        Step(bench.kernel_params(scale, b, 2.0, 4), (0,)),
    )
    executable = graph.instantiate()
    executable.rebind([((a, 16), (b, 16)), ((b, 16), (a, 16))])
    run(executable, bench)
    assert (values(bench, a), values(bench, b)) == ([2.0] * 4, [11.0] * 4)
    executable.rebind([((a, 16), (b, 16)), ((b, 16), (a, 16))])
    run(executable, bench)
    assert (values(bench, a), values(bench, b)) == ([3.0] * 4, [22.0] * 4)


def test_a_chain_of_exchanges_does_not_cascade(bench: Bench) -> None:
    a, b, c = (bench.put([value] * 4) for value in (0.0, 10.0, 20.0))
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, a, 4),
        Step(bench.kernel_params(scale, b, 2.0, 4), (0,)),
    )
    executable = graph.instantiate()
    executable.rebind([((a, 16), (b, 16)), ((b, 16), (c, 16))])
    run(executable, bench)
    assert [values(bench, each)[0] for each in (a, b, c)] == [0.0, 11.0, 40.0]


# ---- what was captured --------------------------------------------------------------------------


def test_a_captured_torch_step_works_on_new_tensors_by_name(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, weight, out = (filled(driver, value, 4, 4) for value in (1.0, 2.0, 0.0))

    def step() -> None:
        out.copy_(x @ weight + x)

    graph, stream = captured(driver, step, x=x, weight=weight, out=out)
    executable = graph.instantiate()
    replay(executable, stream)
    assert out.tolist() == [[9.0] * 4] * 4
    new_x, new_out = filled(driver, 3.0, 4, 4), filled(driver, float("nan"), 4, 4)
    outcome = executable.rebind({"x": new_x, "out": new_out})
    assert set(outcome.words) == {"x", "out"}
    out.fill_(-1.0)
    replay(executable, stream)
    assert new_out.tolist() == [[27.0] * 4] * 4
    assert out.tolist() == [[-1.0] * 4] * 4
    weight.fill_(1.0)  # what was not named is as it was
    replay(executable, stream)
    assert new_out.tolist() == [[15.0] * 4] * 4
    # and back, by the tensors
    executable.rebind([(new_x, x), (new_out, out)])
    replay(executable, stream)
    assert out.tolist() == [[5.0] * 4] * 4


def test_an_input_replaced_by_a_new_tensor_after_capture_is_mended(
    graphcore_driver: Driver,
) -> None:
    """The commonest silent failure: the graph goes on reading the memory it was captured with."""
    driver = graphcore_driver
    x, out = filled(driver, 1.0), filled(driver, 0.0)
    graph, stream = captured(driver, lambda: out.copy_(x * 2), x=x, out=out)
    executable = graph.instantiate(guard="full")
    x.data = filled(driver, 5.0)
    assert [stale.label for stale in executable.check()] == ["x"]
    with pytest.raises(StaleGraphError, match="x: address"):
        executable.launch(stream)
    outcome = executable.rebind({"x": x})
    assert outcome.words["x"] >= 1
    assert executable.check() == []
    replay(executable, stream)
    assert out.tolist() == [10.0] * 4


def test_owners_are_swapped_and_the_old_memory_is_let_go(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    tensors = {"out": filled(driver, 0.0)}
    graph, stream = captured(driver, lambda: tensors["out"].add_(1), **tensors)
    executable = graph.instantiate()
    graph.close()
    gone = weakref.ref(tensors["out"])
    new = filled(driver, 5.0)
    executable.rebind({"out": new})
    tensors.clear()
    gc.collect()
    assert gone() is None
    assert new in executable.owners
    assert executable.owners.labels().count("out") == 1
    replay(executable, stream)
    assert new.tolist() == [6.0] * 4
    alive = weakref.ref(new)
    del new
    gc.collect()
    assert alive() is not None
    assert alive() in executable.graph.owners
    executable.close()
    del executable
    gc.collect()
    assert alive() is None


def test_the_pool_and_temporaries_stay(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, out = filled(driver, 1.0, 64), filled(driver, 0.0, 64)
    graph, stream = captured(driver, lambda: out.copy_((x + 1) * (x + 2)), x=x, out=out)
    executable = graph.instantiate()
    kept = [label for label in executable.owners.labels() if "pool" in label]
    graph.close()
    executable.rebind({"x": filled(driver, 2.0, 64)})
    assert [label for label in executable.owners.labels() if "pool" in label] == kept
    replay(executable, stream)
    assert out.tolist() == [12.0] * 64


def test_a_marked_buffer_is_forgiven_once_it_is_exchanged(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, out = filled(driver, 1.0), filled(driver, 0.0)
    graph, stream = captured(driver, lambda: out.copy_(x * 2), x=x, out=out)
    executable = graph.instantiate(guard="owners")
    executable.mark_stale("grew", "x")
    executable.rebind({"out": filled(driver, 0.0)})
    with pytest.raises(StaleGraphError, match="grew"):
        executable.launch(stream)
    executable.rebind({"x": filled(driver, 3.0)})
    replay(executable, stream)


@pytest.mark.parametrize("share", [1, 9], ids=["a whole update", "node by node"])
def test_old_memory_may_be_freed_and_new_memory_is_watched_instead(
    bench: Bench, share: int
) -> None:
    """Memory that nobody keeps alive: raw addresses, told by what the nodes point into."""
    driver = bench.driver
    x, y, out = driver.alloc(16), bench.put([1.0] * 4), bench.put([0.0] * 4)
    driver.write(x, bytes(16))
    executable = many(bench, x, out, 1, share).instantiate(guard="full")
    run(executable, bench)
    executable.rebind([((x, 16), (y, 16))])
    driver.free(x)
    assert executable.check() == []
    run(executable, bench)
    assert values(bench, y) == [2.0] * 4
    # the other buffer is watched as before
    gone = driver.alloc(16)
    driver.write(gone, bytes(16))
    executable.rebind([((y, 16), (gone, 16))])
    run(executable, bench)
    driver.free(gone)
    with pytest.raises(StaleGraphError, match="freed"):
        executable.launch(bench.stream)


def test_watched_memory_is_exchanged_by_its_name_and_watched_no_more(
    graphcore_driver: Driver,
) -> None:
    driver = graphcore_driver
    tensors = {"x": filled(driver, 1.0)}
    out, new = filled(driver, 0.0), filled(driver, 4.0)
    graph, stream = captured(driver, lambda: out.copy_(tensors["x"] * 2), out=out)
    graph.watch({"x": tensors["x"]})
    executable = graph.instantiate(guard="owners")
    graph.close()
    assert executable.rebind({"x": new}).words["x"] >= 1
    del tensors["x"]
    gc.collect()
    replay(executable, stream)
    assert out.tolist() == [8.0] * 4
    assert new in executable.owners


# ---- routes, and what is known afterwards -------------------------------------------------------


def many(bench: Bench, x: int, out: int, touching: int, total: int) -> Graph:
    steps: list[Any] = [bench.kernel_params(add_one, x, 4) for _ in range(touching)]
    steps += [bench.kernel_params(add_one, out, 4) for _ in range(total - touching)]
    return graph_of(bench, *(Step(step, (i - 1,) if i else ()) for i, step in enumerate(steps)))


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
    bench.driver.add_edges(handle, [_edge(late, bench.driver.nodes(handle)[0])])
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


# ---- all or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_half_way_puts_back_what_was_changed(failing: int) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, y, out = bench.put([0.0] * 4), bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = many(bench, x, out, 3, 20).instantiate()
    before = executable.snapshot()
    driver.faults.inject("set_exec_node_params", after=failing)
    with pytest.raises(CudaError) as caught:
        executable.rebind([((x, 16), (y, 16))])
    assert f"{failing} nodes that were changed before have been put back" in str(
        caught.value.__notes__
    )
    assert executable.snapshot() == before
    run(executable, bench)
    assert (values(bench, x), values(bench, y)) == ([3.0] * 4, [0.0] * 4)
    executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert values(bench, y) == [3.0] * 4


def test_what_could_not_be_put_back_is_said(bench: Bench) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, y, out = bench.put([0.0] * 4), bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = many(bench, x, out, 2, 20).instantiate()
    driver.faults.inject("set_exec_node_params", count=2, after=1)
    with pytest.raises(CudaError) as caught:
        executable.rebind([((x, 16), (y, 16))])
    assert "could not be put back" in str(caught.value.__notes__)
    assert "node 0" in str(caught.value.__notes__)


@pytest.mark.parametrize("call", ["clone_graph", "set_node_params", "update_exec"])
def test_a_failure_of_a_whole_update_leaves_everything(call: str) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = graph_of(bench, bench.kernel_params(add_one, x, 4)).instantiate()
    driver.faults.inject(call)
    with pytest.raises(CudaError):
        executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert (values(bench, x), values(bench, y)) == ([1.0] * 4, [0.0] * 4)


# ---- ambiguous ----------------------------------------------------------------------------------


def test_a_word_in_two_named_buffers_is_refused_with_node_argument_and_byte(bench: Bench) -> None:
    bench.driver.function(packed)
    pool, y = bench.put([0.0] * 64), bench.put([0.0] * 64)
    graph = graph_of(bench, bench.kernel_params(packed, structure(pool + 32, 0, pool)))
    executable = graph.instantiate()
    names = {"cache": (pool, 128)}
    with pytest.raises(ConfigurationError) as caught:
        executable.rebind([((pool + 32, 32), (y, 32))], names=names)
    text = str(caught.value)
    assert "node 0 (kernel packed): arg 0 (work), byte 0: ambiguous" in text
    assert "old 0 + 0 bytes or cache + 32 bytes" in text
    # named as a whole it can be exchanged
    assert executable.rebind({"cache": (y, 128)}, names=names).words == {"cache": 2}


def test_a_word_that_is_not_aligned_is_refused(bench: Bench) -> None:
    bench.driver.function(packed)
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    data = bytearray(structure(x, 0, x))
    data[12:20] = x.to_bytes(8, "little")
    executable = graph_of(bench, bench.kernel_params(packed, bytes(data))).instantiate()
    with pytest.raises(ConfigurationError, match="byte 12: a word that is not aligned"):
        executable.rebind([((x, 16), (y, 16))])


STRADDLING: dict[str, tuple[Callable[[int, int], NodeParams], str]] = {
    "past the end": (
        lambda x, out: copy_1d(out, x + 8, 16),
        r"memcpy\): src touches 16 bytes from byte 8 of old 0",
    ),
    "from before": (
        lambda x, out: copy_1d(out, x - 8, 16),
        r"memcpy\): src begins outside old 0 and reaches into it",
    ),
    "a fill": (lambda x, _: MemsetParams(x, 0, 4, 8), r"memset\): address touches 32 bytes"),
}


@pytest.mark.parametrize("name", STRADDLING)
def test_copies_and_fills_that_reach_past_the_buffer_are_refused(bench: Bench, name: str) -> None:
    whole, y, out = bench.put([0.0] * 32), bench.put([0.0] * 4), bench.alloc(64)
    x = whole + 32
    make, message = STRADDLING[name]
    executable = graph_of(bench, make(x, out)).instantiate()
    with pytest.raises(ConfigurationError, match=message):
        executable.rebind([((x, 16), (y, 16))])


def test_copies_of_rows_beside_the_buffer_are_no_part_of_it(bench: Bench) -> None:
    whole, y, out = bench.put([1.0] * 16), bench.put([0.0] * 4), bench.alloc(64)
    # rows at 0 and 32, the buffer from 16 to 32 between them
    rows = copy_2d(out, whole, 16, 2, 16, 32)
    fill = fill_1d(whole + 16, 0, 4)
    executable = graph_of(bench, rows, fill).instantiate()
    assert executable.rebind([((whole + 16, 16), (y, 16))]).nodes == 1


def test_the_holes_of_a_strided_buffer_are_anothers(bench: Bench) -> None:
    both = filled(bench.driver, 0.0, 4, 2)
    left, right = both[:, 0], both[:, 1]
    new = filled(bench.driver, 0.0, 4, 2)[:, 0]
    start = both.data_ptr()
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, start + 8, 1),
        bench.kernel_params(add_one, start + 12, 1),
    )
    owners = OwnerSet().with_(right, label="right")
    executable = Graph(bench.driver, graph.handle, owners=owners, owned=False).instantiate()
    assert executable.rebind([(left, new)]).nodes == 1
    run(executable, bench)
    assert new.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert both.flatten().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_memory_that_gets_two_names_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    a, b = filled(bench.driver, 0.0), filled(bench.driver, 0.0)
    add = bench.kernel_params(add_one, a.data_ptr(), 4)
    handle = build(bench, (Step(add), Step(bench.kernel_params(add_one, b.data_ptr(), 4))))
    owners = OwnerSet().with_(a, label="a").with_(b, label="b")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    executable.rebind([(a, b)])
    assert "a goes to memory that the graph uses as b already" in caplog.text


# ---- bad input ----------------------------------------------------------------------------------


def _tensor(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device_of(bench.driver))


BAD: dict[str, tuple[Callable[[Bench, torch.Tensor], Any], type, str]] = {
    "no pairs": (lambda *_: [], ConfigurationError, "at least one"),
    "no names": (lambda *_: {}, ConfigurationError, "at least one"),
    "a tensor": (lambda _, x: x, CacheTypeError, "got Tensor"),
    "a text": (lambda *_: "x", CacheTypeError, "got str"),
    "no pair": (lambda _, x: [x], CacheTypeError, "pair 0"),
    "three of them": (lambda _, x: [(x, x, x)], CacheTypeError, "pair 0"),
    "an unknown name": (lambda _, x: {"y": x}, ConfigurationError, r"'y'.*\(x\)"),
    "old is new": (lambda _, x: [(x, x)], ConfigurationError, "the old buffer as the new"),
    "old is new by name": (lambda _, x: {"x": x}, ConfigurationError, "the old buffer"),
    "no tensor": (lambda _, x: [(x, "new")], CacheTypeError, "x: new: .*got str"),
    "no old tensor": (lambda _, x: [("old", x)], CacheTypeError, "got Tensor for str"),
    "an int": (lambda _, x: [(x, x.data_ptr())], CacheTypeError, "got int"),
    "a range for a tensor": (lambda _, x: [(x, (4096, 64))], CacheTypeError, "got tuple"),
    "smaller": (
        lambda bench, x: [(x, _tensor(bench, 3, 4))],
        ConfigurationError,
        r"x: new: shape: expected at least \(4, 4\), got \(3, 4\)",
    ),
    "other dtype": (
        lambda bench, x: [(x, _tensor(bench, 4, 4, dtype=torch.int32))],
        ConfigurationError,
        "dtype: expected float32, got int32",
    ),
    "other rank": (lambda bench, x: [(x, _tensor(bench, 16))], ConfigurationError, "shape"),
    "other strides": (
        lambda bench, x: [(x, _tensor(bench, 4, 8)[:, :4])],
        ConfigurationError,
        r"strides: expected \(4, 1\) elements, got \(8, 1\)",
    ),
    "less aligned": (
        lambda bench, x: [(x, _tensor(bench, 5, 4).flatten()[1:17].view(4, 4))],
        ConfigurationError,
        "address: expected a multiple of 16",
    ),
    "overlapping olds": (
        lambda bench, x: [(x, _tensor(bench, 4, 4)), (x[2:], _tensor(bench, 2, 4))],
        ConfigurationError,
        "overlap",
    ),
    "the same old twice": (
        lambda bench, x: [(x, _tensor(bench, 4, 4)), (x, _tensor(bench, 4, 4))],
        ConfigurationError,
        "overlap",
    ),
    "not found": (
        lambda bench, x: [(_tensor(bench, 4), _tensor(bench, 4))],
        ConfigurationError,
        "not found: no node points into it",
    ),
    "without elements": (
        lambda bench, x: [(x[:0], _tensor(bench, 0, 4))],
        ConfigurationError,
        "other memory|without elements",
    ),
    "names of another kind": (lambda _, x: [(x, x.clone())], ConfigurationError, "names"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_exchanged_is_refused_and_nothing_changes(bench: Bench, name: str) -> None:
    x = _tensor(bench, 4, 4)
    handle = build(bench, (Step(bench.kernel_params(fill_value, x.data_ptr(), 1.0, 16)),))
    owners = OwnerSet().with_(x, label="x")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    before = executable.snapshot()
    make, error, message = BAD[name]
    given = make(bench, x)
    names: Any = 7 if name == "names of another kind" else None
    with pytest.raises(error, match=message):
        executable.rebind(given, names=names)
    assert executable.snapshot() == before
    assert executable.owners.labels() == ("x",)
    run(executable, bench)
    assert x.tolist() == [[1.0] * 4] * 4


def test_memory_that_no_node_points_into_is_let_go_where_that_is_allowed(bench: Bench) -> None:
    x, unused = _tensor(bench, 4), _tensor(bench, 4)
    others = _tensor(bench, 4), _tensor(bench, 4)
    handle = build(bench, (Step(bench.kernel_params(fill_value, x.data_ptr(), 1.0, 4)),))
    owners = OwnerSet().with_(x, label="x").with_(unused, label="unused")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    with pytest.raises(ConfigurationError, match="unused: not found: no node points into it"):
        executable.rebind({"x": others[0], "unused": others[1]})
    outcome = executable.rebind({"x": others[0], "unused": others[1]}, allow_unused=True)
    assert dict(outcome.words) == {"x": 1, "unused": 0}
    assert {owner.label: owner.object for owner in executable.owners} == {
        "x": others[0],
        "unused": others[1],
    }
    run(executable, bench)
    assert others[0].tolist() == [1.0] * 4
    back = executable.rebind({"unused": unused}, allow_unused=True)
    assert back.nodes == 0
    assert executable.check() == []


def test_two_new_buffers_that_overlap_are_refused(bench: Bench) -> None:
    a, b, new = (_tensor(bench, 4) for _ in range(3))
    add: list[NodeParams] = [bench.kernel_params(add_one, t.data_ptr(), 4) for t in (a, b)]
    executable = graph_of(bench, *add).instantiate()
    with pytest.raises(ConfigurationError, match="would both be the new memory"):
        executable.rebind([(a, new), (b, new)])


def test_a_larger_buffer_of_the_same_steps_fits(bench: Bench) -> None:
    x, larger = _tensor(bench, 2, 4), _tensor(bench, 9, 4)
    fill = bench.kernel_params(fill_value, x.data_ptr(), 1.0, 8)
    executable = graph_of(bench, fill).instantiate()
    executable.rebind([(x, larger)])
    run(executable, bench)
    assert larger.flatten().tolist() == [1.0] * 8 + [0.0] * 28


def test_closed_foreign_and_read_only_memory_is_refused(bench: Bench) -> None:
    x = Buffer.allocate(4, driver=bench.driver)
    fill = bench.kernel_params(fill_value, x.address, 1.0, 4)
    executable = graph_of(bench, fill).instantiate()
    closed = Buffer.allocate(4, driver=bench.driver)
    closed.close()
    with pytest.raises(LifecycleError, match="closed"):
        executable.rebind([(x, closed)])
    foreign = Buffer.allocate(4, driver=EmulatedDriver())
    with pytest.raises(ConfigurationError, match=r"of driver|memory on"):
        executable.rebind([(x, foreign)])
    array = numpy.zeros(4, "float32")
    array.flags.writeable = False
    with pytest.raises(ConfigurationError, match=r"access|memory on|address"):
        executable.rebind([(x, array)])
    with pytest.raises(ConfigurationError, match="knows"):
        executable.rebind([((x.address, 16), (4096, 16))])
    with pytest.raises(ConfigurationError, match="at least 16 bytes, got 8"):
        executable.rebind([((x.address, 16), (closed_range(bench), 8))])
    run(executable, bench)
    assert x.read().tolist() == [1.0] * 4


def closed_range(bench: Bench) -> int:
    return bench.alloc(16)


@pytest.mark.gpu
def test_host_memory_for_device_memory_is_refused() -> None:
    from helpers.tensors import cuda_driver

    bench = Bench(cuda_driver())
    x = _tensor(bench, 4)
    fill = bench.kernel_params(fill_value, x.data_ptr(), 1.0, 4)
    executable = graph_of(bench, fill).instantiate()
    with pytest.raises(ConfigurationError, match=r"expected memory on CUDA device .* the host"):
        executable.rebind([(x, torch.zeros(4))])
    executable.close()
    bench.close()


def test_a_name_that_several_buffers_share_is_refused(bench: Bench) -> None:
    a, b = _tensor(bench, 4), _tensor(bench, 4)
    handle = build(bench, (Step(bench.kernel_params(axpy, 1.0, a.data_ptr(), b.data_ptr(), 4)),))
    owners = OwnerSet().with_(a, b, label="both")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    with pytest.raises(ConfigurationError, match="one of 2"):
        executable.rebind({"both": _tensor(bench, 4)})


def test_memory_that_the_graph_allocates_is_not_exchanged(bench: Bench) -> None:
    from graphcore.driver.records import AllocParams, FreeParams

    graph = bench.new_graph()
    made = bench.add(graph, AllocParams(64))
    params = bench.driver.node_params(made)
    assert isinstance(params, AllocParams)
    filled_node = bench.add_kernel(graph, fill_value, params.address, 1.0, 4, after=[made])
    bench.add(graph, FreeParams(params.address), [filled_node])
    y = bench.alloc(64)
    executable = Graph(bench.driver, graph, owned=False).instantiate()
    with pytest.raises(ConfigurationError, match="memory that the graph allocates itself"):
        executable.rebind([((params.address, 64), (y, 64))])


def test_rebinding_in_a_capture_or_after_closing_is_refused(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, bench.kernel_params(fill_value, x, 1.0, 4)).instantiate()
    with graphcore.capture(driver=bench.driver), pytest.raises(LifecycleError, match="capture"):
        executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert values(bench, x) == [1.0] * 4
    executable.close()
    with pytest.raises(LifecycleError, match="closed"):
        executable.rebind([((x, 16), (y, 16))])


def test_the_kernels_of_this_file_do_what_they_say(bench: Bench) -> None:
    """The control of the tests above: without an exchange the old buffer is what is worked on."""
    kernels: tuple[Kernel, ...] = (packed, tagged)
    for each in kernels:
        bench.driver.function(each)
    x, out = bench.put([1.0] * 4), bench.alloc(16)
    config: LaunchConfig = ONE_BLOCK
    work = bench.kernel_params(packed, structure(x, 3, out), config=config)
    run(graph_of(bench, work).instantiate(), bench)
    assert values(bench, out, 1) == [4.0]
