"""GraphExec.update: right results, and every refusal explained by reason, node, field and rule."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.graph_specs import Child, Spec, Step, build
from helpers.kernels import add_one, fill_value, scale, write_cluster_size
from helpers.tensors import filled, replay

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    CudaError,
    Graph,
    GraphExec,
    LifecycleError,
    UpdateRefused,
    UpdateStatus,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    AllocParams,
    EmptyParams,
    FreeParams,
    KernelParams,
    LaunchConfig,
    MemoryKind,
    MemsetParams,
    NodeParams,
    RawUpdate,
    UpdateResult,
)
from graphcore.executable.update import explain_refusal
from graphcore.resources.lifetime import OwnerSet


def owned(bench: Bench, handle: Any) -> Graph:
    """A graph of the bench, which destroys it."""
    return Graph(bench.driver, handle, owned=False)


def single(bench: Bench, params: NodeParams) -> Graph:
    return owned(bench, build(bench, (Step(params),)))


def filling(bench: Bench, address: int, value: float) -> Graph:
    return single(bench, bench.kernel_params(fill_value, address, value, 4))


def chain(bench: Bench, x: int, *after: tuple[int, ...]) -> Spec:
    kernel = bench.kernel_params(add_one, x, 4)
    return tuple(Step(kernel, each) for each in after)


def wide(**changes: Any) -> LaunchConfig:
    return LaunchConfig((4, 1, 1), (32, 1, 1), **changes)


# ---- accepted -----------------------------------------------------------------------------------


def test_an_update_in_place_runs_the_new_parameters(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = filling(bench, x, 1.0).instantiate()
    handle = executable.handle
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4
    bench.poison(x, 16)
    second = filling(bench, x, 2.0)
    outcome = executable.update(second)
    assert outcome.status is UpdateStatus.UPDATED
    assert outcome.is_current
    assert (outcome.node, outcome.field, outcome.rule, outcome.named_by) == (None,) * 4
    assert outcome.result is UpdateResult.SUCCESS
    assert executable.handle == handle
    assert executable.graph is second
    # the bound launch of before does the new work
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [2.0] * 4


def test_the_decision_and_its_reason_are_logged_at_info(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    x = bench.alloc(16)
    executable = filling(bench, x, 1.0).instantiate()
    with caplog.at_level(logging.INFO, "graphcore"):
        executable.update(filling(bench, x, 2.0))
        executable.update(single(bench, fill_1d(x, 0, 4)))
    assert "updated in place" in caplog.messages[0]
    assert "reinstantiated: node_type_changed" in caplog.messages[1]


# ---- refused ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Two graphs over 128 bytes at ``x``, the driver's answer, and what is said about it."""

    before: Callable[[Bench, int], Spec]
    after: Callable[[Bench, int], Spec]
    result: UpdateResult
    named_by: str
    field: str
    rule: str


def one(make: Callable[[Bench, int], NodeParams]) -> Callable[[Bench, int], Spec]:
    return lambda bench, x: (Step(make(bench, x)),)


def kernel(**changes: Any) -> Callable[[Bench, int], Spec]:
    return one(lambda bench, x: bench.kernel_params(add_one, x, 4, config=wide(**changes)))


def wired(*after: tuple[int, ...]) -> Callable[[Bench, int], Spec]:
    return lambda bench, x: chain(bench, x, *after)


def _pinned_source(bench: Bench, x: int) -> NodeParams:
    return copy_1d(x, bench.pin(bytes(16)), 16, src_memory=MemoryKind.HOST)


