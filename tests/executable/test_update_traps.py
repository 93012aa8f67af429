"""Updates that fail or lie: each is prevented, or explained by more than the driver says."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, fill_1d
from helpers.graph_specs import Child, Step, build
from helpers.kernels import add_one, fill_value, scale, write_cluster_size
from helpers.tensors import cuda_driver, replay

import graphcore
from graphcore import (
    ConfigurationError,
    Graph,
    GraphExec,
    LifecycleError,
    UpdateRefused,
    UpdateStatus,
)
from graphcore.driver import CaptureMode, Kernel, open_driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    AllocParams,
    FreeParams,
    KernelParams,
    LaunchConfig,
    MemsetParams,
    NodeParams,
    UpdateResult,
)


def graph_of(bench: Bench, *params: NodeParams) -> Graph:
    graph, last = bench.new_graph(), []
    for each in params:
        last = [bench.add(graph, each, last)]
    return Graph(bench.driver, graph, owned=False)


def filling(bench: Bench, x: int, value: float) -> Graph:
    return graph_of(bench, bench.kernel_params(fill_value, x, value, 4))


def owning(bench: Bench) -> Graph:
    """A graph that owns memory."""
    graph = bench.new_graph()
    alloc = bench.add(graph, AllocParams(64))
    params = bench.driver.node_params(alloc)
    assert isinstance(params, AllocParams)
    bench.add(graph, FreeParams(params.address), [alloc])
    return Graph(bench.driver, graph, owned=False)


# ---- a control: wrong parameters are seen, and the right ones after an update --------------------


def _kernel(bench: Bench, x: int, value: int) -> NodeParams | Child:
    return bench.kernel_params(fill_value, x, float(value), 4)


def _fill(_bench: Bench, x: int, value: int) -> NodeParams | Child:
    return fill_1d(x, ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value, 4)


def _copy(bench: Bench, x: int, value: int) -> NodeParams | Child:
    return copy_1d(x, bench.put([float(value)] * 4), 16)


def _child(bench: Bench, x: int, value: int) -> NodeParams | Child:
    return Child((Step(bench.kernel_params(fill_value, x, float(value), 4)),))


@pytest.mark.parametrize("make", [_kernel, _fill, _copy, _child])
def test_wrong_parameters_give_the_wrong_result_and_an_update_the_right_one(
    bench: Bench, make: Any
) -> None:
    x = bench.alloc(16)
    wrong, right = (
        Graph(bench.driver, build(bench, (Step(make(bench, x, value)),)), owned=False)
        for value in (13, 42)
    )
    executable = wrong.instantiate()
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [13.0] * 4
    bench.poison(x, 16)
    assert executable.update(right).status is UpdateStatus.UPDATED
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [42.0] * 4


# ---- captures under way -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_an_update_in_a_capture_is_refused_before_the_driver_is_asked(
    bench: Bench, mode: CaptureMode
) -> None:
    x = bench.alloc(16)
    executable, other = filling(bench, x, 1.0).instantiate(), filling(bench, x, 2.0)
    with graphcore.capture(driver=bench.driver, mode=mode) as capture:
        with pytest.raises(LifecycleError, match="would happen now, and at no replay"):
            executable.update(other)
        bench.launch(add_one, x, 4, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1
    assert executable.update(other).is_current


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_an_update_in_place_beside_a_capture_of_another_thread_is_done(
    bench: Bench, mode: CaptureMode
) -> None:
    x, y = bench.alloc(16), bench.put([0.0] * 4)
    executable, other = filling(bench, x, 1.0).instantiate(), filling(bench, x, 2.0)
    found = beside_a_capture(bench, mode, y, lambda: executable.update(other))
    assert found.status is UpdateStatus.UPDATED
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [2.0] * 4


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_new_executable_beside_a_capture_of_another_thread_only_where_it_breaks_nothing(
    bench: Bench, mode: CaptureMode
) -> None:
    x, y = bench.alloc(16), bench.put([0.0] * 4)
    executable, other = filling(bench, x, 1.0).instantiate(), graph_of(bench, fill_1d(x, 0, 4))
    if mode == "global":
        words = "under way on another thread in mode global"
        with pytest.raises(LifecycleError, match=words):
            beside_a_capture(bench, mode, y, lambda: executable.update(other))
    else:
        found = beside_a_capture(bench, mode, y, lambda: executable.update(other))
        assert found.status is UpdateStatus.REINSTANTIATED
    replay(executable, bench.stream)
    assert bench.get(x, 4) == ([1.0] if mode == "global" else [0.0]) * 4


def beside_a_capture(bench: Bench, mode: CaptureMode, y: int, action: Any) -> Any:
    """What ``action`` returns while another thread captures; that capture must come out whole."""
    begun, done = threading.Event(), threading.Event()
    graphs = []

    def capture() -> None:
        with graphcore.capture(driver=bench.driver, mode=mode) as capturing:
            bench.launch(add_one, y, 4, stream=capturing.stream)
            begun.set()
            done.wait(10)
        graphs.append(capturing.graph)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(10)
    try:
        return action()
    finally:
        done.set()
        thread.join()
        replay(graphs[0].instantiate(), bench.stream)
        assert bench.get(y, 4) == [1.0] * 4


# ---- graphs that own memory ---------------------------------------------------------------------


@pytest.mark.parametrize("reinstantiate", [True, False])
def test_a_graph_that_owns_memory_and_has_an_executable_is_refused_with_the_reason(
    bench: Bench, reinstantiate: bool
) -> None:
    executable, taken = owning(bench).instantiate(), owning(bench)
    other = taken.instantiate()
    outcome = executable.update(taken, reinstantiate=reinstantiate)
    assert outcome.status is UpdateStatus.REFUSED
    assert outcome.result is UpdateResult.NOT_SUPPORTED
    assert outcome.field == "executables"
    assert outcome.rule == (
        "a graph that owns memory (allocation nodes) can be in one executable at a time"
    )
    assert ("re-instantiation: expected no other" in outcome.reason) is reinstantiate
    with pytest.raises(UpdateRefused, match="owns memory"):
        executable.update(taken, strict=True)
    # both still work, and once the other is gone the update needs no exception either
    replay(executable, bench.stream)
    replay(other, bench.stream)
    other.close()
    assert executable.update(taken).is_current
    replay(executable, bench.stream)


def test_a_second_executable_of_a_graph_that_owns_memory_is_refused_before(bench: Bench) -> None:
    graph = owning(bench)
    first = graph.instantiate()
    with pytest.raises(LifecycleError, match="no other executable of a graph that owns memory"):
        graph.instantiate()
    first.close()
    replay(graph.instantiate(), bench.stream)


def test_a_conditional_graph_that_was_instantiated_is_not_built_again(bench: Bench) -> None:
    x = bench.alloc(16)

    def choosing(height: int) -> Graph:
        graph = bench.new_graph()
        _, _, bodies = bench.add_conditional(graph, "if", default=1)
        bench.add(bodies[0], MemsetParams(x, 7, 1, 2, height=height, pitch=4))
        return Graph(bench.driver, graph, owned=False)

    executable, other = choosing(2).instantiate(), choosing(3)
    kept = other.instantiate()
    outcome = executable.update(other)
    assert outcome.status is UpdateStatus.REFUSED
    assert outcome.field == "height"
    assert "CUDA allows once" in outcome.reason
    replay(executable, bench.stream)
    assert bench.get(x, 12, "uint8") == [7, 7, 255, 255] * 2 + [255] * 4
    kept.close()


# ---- graphs that are gone, or elsewhere ---------------------------------------------------------


def test_the_source_graph_may_be_gone_when_an_update_is_refused(bench: Bench) -> None:
    x = bench.alloc(16)
    with graphcore.capture(driver=bench.driver) as capture:
        bench.launch(fill_value, x, 1.0, 4, stream=capture.stream)
    executable = capture.graph.instantiate()
    capture.graph.close()
    outcome = executable.update(graph_of(bench, fill_1d(x, 0, 4)), reinstantiate=False)
    assert outcome.field == "kind"
    assert outcome.node is not None
    assert outcome.node.index == 0
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4


class TorchLike:
    """What ``Graph.adopt`` sees of a torch.cuda.CUDAGraph."""

    def __init__(self, handle: int | None) -> None:
        self.raw = handle

    def raw_cuda_graph(self) -> int:
        if self.raw is None:
            raise RuntimeError("You cannot access the raw cudaGraph_t instance until capture_end()")
        return self.raw


def test_an_adopted_graph_that_its_library_destroyed_is_refused(bench: Bench) -> None:
    import torch

    assert torch.__version__  # what is adopted is looked at where torch is loaded
    x = bench.alloc(16)
    executable = filling(bench, x, 1.0).instantiate()
    source = TorchLike(filling(bench, x, 2.0).handle)
    adopted = Graph.adopt(source, driver=bench.driver)
    assert executable.update(adopted).status is UpdateStatus.UPDATED
    source.raw = filling(bench, x, 3.0).handle
    with pytest.raises(LifecycleError, match="has another graph now"):
        executable.update(adopted)
    source.raw = None
    for use in (executable.update, Graph.snapshot, Graph.instantiate):
        with pytest.raises(LifecycleError, match="has destroyed its graph"):
            use(adopted)
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [2.0] * 4


@pytest.mark.gpu
def test_a_torch_graph_that_was_reset_is_refused() -> None:
    import torch

    driver = cuda_driver()
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
    adopted = Graph.adopt(graph, driver=driver)
    executable = adopted.instantiate()
    assert executable.update(adopted).status is UpdateStatus.UPDATED
    graph.reset()
    with pytest.raises(LifecycleError, match="has destroyed its graph"):
        executable.update(adopted)
    driver.close()


def test_a_graph_of_another_device_or_driver_is_refused_before_it_is_asked() -> None:
    first, second = (open_driver("emulated", devices=2, device=number) for number in (0, 1))
    executable = Graph(first, first.create_graph()).instantiate()
    apart = EmulatedDriver()
    for driver in (second, apart):
        graph = Graph(driver, driver.create_graph())
        with pytest.raises(ConfigurationError, match="graph: expected one of driver emulated:0"):
            executable.update(graph)


def test_a_function_of_another_context_is_named_as_the_reason() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    bench = Bench(first)
    x = bench.alloc(16)
    executable = filling(bench, x, 1.0).instantiate()
    foreign = KernelParams(
        second.function(fill_value), LaunchConfig((1, 1, 1), (32, 1, 1)), fill_value.pack(x, 2.0, 4)
    )
    outcome = executable.update(graph_of(bench, foreign), reinstantiate=False)
    assert outcome.status is UpdateStatus.REFUSED
    assert outcome.result is UpdateResult.UNSUPPORTED_FUNCTION_CHANGE
    assert outcome.named_by == "driver"
    assert outcome.rule is not None
    assert "context" in outcome.rule
    bench.close()


# ---- parameter memory ---------------------------------------------------------------------------


def test_memory_that_parameters_came_from_may_change_afterwards(bench: Bench) -> None:
    x = bench.alloc(16)
    arguments = [bytearray(data) for data in fill_value.pack(x, 5.0, 4)]
    params = KernelParams(
        bench.driver.function(fill_value),
        LaunchConfig((1, 1, 1), (32, 1, 1)),
        arguments,  # type: ignore[arg-type]
    )
    graph = graph_of(bench, params)
    executable = graph.instantiate()
    arguments[1][:] = bytes(4)
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [5.0] * 4
    # what is read is a copy too: changing it changes no graph
    (node,) = bench.driver.nodes(graph.handle)
    read = bench.driver.node_params(node)
    assert isinstance(read, KernelParams)
    assert all(isinstance(data, bytes) for data in read.arguments)
    executable.update(graph)
    bench.poison(x, 16)
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [5.0] * 4


# ---- nothing is left behind ---------------------------------------------------------------------


@pytest.mark.gpu
def test_a_refusal_is_no_error_of_anybody_who_comes_later() -> None:
    import cupy
    import torch
    from cuda.bindings import runtime

    bench = Bench(cuda_driver())
    x = bench.alloc(16)
    torch.cuda.synchronize()
    executable = filling(bench, x, 1.0).instantiate()
    outcome = executable.update(graph_of(bench, fill_1d(x, 0, 4)), reinstantiate=False)
    assert outcome.status is UpdateStatus.REFUSED
    assert int(runtime.cudaPeekAtLastError()[0]) == 0
    assert int(runtime.cudaGetLastError()[0]) == 0
    assert (torch.ones(4, device="cuda") + 1).tolist() == [2.0] * 4
    torch.cuda.synchronize()
    assert (cupy.ones(4) + 1).tolist() == [2.0] * 4
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4
    executable.close()
    bench.close()


# ---- the cluster trap, inside and after a launch ------------------------------------------------


def clustered(bench: Bench, out: int, size: int, *, in_child: bool) -> Graph:
    config = LaunchConfig((8, 1, 1), (32, 1, 1), cluster=(size, 1, 1))
    step = Step(bench.kernel_params(write_cluster_size, out, config=config))
    spec = (Step(Child((step,))),) if in_child else (step,)
    return Graph(bench.driver, build(bench, spec), owned=False)


@pytest.mark.parametrize("in_child", [False, True], ids=["", "in_child"])
@pytest.mark.parametrize("is_launched", [False, True], ids=["new", "launched"])
def test_another_cluster_size_gives_right_results_launched_or_not(
    bench: Bench, in_child: bool, is_launched: bool
) -> None:
    out = bench.alloc(4)
    executable = clustered(bench, out, 2, in_child=in_child).instantiate()
    if is_launched:
        replay(executable, bench.stream)
        assert bench.get(out, 1, "int32") == [2]
    for size in (4, 1, 8):
        outcome = executable.update(clustered(bench, out, size, in_child=in_child))
        assert outcome.status is UpdateStatus.REINSTANTIATED
        assert outcome.field == "cluster"
        bench.poison(out, 4)
        replay(executable, bench.stream)
        assert bench.get(out, 1, "int32") == [size]
    assert isinstance(executable, GraphExec)


# ---- another function of a cooperative kernel ---------------------------------------------------


def cooperative(bench: Bench, x: int, kernel: Kernel, *arguments: object) -> Graph:
    config = LaunchConfig((1, 1, 1), (32, 1, 1), cooperative=True)
    return graph_of(bench, bench.kernel_params(kernel, x, *arguments, config=config))


@pytest.mark.parametrize("is_launched", [False, True], ids=["new", "launched"])
def test_another_function_of_a_cooperative_kernel_gives_right_results(
    bench: Bench, is_launched: bool
) -> None:
    x, threes = bench.alloc(16), bench.driver.read(bench.put([3.0] * 4), 16)
    executable = cooperative(bench, x, fill_value, 2.0, 4).instantiate()
    if is_launched:
        replay(executable, bench.stream)
        assert bench.get(x, 4) == [2.0] * 4
    # the arguments are the same: the driver would keep the function
    outcome = executable.update(cooperative(bench, x, scale, 2.0, 4))
    assert outcome.status is UpdateStatus.REINSTANTIATED
    assert (outcome.field, outcome.named_by, outcome.result) == ("function", "graphcore", None)
    assert "keeps the old one" in outcome.reason
    bench.driver.write(x, threes)
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [6.0] * 4
    # other arguments are taken in place, with another function too
    for kernel, value, result in ((scale, 0.5, 1.5), (fill_value, 7.0, 7.0)):
        outcome = executable.update(cooperative(bench, x, kernel, value, 4))
        assert outcome.status is UpdateStatus.UPDATED
        bench.driver.write(x, threes)
        replay(executable, bench.stream)
        assert bench.get(x, 4) == [result] * 4


def test_another_function_of_a_cooperative_kernel_in_the_graph_itself_is_found(
    bench: Bench,
) -> None:
    x = bench.put([3.0] * 4)
    graph = cooperative(bench, x, fill_value, 1.0, 4)
    executable = graph.instantiate()
    (node,) = bench.driver.nodes(graph.handle)
    config = LaunchConfig((1, 1, 1), (32, 1, 1), cooperative=True)
    params = bench.kernel_params(scale, x, 2.0, 4, config=config)
    bench.driver.set_node_params(node, params)
    outcome = executable.update(graph)
    assert (outcome.status, outcome.field) == (UpdateStatus.REINSTANTIATED, "function")
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [6.0] * 4
