"""Graph: owned and adopted, read, cloned, instantiated, closed."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, fill_value, write_cluster_size
from helpers.tensors import cuda_driver, filled, replay

import graphcore
from graphcore import CacheTypeError, ConfigurationError, CudaError, Graph, LifecycleError
from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import LaunchConfig
from graphcore.errors import GraphcoreWarning
from graphcore.interop.torch import MemoryPool
from graphcore.resources.lifetime import OwnerSet


def handle_of(bench: Bench, address: int, value: float = 1.0) -> Any:
    return build(bench, (Step(bench.kernel_params(fill_value, address, value, 4)),))


def is_alive(bench: Bench, handle: Any) -> bool:
    try:
        bench.driver.nodes(handle)
    except CudaError:
        return False
    return True


# ---- reading ------------------------------------------------------------------------------------


def test_a_graph_is_read_with_its_labels_and_drawn(bench: Bench) -> None:
    x = bench.alloc(16)
    graph = Graph(bench.driver, handle_of(bench, x), annotations=((0, 1, "step"),), owned=False)
    snapshot = graph.snapshot()
    assert [(node.name, node.label) for node in snapshot.nodes] == [("fill_value", "step")]
    assert "fill_value" in graph._repr_html_()
    assert repr(graph) == f"<Graph 1 node {bench.driver.name}:{bench.driver.device} borrowed>"


def test_the_fingerprint_is_that_of_what_the_graph_touches(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    one, same, other = (
        Graph(bench.driver, handle_of(bench, address), owned=False) for address in (x, x, y)
    )
    assert one.fingerprint().digest == same.fingerprint().digest
    assert one.fingerprint().digest != other.fingerprint().digest
    names = ({"x": (x, 16)}, {"x": (y, 16)})
    assert one.fingerprint(names[0]).digest == other.fingerprint(names[1]).digest


def test_memory_of_the_graphs_own_pool_counts_by_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for address in (bench.alloc(16), bench.alloc(16)):
        pool = MemoryPool(bench.driver.device)
        monkeypatch.setattr(pool, "segments", lambda found=address: [(found, 16)])
        owners = OwnerSet().with_(pool, label="torch memory pool")
        graph = Graph(bench.driver, handle_of(bench, address), owners=owners, owned=False)
        assert graph.private_memory() == [(address, 16)]
        digests.append(graph.fingerprint().digest)
    assert digests[0] == digests[1]


def test_launch_attributes_of_an_owned_graph_are_read_once() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    config = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    params = bench.kernel_params(write_cluster_size, bench.alloc(4), config=config)
    owned, borrowed = (
        Graph(driver, driver.clone_graph(build(bench, (Step(params),)))),
        Graph(driver, build(bench, (Step(params),)), owned=False),
    )
    for graph in (owned, borrowed):
        assert [entry[0] for entry in graph.launch_attributes.entries] == [(2, 1, 1)]
    driver.faults.inject("nodes")
    assert owned.launch_attributes.entries
    with pytest.raises(CudaError):
        _ = borrowed.launch_attributes


# ---- adopting -----------------------------------------------------------------------------------


def test_an_adopted_handle_is_borrowed(bench: Bench) -> None:
    x = bench.alloc(16)
    handle = handle_of(bench, x)
    graph = Graph.adopt(handle, driver=bench.driver)
    assert not graph.owned
    executable = graph.instantiate()
    graph.close()
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4
    del graph
    gc.collect()
    assert is_alive(bench, handle)


def test_a_graph_of_ours_is_adopted_as_it_is(bench: Bench) -> None:
    graph = Graph(bench.driver, handle_of(bench, bench.alloc(16)), owned=False)
    assert Graph.adopt(graph) is graph


class CUgraph:
    """Looks like the binding's handle."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


class CUgraphExec(CUgraph):
    """Likewise."""


def _torch_graph(handle: int) -> Any:
    return SimpleNamespace(raw_cuda_graph=lambda: handle)


FOREIGN = {
    "torch": _torch_graph,
    "cugraph": CUgraph,
    "cuda_core_definition": lambda handle: SimpleNamespace(handle=CUgraph(handle)),
    "cuda_core_builder": lambda handle: SimpleNamespace(
        is_building=False, graph_definition=SimpleNamespace(handle=CUgraph(handle))
    ),
}


@pytest.mark.parametrize("library", FOREIGN)
def test_graphs_of_other_libraries_are_adopted_and_kept_alive(bench: Bench, library: str) -> None:
    x = bench.alloc(16)
    foreign = FOREIGN[library](handle_of(bench, x))
    graph = Graph.adopt(foreign, driver=bench.driver)
    assert foreign in graph.owners
    with graph.instantiate() as executable:
        replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4


@pytest.mark.gpu
def test_a_graph_that_torch_captured_is_adopted_and_replayed() -> None:
    import torch

    driver = cuda_driver()
    x, y = filled(driver, 1.0), filled(driver, 0.0)
    y.copy_(x * 2)
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        y.copy_(x * 2)
    y.fill_(float("nan"))
    x.fill_(4.0)
    with Graph.adopt(captured).instantiate() as executable:
        replay(executable)
    assert y.tolist() == [8.0] * 4


def _refusing_torch_graph() -> Any:
    def raw_cuda_graph() -> int:
        raise RuntimeError("keep_graph=False: the graph was destroyed")

    return SimpleNamespace(raw_cuda_graph=raw_cuda_graph)


