"""Failures users really hit, kind 9: streams, joins, events, and work awaited across graphs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.isolated import run_script
from helpers.scene import Scene
from helpers.tensors import cuda_driver, filled, replay

import graphcore
from graphcore import CudaError
from graphcore.driver import Driver, Event, Stream


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


# ---- side streams -------------------------------------------------------------------------------


def test_a_side_stream_forked_by_events_and_left_is_named_with_its_leaf_node(scene: Scene) -> None:
    def step(_: Scene) -> None:
        scene.other.wait(scene.stream.record())
        scene.launch(scene.other)
        scene.launch(scene.other)

    error = scene.failure(step)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    assert f"Not joined: stream {scene.other.handle:#x}, which ends in node 2 add_one" in str(error)


def test_a_join_that_came_too_early_names_what_was_launched_after_it(scene: Scene) -> None:
    def step(_: Scene) -> None:
        scene.other.wait(scene.stream.record())
        scene.launch(scene.other)
        scene.stream.wait(scene.other.record())
        scene.launch(scene.other)

    assert "which ends in node 2 add_one" in str(scene.failure(step))


def test_a_fork_of_ours_cannot_be_forgotten(scene: Scene) -> None:
    with scene.capture() as capture:
        scene.launch(scene.stream)
        with capture.fork() as side:
            scene.launch(side.stream)
    assert len(capture.graph.snapshot().nodes) == 2


# ---- events of other captures -------------------------------------------------------------------


def test_an_event_of_a_capture_that_is_over_cannot_be_waited_for_and_the_remedy_is_told(
    scene: Scene,
) -> None:
    events: list[Event] = []
    with scene.capture():
        scene.launch(scene.stream)
        events.append(scene.stream.record())
    error = scene.failure(lambda _: scene.stream.wait(events[0]))
    assert error.code == "CUDA_ERROR_INVALID_VALUE"
    assert error.location is not None
    assert "last recorded in another capture, which is over" in str(error)
    assert "record it again, inside this capture" in str(error)


# ---- time between events ------------------------------------------------------------------------


def test_events_of_a_capture_have_no_time_and_the_flag_that_gives_one_is_named(
    scene: Scene,
) -> None:
    start, end = (scene.driver.event(timing=True) for _ in range(2))
    with scene.capture() as capture:
        scene.stream.record(start)
        scene.launch(scene.stream)
        scene.stream.record(end)
    with capture.graph.instantiate() as executable:
        replay(executable)
    with pytest.raises(CudaError) as caught:
        end.elapsed_ms_since(start)
    assert "external=True" in str(caught.value)


def test_external_events_are_recorded_by_every_replay_and_have_a_time(scene: Scene) -> None:
    start, end = (scene.driver.event(timing=True) for _ in range(2))
    with scene.capture() as capture:
        scene.stream.record(start, external=True)
        scene.launch(scene.stream)
        scene.stream.record(end, external=True)
    kinds = [node.kind.value for node in capture.graph.snapshot().nodes]
    assert kinds == ["event_record", "kernel", "event_record"]
    with capture.graph.instantiate() as executable:
        for _ in range(2):
            replay(executable)
            assert end.elapsed_ms_since(start) >= 0


def test_asking_for_the_time_inside_the_capture_is_explained(scene: Scene) -> None:
    start, end = (scene.driver.event(timing=True) for _ in range(2))

    def step(_: Scene) -> None:
        scene.stream.record(start)
        scene.stream.record(end)
        end.elapsed_ms_since(start)

    assert "external=True" in str(scene.failure(step))


# ---- work that is awaited elsewhere, as collectives are -----------------------------------------


class Work:
    """As a collective's: begun on a stream of its own, awaited by whoever needs the result."""

    def __init__(self, scene: Scene, stream: Stream) -> None:
        self.stream = stream
        stream.wait(scene.stream.record())
        scene.launch(stream)
        self.done = stream.record()

    def wait(self, stream: Stream) -> None:
        stream.wait(self.done)