TWO_ROWS = one(lambda _, x: copy_2d(x, x + 64, 2, 2, 4, 4))
CASES: dict[str, Case] = {
    "one_node_more": Case(
        wired((), (0,)),
        wired((), (0,), (1,)),
        UpdateResult.TOPOLOGY_CHANGED,
        "graphcore",
        "nodes",
        "number of nodes",
    ),
    "an_edge_more": Case(
        wired((), (0,), (1,)),
        wired((), (0,), (0, 1)),
        UpdateResult.TOPOLOGY_CHANGED,
        "driver",
        "dependencies",
        "number of dependencies",
    ),
    "an_edge_moved": Case(
        wired((), (0,), (1,)),
        wired((), (0,), (0,)),
        UpdateResult.TOPOLOGY_CHANGED,
        "driver",
        "edges",
        "exit nodes",
    ),
    "kernel_to_memset": Case(
        kernel(),
        one(lambda _, x: fill_1d(x, 0, 4)),
        UpdateResult.NODE_TYPE_CHANGED,
        "driver",
        "kind",
        "kind",
    ),
    "cooperative": Case(
        kernel(),
        kernel(cooperative=True),
        UpdateResult.ATTRIBUTES_CHANGED,
        "driver",
        "cooperative",
        "cooperative",
    ),
    "memcpy_host_source": Case(
        one(lambda _, x: copy_1d(x, x + 64, 16)),
        one(_pinned_source),
        UpdateResult.PARAMETERS_CHANGED,
        "driver",
        "src.memory",
        "kind of memory",
    ),
    "memcpy_2d_height": Case(
        TWO_ROWS,
        one(lambda _, x: copy_2d(x, x + 64, 2, 3, 4, 4)),
        UpdateResult.PARAMETERS_CHANGED,
        "driver",
        "height",
        "more than one row",
    ),
    "memset_2d_height": Case(
        one(lambda _, x: MemsetParams(x, 1, 1, 2, height=2, pitch=4)),
        one(lambda _, x: MemsetParams(x, 1, 1, 2, height=3, pitch=4)),
        UpdateResult.PARAMETERS_CHANGED,
        "driver",
        "height",
        "more than one row",
    ),
    "memset_1d_to_2d": Case(
        one(lambda _, x: fill_1d(x, 1, 4, 1)),
        one(lambda _, x: MemsetParams(x, 1, 1, 2, height=2, pitch=4)),
        UpdateResult.PARAMETERS_CHANGED,
        "driver",
        "height",
        "more than one row",
    ),
}


def graphs_of(bench: Bench, name: str) -> tuple[int, Graph, Graph]:
    x = bench.put(range(32))
    case = CASES[name]
    old, new = (owned(bench, build(bench, spec(bench, x))) for spec in (case.before, case.after))
    return x, old, new


def bytes_after(bench: Bench, executable: GraphExec, x: int) -> list[int]:
    bench.driver.write(x, bytes(range(128)))
    replay(executable, bench.stream)
    return bench.get(x, 128, "uint8")


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_without_reinstantiation_changes_nothing_and_is_explained(
    bench: Bench, name: str
) -> None:
    case = CASES[name]
    x, old, new = graphs_of(bench, name)
    executable = old.instantiate()
    before = bytes_after(bench, executable, x)
    outcome = executable.update(new, reinstantiate=False)
    assert outcome.status is UpdateStatus.REFUSED
    assert not outcome.is_current
    assert outcome.result is case.result
    assert outcome.named_by == case.named_by
    assert outcome.field == case.field
    assert outcome.rule is not None
    assert case.rule in outcome.rule
    assert case.result.value in outcome.reason
    assert outcome.node is not None
    assert outcome.node.handle in bench.driver.nodes(new.handle)
    assert executable.graph is old
    assert bytes_after(bench, executable, x) == before


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_with_reinstantiation_runs_the_new_graph(bench: Bench, name: str) -> None:
    x, old, new = graphs_of(bench, name)
    executable = old.instantiate()
    replay(executable, bench.stream)
    outcome = executable.update(new)
    assert outcome.status is UpdateStatus.REINSTANTIATED
    assert outcome.field == CASES[name].field
    control = new.instantiate()
    assert bytes_after(bench, executable, x) == bytes_after(bench, control, x)
    assert executable.graph is new


def test_strict_makes_a_refusal_an_exception_and_changes_nothing(bench: Bench) -> None:
    x, old, new = graphs_of(bench, "cooperative")
    executable = old.instantiate()
    with pytest.raises(UpdateRefused, match=r"attributes_changed: node 0 .*cooperative"):
        executable.update(new, reinstantiate=False, strict=True)
    assert executable.graph is old
    assert bytes_after(bench, executable, x)
    # with re-instantiation allowed there is nothing to be strict about
    assert executable.update(new, strict=True).status is UpdateStatus.REINSTANTIATED


def test_a_refusal_leaves_no_error_behind(bench: Bench) -> None:
    x, old, new = graphs_of(bench, "kernel_to_memset")
    executable = old.instantiate()
    executable.update(new, reinstantiate=False)
    bench.driver.synchronize()
    tensor = filled(bench.driver, 1.0)
    assert (tensor + 1).tolist() == [2.0] * 4
    assert bytes_after(bench, executable, x)