UNREADABLE = {
    "torch_without_keep_graph": (_refusing_torch_graph, "keep_graph=True"),
    "executable_handle": (lambda: CUgraphExec(1), "an executable"),
    "cuda_core_executable": (lambda: SimpleNamespace(handle=CUgraphExec(1)), "an executable"),
    "cuda_core_building": (lambda: SimpleNamespace(is_building=True), "that is building"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_graph_that_cannot_be_read_is_refused_with_the_reason(bench: Bench, case: str) -> None:
    make, reason = UNREADABLE[case]
    with pytest.raises(ConfigurationError, match=reason):
        Graph.adopt(make(), driver=bench.driver)


@pytest.mark.parametrize("wrong", ["a graph", 1.0, True, None], ids=repr)
def test_what_is_no_graph_is_a_type_error(bench: Bench, wrong: Any) -> None:
    with pytest.raises(CacheTypeError, match="graph: expected"):
        Graph.adopt(wrong, driver=bench.driver)


def test_adopting_without_a_driver_takes_the_default_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    assert Graph.adopt(handle_of(bench, bench.alloc(16))).driver.name == "emulated"


# ---- cloning, instantiating ---------------------------------------------------------------------


def test_a_clone_has_the_same_work_owners_labels_and_outputs(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    graph = graphcore.capture_function(lambda value: value.add_(1), x, driver=graphcore_driver)
    clone = graph.clone()
    assert clone.handle != graph.handle
    assert clone.owners.labels() == graph.owners.labels()
    assert clone.annotations == graph.annotations
    assert clone.outputs is graph.outputs
    assert clone.fingerprint().digest == graph.fingerprint().digest
    graph.close()
    x.fill_(1.0)
    with clone.instantiate() as executable:
        replay(executable)
    assert x.tolist() == [2.0] * 4


def test_an_unknown_guard_is_refused(bench: Bench) -> None:
    graph = Graph(bench.driver, handle_of(bench, bench.alloc(16)), owned=False)
    with pytest.raises(ConfigurationError, match="guard: expected one of"):
        graph.instantiate(guard="always")  # type: ignore[arg-type]


# ---- the end ------------------------------------------------------------------------------------


def test_a_closed_graph_says_so_for_every_use(bench: Bench) -> None:
    graph = Graph(bench.driver, bench.driver.clone_graph(handle_of(bench, bench.alloc(16))))
    with graph:
        assert not graph.is_closed
    assert graph.is_closed
    assert repr(graph) == "<Graph closed>"
    for use in (graph.snapshot, graph.clone, graph.instantiate, graph.fingerprint):
        with pytest.raises(LifecycleError, match="graph: expected an open graph"):
            use()
    with pytest.raises(LifecycleError):
        _ = graph.handle
    graph.close()


def test_closing_destroys_the_graph_once_nothing_was_made_from_it(bench: Bench) -> None:
    x = bench.alloc(16)
    handle = bench.driver.clone_graph(handle_of(bench, x))
    graph = Graph(bench.driver, handle)
    executable = graph.instantiate()
    graph.close()
    if bench.driver.is_emulated:  # a device does not survive being asked about a dead handle
        assert is_alive(bench, handle), "an executable still explains itself by its source"
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4
    executable.close()
    del graph, executable
    gc.collect()
    if bench.driver.is_emulated:
        assert not is_alive(bench, handle)


def test_a_graph_dropped_inside_a_capture_is_destroyed_after_it() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    handle = driver.clone_graph(handle_of(bench, bench.alloc(16)))
    graph = Graph(driver, handle)
    with graphcore.capture(driver=driver):
        graph.close()
        del graph
        assert is_alive(bench, handle)
    assert not is_alive(bench, handle)


def test_a_graph_that_cannot_be_read_can_still_be_shown() -> None:
    driver = EmulatedDriver()
    graph = Graph(driver, driver.create_graph())
    driver.close()
    assert repr(graph) == "<Graph ? nodes emulated:0>"


def test_a_destroy_that_fails_is_a_warning() -> None:
    driver = EmulatedDriver()
    graph = Graph(driver, driver.create_graph())
    driver.faults.inject("destroy_graph")
    with pytest.warns(GraphcoreWarning, match="while destroying a graph"):
        graph.close()
    assert active.current() is None


def test_a_graph_whose_owners_cannot_be_recorded_is_not_leaked() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    handle = driver.clone_graph(handle_of(bench, bench.alloc(16)))
    owners = OwnerSet().with_(filled(driver, 1.0), label="x")
    driver.faults.inject("allocation_of")
    with pytest.raises(CudaError):
        Graph(driver, handle, owners=owners)
    gc.collect()
    assert not is_alive(bench, handle)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_instantiating_inside_a_capture_is_refused_and_leaves_it(bench: Bench, mode: str) -> None:
    x = bench.put([0.0] * 4)
    handle = build(bench, (Step(bench.kernel_params(add_one, x, 4)),))
    graph = Graph(bench.driver, handle, owned=False)
    with graphcore.capture(driver=bench.driver, mode=mode) as capture:
        with pytest.raises(LifecycleError, match=f"under way on this thread in mode {mode}"):
            graph.instantiate()
        bench.launch(add_one, x, 4, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1


def test_instantiating_inside_a_relaxed_capture_works(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    handle = build(bench, (Step(bench.kernel_params(add_one, x, 4)),))
    graph = Graph(bench.driver, handle, owned=False)
    with graphcore.capture(driver=bench.driver, mode="relaxed") as capture:
        executable = graph.instantiate()
        bench.launch(add_one, x, 4, stream=capture.stream)
    executable.launch(bench.stream)
    assert bench.get(x, 4) == [1.0] * 4
