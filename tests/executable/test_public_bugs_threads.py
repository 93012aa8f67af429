"""Failures users really hit, kind 4: other threads and the default stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.isolated import run_script
from helpers.scene import Scene
from helpers.scene import __file__ as scene_file
from helpers.tensors import replay

import graphcore
from graphcore import CaptureError, CudaError
from graphcore.driver import LEGACY_STREAM, Driver, Stream


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


def _in_loader(action: Callable[[], object]) -> list[CudaError]:
    """Runs ``action`` on a thread called "loader"; the CUDA errors it got there."""
    errors: list[CudaError] = []

    def run() -> None:
        try:
            action()
        except CudaError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="loader")
    thread.start()
    thread.join()
    return errors


def _pin_memory(scene: Scene) -> None:
    scene.driver.free_pinned(scene.driver.alloc_pinned(4096))


def _allocate(scene: Scene) -> None:
    scene.driver.free(scene.driver.alloc(4096))


def _wait_for_a_stream(scene: Scene) -> None:
    scene.other.synchronize()


# ---- a data loader ------------------------------------------------------------------------------

LOADERS = {"pins memory": _pin_memory, "allocates": _allocate, "waits": _wait_for_a_stream}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_loader_thread_does_not_break_a_capture_of_the_default_or_the_relaxed_mode(
    scene: Scene, mode: str, loader: str
) -> None:
    with scene.capture(mode=mode) as capture:
        assert _in_loader(lambda: LOADERS[loader](scene)) == []
        scene.x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1


@pytest.mark.parametrize(
    ("loader", "call"),
    [("pins memory", "cuMemHostAlloc"), ("allocates", "cuMemAlloc"), ("waits", "cuStreamSync")],
)
def test_a_loader_thread_that_breaks_a_global_capture_is_named_with_its_line(
    scene: Scene, loader: str, call: str
) -> None:
    seen: list[CudaError] = []
    error = scene.failure(
        lambda _: seen.extend(_in_loader(lambda: LOADERS[loader](scene))), mode="global"
    )
    assert [each.code for each in seen] == ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"]
    words = str(error)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert f"{call}" in words
    assert "on thread 'loader'" in words
    line = LOADERS[loader].__code__.co_firstlineno + 1
    assert error.location == f"{__file__}:{line}"


# ---- the whole device ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_thread_that_waits_for_the_device_is_named_in_every_mode(scene: Scene, mode: str) -> None:
    seen: list[CudaError] = []
    error = scene.failure(lambda _: seen.extend(_in_loader(scene.driver.synchronize)), mode=mode)
    assert [each.code for each in seen] == ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"]
    assert "nothing to wait for" in str(seen[0])
    words = str(error)
    assert "cuCtxSynchronize answered CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in words
    assert "on thread 'loader'" in words


def test_our_own_warm_up_and_waits_are_for_streams_and_break_no_other_capture(
    scene: Scene,
) -> None:
    with scene.capture() as capture:
        graphs: list[graphcore.Graph] = []
        thread = threading.Thread(
            target=lambda: graphs.append(
                graphcore.capture_function(lambda: None, warmup=2, driver=scene.driver)
            )
        )
        thread.start()
        thread.join()
        scene.x.add_(1)
    assert len(graphs) == 1
    assert len(capture.graph.snapshot().nodes) == 1


# ---- the legacy stream --------------------------------------------------------------------------


def _legacy_launch(scene: Scene) -> None:
    scene.launch(Stream(scene.driver, LEGACY_STREAM, owned=False))


def test_legacy_work_of_another_thread_that_breaks_a_capture_is_named(scene: Scene) -> None:
    seen: list[CudaError] = []
    error = scene.failure(lambda _: seen.extend(_in_loader(lambda: _legacy_launch(scene))))
    assert [each.code for each in seen] == ["CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"]
    assert "on_legacy_work='ignore'" in str(seen[0])
    words = str(error)
    assert "cuLaunchKernelEx answered CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" in words
    assert "on thread 'loader'" in words
    assert error.location == f"{scene_file}:{Scene.launch.__code__.co_firstlineno + 2}"


def test_legacy_work_beside_a_capture_that_ignores_it_runs_and_is_found_out_when_expected(
    scene: Scene,
) -> None:
    stream = scene.driver.stream()
    scene.x.fill_(1)
    scene.driver.synchronize()

    def capture(expect: int | None) -> graphcore.Graph:
        with graphcore.capture(
            stream, driver=scene.driver, on_legacy_work="ignore", expect=expect
        ) as capturing:
            _legacy_launch(scene)
        return capturing.graph

    assert capture(None).snapshot().nodes == ()
    scene.driver.synchronize()
    assert scene.x.tolist() == [2.0] * 4, "it ran at once"
    with pytest.raises(CaptureError, match="expected at least 1 node, got 0") as caught:
        capture(1)
    assert "the legacy stream" in str(caught.value)


def test_a_replay_of_ours_on_the_legacy_stream_is_refused_before_it_breaks_a_capture(
    scene: Scene,
) -> None:
    with scene.capture() as inner:
        scene.x.add_(1)
    executable = inner.graph.instantiate()
    refused: list[str] = []

    def launch() -> None:
        try:
            executable.launch(LEGACY_STREAM)
        except CaptureError as error:
            refused.append(str(error))

    with scene.capture() as capture:
        _in_loader(launch)
        scene.x.add_(1)
    assert "the capture begun at" in refused[0]
    assert len(capture.graph.snapshot().nodes) == 1


def test_torch_work_of_another_thread_is_not_in_the_capture(scene: Scene) -> None:
    y = torch.ones(4, device=scene.x.device)
    stream = scene.driver.stream()
    with graphcore.capture(stream, driver=scene.driver, on_legacy_work="ignore") as capture:
        _in_loader(lambda: y.add_(1))
        scene.x.add_(1)
    scene.driver.synchronize()
    assert y.tolist() == [2.0] * 4
    assert len(capture.graph.snapshot().nodes) == 1
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert y.tolist() == [2.0] * 4


# ---- torch's own threads, on a device -----------------------------------------------------------

_PINNING = """
import sys, threading
import torch
import graphcore

x = torch.ones(4, device="cuda"); x.add_(1); x.fill_(1)
stop = threading.Event()
pinned = []
def load():
    while not stop.is_set():
        pinned.append(torch.ones(1 << 18).pin_memory().sum().item())
loader = threading.Thread(target=load)
loader.start()
for _ in range(20):
    with graphcore.capture(mode=sys.argv[1], on_legacy_work=sys.argv[2]) as capture:
        x.add_(1)
stop.set(); loader.join()
with capture.graph.instantiate() as executable:
    torch.cuda.synchronize()
    executable.launch()
    torch.cuda.synchronize()
print("right" if x.tolist() == [2.0] * 4 and pinned else "wrong")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("on_legacy_work", ["error", "ignore"])
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_data_loader_of_torch_that_pins_memory_leaves_captures_alone(
    mode: str, on_legacy_work: str
) -> None:
    run: Any = run_script(_PINNING, mode, on_legacy_work)
    assert run.survived, run.stderr[-2000:]
    assert run.stdout.split() == ["right"]