# ---- the cluster trap ---------------------------------------------------------------------------


def clustered(bench: Bench, out: int, size: int) -> Graph:
    config = wide(cluster=(size, 1, 1))
    return single(bench, bench.kernel_params(write_cluster_size, out, config=config))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)], ids=str)
def test_another_cluster_size_takes_effect_and_the_outcome_says_why(
    bench: Bench, before: int, after: int
) -> None:
    out = bench.alloc(4)
    executable = clustered(bench, out, before).instantiate()
    replay(executable, bench.stream)
    assert bench.get(out, 1, "int32") == [before]
    outcome = executable.update(clustered(bench, out, after))
    assert outcome.status is UpdateStatus.REINSTANTIATED
    assert outcome.field == "cluster"
    assert outcome.named_by == "graphcore"
    assert outcome.result is None
    assert "keeps the old one" in str(outcome)
    replay(executable, bench.stream)
    assert bench.get(out, 1, "int32") == [after]


def test_another_cluster_size_is_refused_where_nothing_may_be_built(bench: Bench) -> None:
    out = bench.alloc(4)
    executable = clustered(bench, out, 2).instantiate()
    outcome = executable.update(clustered(bench, out, 4), reinstantiate=False)
    assert outcome.status is UpdateStatus.REFUSED
    replay(executable, bench.stream)
    assert bench.get(out, 1, "int32") == [2]


def test_the_same_cluster_size_is_updated_in_place(bench: Bench) -> None:
    out, other = bench.alloc(4), bench.alloc(4)
    executable = clustered(bench, out, 2).instantiate()
    assert executable.update(clustered(bench, other, 2)).status is UpdateStatus.UPDATED
    replay(executable, bench.stream)
    assert bench.get(other, 1, "int32") == [2]


def test_a_graph_of_several_cluster_sizes_is_updated_with_itself_in_place(bench: Bench) -> None:
    outs = [bench.alloc(4), bench.alloc(4)]
    config = [wide(cluster=(size, 1, 1)) for size in (2, 4)]
    kernels = [
        bench.kernel_params(write_cluster_size, out, config=each)
        for out, each in zip(outs, config, strict=True)
    ]
    graph = owned(bench, build(bench, tuple(map(Step, kernels))))
    executable = graph.instantiate()
    assert executable.update(graph).status is UpdateStatus.UPDATED
    replay(executable, bench.stream)
    assert [bench.get(out, 1, "int32") for out in outs] == [[2], [4]]
    # and with another graph of the same sizes
    again = owned(bench, build(bench, tuple(map(Step, kernels))))
    assert executable.update(again).status is UpdateStatus.UPDATED


@pytest.mark.parametrize("in_child", [False, True], ids=["", "in_child"])
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=["kept", "swapped"])
def test_graphs_are_read_whole_only_where_attributes_may_have_moved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], in_child: bool
) -> None:
    def made(outs: list[int], sizes: tuple[int, int]) -> Graph:
        steps = tuple(
            Step(bench.kernel_params(write_cluster_size, out, config=wide(cluster=(size, 1, 1))))
            for out, size in zip(outs, sizes, strict=True)
        )
        return owned(bench, build(bench, (Step(Child(steps)),) if in_child else steps))

    executable = made([bench.alloc(4), bench.alloc(4)], (2, 4)).instantiate()
    outs = [bench.alloc(4), bench.alloc(4)]
    new, reads = made(outs, sizes), []
    original = bench.driver.all_params
    monkeypatch.setattr(
        bench.driver, "all_params", lambda graph: reads.append(graph) or original(graph)
    )
    outcome = executable.update(new)
    is_kept = sizes == (2, 4)
    assert outcome.status is (UpdateStatus.UPDATED if is_kept else UpdateStatus.REINSTANTIATED)
    assert (not reads) == (is_kept and not in_child)
    for out in outs:
        bench.poison(out, 4)
    replay(executable, bench.stream)
    assert [bench.get(out, 1, "int32") for out in outs] == [[size] for size in sizes]


