"""An executable is on the device before its first change: once, and never a second time.

CUDA gives one whose parameters are changed before its first upload or launch a form that stays
slow for life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.contract import Bench, copy_1d, in_thread
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, fill_value, write_cluster_size
from helpers.tensors import replay

import graphcore
from graphcore import Buffer, Graph, GraphExec, LifecycleError, UpdateStatus
from graphcore.driver import CaptureMode
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    AllocParams,
    ConditionalParams,
    FreeParams,
    LaunchConfig,
    MemsetParams,
    NodeParams,
)
from graphcore.errors import CudaError

UPLOADS = ("upload", "upload_aside")
CHANGES = (
    "update_exec", "set_exec_node_params", "bind_exec_kernel_update", "set_node_enabled",
)  # fmt: skip


def graph_of(bench: Bench, *params: NodeParams) -> Graph:
    """A graph of our own: borrowed ones may change behind our back."""
    return Graph(bench.driver, bench.driver.clone_graph(build(bench, tuple(map(Step, params)))))


def filling(bench: Bench, x: int, value: float) -> Graph:
    """Four fills: a rebind of them is a whole update, one of many would be node by node."""
    return graph_of(bench, *[bench.kernel_params(fill_value, x, value, 4)] * 4)


@contextmanager
def calls_of(bench: Bench) -> Iterator[list[str]]:
    """The uploads and changes that the driver is asked for, in order."""
    seen: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        real = getattr(bench.driver, name)

        def call(*arguments: object, **keywords: object) -> object:
            if name in CHANGES or "upload" not in seen[-1:]:
                seen.append("upload" if name in UPLOADS else name)
            return real(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*UPLOADS, *CHANGES):
            patch.setattr(bench.driver, name, noting(name))
        yield seen


def capturing(bench: Bench, mode: CaptureMode = "thread_local") -> graphcore.Capture:
    return graphcore.capture(bench.stream, driver=bench.driver, mode=mode, on_legacy_work="ignore")


Change = Callable[[Bench, GraphExec, int], object]

FIRST_CHANGES: dict[str, tuple[Change, str]] = {
    "update": (lambda bench, it, x: it.update(filling(bench, x, 2.0)), "update_exec"),
    "set_params": (
        lambda _, it, x: it.set_params(0, (x, 2.0, 4)),
        "set_exec_node_params",
    ),
    "bind_params": (lambda _, it, x: it.bind_params(0)(x, 2.0, 4), "bind_exec_kernel_update"),
    "rebind": (lambda _, it, x: it.rebind([((x, 16), (x + 16, 16))]), "update_exec"),
}


@pytest.mark.parametrize("kind", FIRST_CHANGES)
def test_the_first_change_uploads_before_and_no_later_one_does(bench: Bench, kind: str) -> None:
    x = bench.put([0.0] * 8)
    executable = filling(bench, x, 1.0).instantiate()
    change, call = FIRST_CHANGES[kind]
    with calls_of(bench) as seen:
        change(bench, executable, x)
        assert seen[:2] == ["upload", call]
        executable.update(filling(bench, x, 3.0))
        executable.set_params(0, (x, 4.0, 4))
        executable.update(filling(bench, x, 5.0))
        assert seen.count("upload") == 1
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [5.0] * 4


@pytest.mark.parametrize("before", ["launched", "launched on the current stream", "uploaded"])
def test_what_is_on_the_device_is_not_uploaded(bench: Bench, before: str) -> None:
    x = bench.put([0.0] * 4)
    executable = filling(bench, x, 1.0).instantiate()
    if before == "uploaded":
        executable.upload(bench.stream)
    else:
        executable.launch(None if "current" in before else bench.stream)
    with calls_of(bench) as seen:
        executable.update(filling(bench, x, 2.0))
        executable.set_params(1, (x, 2.0, 4))
        assert "upload" not in seen
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [2.0] * 4


def test_switching_a_node_off_uploads_nothing_as_it_would_not_help(bench: Bench) -> None:
    executable = filling(bench, bench.put([0.0] * 4), 1.0).instantiate()
    with calls_of(bench) as seen:
        executable.enable(0, False)
        assert seen == ["set_node_enabled"]


def test_an_executable_that_an_update_had_to_build_is_uploaded_before_its_own_first_change(
    bench: Bench,
) -> None:
    x = bench.put([0.0] * 4)
    executable = filling(bench, x, 1.0).instantiate()
    replay(executable, bench.stream)
    other = [graph_of(bench, bench.kernel_params(fill_value, x, value, 4)) for value in (2.0, 3.0)]
    with calls_of(bench) as seen:
        assert executable.update(other[0]).status is UpdateStatus.REINSTANTIATED
        assert "upload" not in seen
        assert executable.update(other[1]).status is UpdateStatus.UPDATED
        assert seen[-2:] == ["upload", "update_exec"]
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [3.0] * 4


def test_a_bound_change_of_an_executable_that_was_built_anew_uploads_it_first(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    params = bench.kernel_params(write_cluster_size, x)
    wide = LaunchConfig((2, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    executable = graph_of(bench, params).instantiate()
    change = executable.bind_params(0)
    clustered = graph_of(bench, bench.kernel_params(write_cluster_size, x, config=wide))
    with calls_of(bench) as seen:
        assert executable.update(clustered).status is UpdateStatus.REINSTANTIATED
        assert "upload" not in seen
        change(x + 4)
        assert seen[:2] == ["upload", "set_exec_node_params"]
    replay(executable, bench.stream)


def test_a_trap_that_is_found_before_the_driver_is_asked_uploads_nothing(bench: Bench) -> None:
    x = bench.alloc(4)
    config = LaunchConfig((2, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    plain, clustered = (
        graph_of(bench, bench.kernel_params(write_cluster_size, x, **extra))
        for extra in ({}, {"config": config})
    )
    executable = plain.instantiate()
    with calls_of(bench) as seen:
        assert not executable.update(clustered, reinstantiate=False).is_current
        assert seen == []


@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_a_first_change_beside_the_capture_of_another_thread_leaves_it_alone(
    bench: Bench, mode: CaptureMode
) -> None:
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable, other = filling(bench, x, 1.0).instantiate(), filling(bench, x, 2.0)
    with capturing(bench, mode) as capture:
        bench.launch(add_one, y, 4)
        assert in_thread(lambda: executable.update(other)).is_current
        bench.launch(add_one, y, 4)
    with capture.graph.instantiate() as captured:
        replay(captured, bench.stream)
    replay(executable, bench.stream)
    assert bench.get(y, 4) == [2.0] * 4
    assert bench.get(x, 4) == [2.0] * 4


@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
def test_an_upload_aside_inside_a_capture_leaves_it_alone(bench: Bench, mode: CaptureMode) -> None:
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = filling(bench, x, 1.0).instantiate()
    with capturing(bench, mode) as capture:
        bench.launch(add_one, y, 4)
        bench.driver.upload_aside(executable.handle)
        bench.launch(add_one, y, 4)
    with capture.graph.instantiate() as captured:
        replay(captured, bench.stream)
    assert bench.get(x, 4) == [0.0] * 4
    assert bench.get(y, 4) == [2.0] * 4


def test_a_refused_change_inside_a_capture_uploads_nothing(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable, other = filling(bench, x, 1.0).instantiate(), filling(bench, x, 2.0)
    with calls_of(bench) as seen, capturing(bench):
        bench.launch(add_one, x, 4)
        with pytest.raises(LifecycleError):
            executable.update(other)
        with pytest.raises(LifecycleError):
            executable.set_params(0, (x, 2.0, 4))
    assert seen == []


def test_a_failing_upload_is_told_and_the_change_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.put([0.0] * 4)
    executable = filling(bench, x, 1.0).instantiate()
    driver.faults.inject("upload", code="CUDA_ERROR_OUT_OF_MEMORY")
    with caplog.at_level(logging.WARNING, "graphcore"):
        assert executable.update(filling(bench, x, 2.0)).status is UpdateStatus.UPDATED
        assert executable.update(filling(bench, x, 3.0)).status is UpdateStatus.UPDATED
    (told,) = caplog.records
    assert "not uploaded ahead of its first change" in told.message
    assert "OUT_OF_MEMORY" in told.message
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [3.0] * 4


def test_an_interrupted_upload_leaves_the_executable_as_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bench.put([0.0] * 4)
    executable = filling(bench, x, 1.0).instantiate()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.driver, "upload_aside", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executable.update(filling(bench, x, 2.0))
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4
    assert executable.updates.updated == 0


def test_a_first_change_of_a_closed_driver_fails_as_the_change_does() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.put([0.0] * 4)
    executable, other = filling(bench, x, 1.0).instantiate(), filling(bench, x, 2.0)
    driver.close()
    with pytest.raises(CudaError):
        executable.update(other)


def test_graphs_that_own_memory_are_updated_before_their_first_launch(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    graphs = []
    for value in (0x40000000, 0x40400000):
        handle = bench.new_graph()
        made = bench.driver.add_node(handle, [], AllocParams(1024))
        params = bench.driver.node_params(made)
        assert isinstance(params, AllocParams)
        filled = bench.add(handle, MemsetParams(params.address, value, 4, 4), [made])
        copied = bench.add(handle, copy_1d(x, params.address, 16), [filled])
        bench.driver.add_node(handle, [copied], FreeParams(params.address))
        graphs.append(Graph(bench.driver, handle, owned=False))
    executable = graphs[0].instantiate()
    outcome = executable.update(graphs[1])
    assert outcome.is_current
    replay(executable, bench.stream, times=2)
    assert bench.get(x, 4) == [3.0] * 4


def test_graphs_with_conditional_nodes_are_updated_before_their_first_launch(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    graphs = []
    for value in (2.0, 3.0):
        handle = bench.new_graph()
        condition = bench.driver.create_conditional(handle, 1)
        node = bench.add(handle, ConditionalParams(condition, "if"))
        params = bench.driver.node_params(node)
        assert isinstance(params, ConditionalParams)
        bench.add_kernel(params.bodies[0], fill_value, x, value, 4)
        graphs.append(Graph(bench.driver, handle, owned=False))
    executable = graphs[0].instantiate()
    assert executable.update(graphs[1]).status is UpdateStatus.UPDATED
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [3.0] * 4


def test_owners_of_a_first_update_go_as_of_any_other(bench: Bench) -> None:
    buffer = Buffer.allocate((4,), "float32", driver=bench.driver)
    graph = filling(bench, buffer.address, 1.0)
    executable = graph.instantiate()
    executable.update(filling(bench, bench.put([0.0] * 4), 2.0))
    assert executable.is_fenced, "nothing was launched"
    buffer.close()