def test_work_begun_and_awaited_in_one_capture_is_in_the_graph(scene: Scene) -> None:
    with scene.capture() as capture:
        Work(scene, scene.other).wait(scene.stream)
        scene.launch(scene.stream)
    assert capture.graph.snapshot().edges == ((0, 1),)


def test_work_begun_before_the_capture_and_awaited_in_it_is_explained(scene: Scene) -> None:
    work = Work(scene, scene.other)
    error = scene.failure(lambda _: work.wait(scene.stream))
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
    assert "record the event again inside the capture" in str(error)
    assert error.location is not None


def test_work_begun_in_a_capture_and_not_awaited_there_is_named(scene: Scene) -> None:
    error = scene.failure(lambda _: Work(scene, scene.other))
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    assert f"stream {scene.other.handle:#x}, which ends in node 1 add_one" in str(error)


@pytest.mark.parametrize("awaited", ["by_a_stream", "by_the_host"])
def test_work_of_a_graph_that_is_awaited_after_it_is_explained(scene: Scene, awaited: str) -> None:
    with scene.capture() as capture:
        work = Work(scene, scene.other)
        work.wait(scene.stream)
    assert len(capture.graph.snapshot().nodes) == 1
    wait = {"by_a_stream": lambda: work.wait(scene.other), "by_the_host": work.done.synchronize}
    with pytest.raises(CudaError) as caught:
        wait[awaited]()
    assert caught.value.code == "CUDA_ERROR_INVALID_VALUE"
    assert "record it again" in str(caught.value)
    assert scene.is_usable()


# ---- torch's own streams and events, on a device ------------------------------------------------

_START = """
import json
import torch
import graphcore

x = torch.ones(64, device="cuda"); x.add_(1).mul_(2); x.fill_(1)
side = torch.cuda.Stream(); torch.cuda.synchronize()

def report(error=None):
    print(json.dumps({"error": error and str(error), "code": getattr(error, "code", None)}))
"""

_UNJOINED = """
try:
    with graphcore.capture() as capture, capture.annotate("layer"):
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
    report()
except graphcore.CaptureError as error:
    report(error)
"""

_ACROSS = """
event = torch.cuda.Event()
with graphcore.capture() as capture:
    x.add_(1)
    event.record()
try:
    with graphcore.capture() as again:
        event.wait()
        x.add_(1)
    report()
except graphcore.CaptureError as error:
    report(error)
"""


def _on_device(script: str) -> dict[str, Any]:
    run = run_script(_START + script)
    assert run.survived, (run.killed_by, run.stderr[-2000:])
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said


@pytest.mark.gpu
def test_a_side_stream_of_torch_left_unjoined_is_named_by_its_leaf_kernel() -> None:
    said = _on_device(_UNJOINED)
    assert said["code"] == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    assert "what no stream that graphcore knows ends in, node 1" in said["error"]
    assert "(layer)" in said["error"]


@pytest.mark.gpu
def test_an_event_of_torch_of_another_capture_is_explained() -> None:
    said = _on_device(_ACROSS)
    assert said["code"] in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")


@pytest.mark.gpu
def test_a_fork_of_ours_carries_torch_work_and_gives_the_eager_result() -> None:
    graphcore_driver = cuda_driver()
    x = torch.randn(256, 256, device=f"cuda:{graphcore_driver.device}")
    out = filled(graphcore_driver, 0.0, 256, 256)

    def step(capture: Any = None) -> None:
        if capture is None:
            left, right = x @ x, torch.sin(x)
        else:
            sides = capture.fork(), capture.fork()
            with sides[0]:
                left = x @ x
            with sides[1]:
                right = torch.sin(x)
        torch.add(left, right, out=out)

    capturing = graphcore.capture(driver=graphcore_driver)
    capturing.warm_up(step, 2)
    with capturing as capture:
        step(capture)
    with capture.graph.instantiate() as executable:
        for _ in range(3):
            x.normal_()
            step()
            expected = out.clone()
            out.fill_(float("nan"))
            replay(executable)
            assert torch.allclose(out, expected, rtol=1e-5, atol=1e-4)