def test_a_cluster_size_changed_in_the_graph_itself_is_found(bench: Bench) -> None:
    out = bench.alloc(4)
    graph = clustered(bench, out, 2)
    executable = graph.instantiate()
    assert executable.update(graph).status is UpdateStatus.UPDATED
    [node] = bench.driver.nodes(graph.handle)
    params = bench.kernel_params(write_cluster_size, out, config=wide(cluster=(4, 1, 1)))
    bench.driver.destroy_node(node)
    bench.add(graph.handle, params)
    outcome = executable.update(graph)
    assert outcome.status is UpdateStatus.REINSTANTIATED
    assert outcome.field == "cluster"
    replay(executable, bench.stream)
    assert bench.get(out, 1, "int32") == [4]


# ---- explanations that the driver's answer decides ----------------------------------------------


def test_where_the_driver_stumbles_over_something_else_its_word_counts(bench: Bench) -> None:
    x = bench.alloc(16)
    old, new = filling(bench, x, 1.0).snapshot(), filling(bench, x, 2.0).snapshot()
    node = new.nodes[0]
    answer = RawUpdate(UpdateResult.FUNCTION_CHANGED, node.handle)
    refusal = explain_refusal(answer, old, new)
    assert refusal.node == node
    assert refusal.named_by == "driver"
    assert refusal.field == "argument 1"
    assert "function" in refusal.rule
    # a node that did not change is still the one the driver names
    same = explain_refusal(answer, new, new)
    assert (same.node, same.field) == (node, None)
    # without the old graph there is still the driver's word
    blind = explain_refusal(answer, None, new)
    assert (blind.node, blind.field, blind.named_by) == (node, None, "driver")
    # and without a node still the rule
    bare = explain_refusal(RawUpdate(UpdateResult.ERROR), old, new)
    assert (bare.node, bare.field, bare.named_by) == (None, None, None)
    assert bare.reason == "error: the graph: the driver gives no reason"


def test_the_drivers_node_wins_over_ours(bench: Bench) -> None:
    x = bench.alloc(128)
    pair = (copy_2d(x, x + 64, 2, 2, 4, 4), copy_2d(x, x + 64, 2, 3, 4, 4))
    spec = (Step(pair[0]), Step(pair[0]), Step(pair[0]))
    changed = (Step(pair[1]), Step(pair[0]), Step(pair[1]))
    old, new = (owned(bench, build(bench, each)).snapshot() for each in (spec, changed))
    answer = RawUpdate(UpdateResult.PARAMETERS_CHANGED, new.nodes[2].handle)
    refusal = explain_refusal(answer, old, new)
    assert refusal.node == new.nodes[2]
    assert refusal.field == "height"


def test_a_graph_closed_since_still_explains(bench: Bench) -> None:
    _, old, new = graphs_of(bench, "memcpy_2d_height")
    executable = old.instantiate()
    old.close()
    outcome = executable.update(new, reinstantiate=False)
    assert outcome.field == "height"


# ---- bad calls, failures, owners ----------------------------------------------------------------


def test_updating_in_a_capture_is_refused(bench: Bench) -> None:
    x = bench.alloc(16)
    graph = filling(bench, x, 1.0)
    executable = graph.instantiate()
    with graphcore.capture(driver=bench.driver) as capture:
        with pytest.raises(LifecycleError, match="while a capture is under way"):
            executable.update(graph)
        bench.launch(add_one, x, 4, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1


def test_updating_what_is_closed_is_refused(bench: Bench) -> None:
    x = bench.alloc(16)
    graph = filling(bench, x, 1.0)
    executable = graph.instantiate()
    other = filling(bench, x, 2.0)
    other.close()
    with pytest.raises(LifecycleError, match="closed"):
        executable.update(other)
    executable.close()
    with pytest.raises(LifecycleError, match="update: expected an open executable"):
        executable.update(graph)


@pytest.mark.parametrize("wrong", [None, 3, "graph"])
def test_what_is_no_graph_is_a_type_error(bench: Bench, wrong: Any) -> None:
    executable = owned(bench, bench.driver.create_graph()).instantiate()
    with pytest.raises(
        CacheTypeError, match=f"graph: expected a Graph, got {type(wrong).__name__}"
    ):
        executable.update(wrong)


def test_a_graph_of_another_device_is_refused() -> None:
    drivers = [graphcore.open_driver("emulated", devices=2, device=number) for number in (0, 1)]
    graphs = [Graph(driver, driver.create_graph()) for driver in drivers]
    executable = graphs[0].instantiate()
    with pytest.raises(ConfigurationError, match="expected one of driver emulated:0, got one of"):
        executable.update(graphs[1])


def test_a_failed_reinstantiation_keeps_the_old_executable() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, old, new = graphs_of(bench, "kernel_to_memset")
    executable = old.instantiate()
    before = bytes_after(bench, executable, x)
    driver.faults.inject("instantiate", code="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        executable.update(new)
    assert executable.graph is old
    assert bytes_after(bench, executable, x) == before
    driver.faults.inject("update_exec")
    with pytest.raises(CudaError):
        executable.update(new)
    assert bytes_after(bench, executable, x) == before
    assert executable.update(new).status is UpdateStatus.REINSTANTIATED


def test_a_graph_that_allocates_gives_up_its_old_executable_first(bench: Bench) -> None:
    graph = owned(bench, bench.new_graph())
    alloc = bench.add(graph.handle, AllocParams(64))
    params = bench.driver.node_params(alloc)
    assert isinstance(params, AllocParams)
    bench.add(graph.handle, FreeParams(params.address), [alloc])
    executable = graph.instantiate()
    replay(executable, bench.stream)
    bench.add(graph.handle, EmptyParams())
    outcome = executable.update(graph)
    assert outcome.status is UpdateStatus.REINSTANTIATED
    assert outcome.result is not UpdateResult.SUCCESS
    replay(executable, bench.stream)
    assert len(executable.graph.snapshot().nodes) == 3


def test_owners_are_swapped_whole_and_only_after_the_driver_accepted(bench: Bench) -> None:
    class Resource:
        pass

    first, second = Resource(), Resource()
    watch_first, watch_second = weakref.ref(first), weakref.ref(second)
    x = bench.alloc(16)

    def with_owner(spec: Spec, owner: object, label: str) -> Graph:
        handle = build(bench, spec)
        return Graph(bench.driver, handle, owners=OwnerSet().with_(owner, label=label), owned=False)

    fill = (Step(bench.kernel_params(fill_value, x, 1.0, 4)),)
    old = with_owner(fill, first, "first")
    refused = with_owner((*fill, *fill), second, "second")
    executable = old.instantiate()
    executable.update(refused, reinstantiate=False)
    assert executable.owners.labels() == ("first",)
    accepted = with_owner(fill, second, "second")
    executable.update(accepted)
    assert executable.owners.labels() == ("second",)
    old.close()
    refused.close()
    accepted.close()
    del first, second, old, refused, accepted
    gc.collect()
    assert watch_first() is None
    assert watch_second() is not None
    executable.close()
    gc.collect()
    assert watch_second() is None


def test_a_conditional_graph_is_instantiated_once_and_that_is_said_before(bench: Bench) -> None:
    graph = owned(bench, bench.new_graph())
    x = bench.alloc(16)
    _, _, bodies = bench.add_conditional(graph.handle, "if", default=1)
    bench.add_kernel(bodies[0], fill_value, x, 3.0, 4)
    executable = graph.instantiate()
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [3.0] * 4
    with pytest.raises(LifecycleError, match="conditional node"):
        graph.instantiate()


def test_a_captured_graph_updates_an_executable_of_an_earlier_capture(
    graphcore_driver: Driver,
) -> None:
    y = filled(graphcore_driver, 0.0)

    def capture(value: float) -> Graph:
        with graphcore.capture(driver=graphcore_driver) as capturing:
            y.fill_(value)
        return capturing.graph

    executable = capture(1.0).instantiate()
    outcome = executable.update(capture(2.0))
    assert outcome.is_current
    replay(executable)
    assert y.tolist() == [2.0] * 4


def test_a_function_of_the_same_layout_is_taken_in_place(bench: Bench) -> None:
    x = bench.put([3.0, 3.0, 3.0, 3.0])
    executable = single(bench, bench.kernel_params(fill_value, x, 1.0, 4)).instantiate()
    params = bench.kernel_params(scale, x, 2.0, 4)
    assert isinstance(params, KernelParams)
    assert executable.update(single(bench, params)).status is UpdateStatus.UPDATED
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [6.0] * 4


def test_an_outcome_shows_itself_as_the_sentence_it_prints() -> None:
    outcome = graphcore.UpdateOutcome(
        graphcore.UpdateStatus.REFUSED, "too many nodes", field="nodes", advice="capture again"
    )
    assert repr(outcome) == "<UpdateOutcome refused: too many nodes (capture again)>"
