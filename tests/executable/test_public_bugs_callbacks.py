"""Failures users really hit, kind 10: callbacks, a process's end, DLPack, randomness, edges."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.contract import Bench
from helpers.isolated import run_script
from helpers.kernels import ONE_BLOCK, add_one
from helpers.scene import Scene
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import CaptureError
from graphcore.driver import LEGACY_STREAM, Driver
from graphcore.driver.records import LaunchConfig
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import describe
from graphcore.testing import assert_replay_equals_eager


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


# ---- host callbacks -----------------------------------------------------------------------------


def test_a_captured_callback_fires_on_every_replay_whatever_was_dropped(scene: Scene) -> None:
    fired: list[int] = []

    def captured() -> graphcore.GraphExec:
        with scene.capture() as capture:
            scene.launch(scene.stream)
            scene.driver.launch_host(lambda: fired.append(1), scene.stream.handle)
        return capture.graph.instantiate()

    executable = captured()
    gc.collect()
    for count in range(1, 6):
        replay(executable)
        assert len(fired) == count
    executable.close()


_IN_A_PROCESS = """
import sys, threading
import graphcore
from helpers.kernels import ONE_BLOCK, add_one

driver = graphcore.open_driver(sys.argv[1])
buffer = graphcore.Buffer.allocate(4, driver=driver)
buffer.write(0.0)
function = driver.function(add_one)

def launch(stream):
    driver.launch(function, ONE_BLOCK, add_one.pack(buffer, 4), stream.handle)
"""

# the main thread waits in the driver while a callback needs the interpreter, on a thread of CUDA's
_WAITING = """
seen = []
def callback():
    for _ in range(1000):
        seen.append(sum(range(100)))

with graphcore.capture(driver=driver) as capture:
    driver.launch_host(callback, capture.stream.handle)
    launch(capture.stream)
with capture.graph.instantiate() as executable:
    for _ in range(20):
        executable.launch(capture.stream)
    {wait}
print("calls", len(seen))
"""

WAITS = {
    "for the stream": "capture.stream.synchronize()",
    "for the device": "driver.synchronize()",
    "for a copy": "capture.stream.synchronize(); buffer.read()",
    "for an event": "capture.stream.record().synchronize()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_callback_that_needs_the_interpreter_does_not_deadlock_who_waits(
    graphcore_driver: Driver, wait: str
) -> None:
    script = _IN_A_PROCESS + _WAITING.replace("{wait}", WAITS[wait])
    run = run_script(script, graphcore_driver.name)
    assert run.survived, (run.killed_by, run.stderr[-2000:])
    assert run.stdout == "calls 20000\n"


# everything is left open: graphs, executables, callbacks, streams, a fork, garbage, a thread that
# holds some, and an owner whose end calls the driver, as a communicator's does
_LEFT_OPEN = """
class Communicator:
    def __init__(self):
        self.event = driver.event()
        self.itself = self
    def __del__(self):
        driver.destroy_event(driver.create_event(timing=False))

kept = []
def make():
    with graphcore.capture(driver=driver) as capture:
        capture.keep(Communicator(), "communicator")
        driver.launch_host(lambda: None, capture.stream.handle)
        with capture.fork() as side:
            launch(side.stream)
    executable = capture.graph.instantiate()
    executable.launch()
    kept.append((capture, executable, capture.graph.clone()))
    cycle = [executable]
    cycle.append(cycle)

make()
thread = threading.Thread(target=make)
thread.start(); thread.join()
{ending}
print("at the end", len(kept), flush=True)
"""

ENDINGS = {
    "as it is": "driver.synchronize()",
    "with a launch under way": "kept[0][1].launch()",
    "after an exception": "import atexit; atexit.register(kept.clear)",
    "inside a capture": "graphcore.capture(driver=driver).__enter__()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_although_graphs_still_hold_everything(
    graphcore_driver: Driver, ending: str
) -> None:
    script = _IN_A_PROCESS + _LEFT_OPEN.replace("{ending}", ENDINGS[ending])
    run = run_script(script, graphcore_driver.name)
    assert run.survived, (run.killed_by, run.stderr[-2000:])
    assert run.stdout == "at the end 2\n"


# ---- DLPack -------------------------------------------------------------------------------------


class _Synchronising:
    """Speaks DLPack; asked for no stream, it waits for the legacy one, as some producers do.

    Producers on the host have no stream: there None is all that may be asked for.
    """

    def __init__(self, buffer: Buffer, *, always: bool = False) -> None:
        self.buffer = buffer
        self.always = always
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.asked.append(stream)
        driver = self.buffer.driver
        if self.always or not (stream == -1 or driver.is_emulated):
            driver.synchronize_stream(LEGACY_STREAM)
        return self.buffer.__dlpack__(stream=stream, **options)


def test_a_producer_that_would_wait_for_the_legacy_stream_is_not_asked_to(scene: Scene) -> None:
    producer = _Synchronising(Buffer.allocate(4, driver=scene.driver))
    with scene.capture() as capture:
        capture.keep(producer, "producer")
        assert describe(producer).address == producer.buffer.address
        scene.launch(scene.stream)
    assert set(producer.asked) == {None if scene.driver.is_emulated else -1}
    assert len(capture.graph.snapshot().nodes) == 1


def test_a_producer_that_waits_all_the_same_is_explained(scene: Scene) -> None:
    producer = _Synchronising(Buffer.allocate(4, driver=scene.driver), always=True)
    error = scene.failure(lambda _: describe(producer))
    assert error.code in (
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    )
    assert "cuStreamSynchronize" in str(error)
    assert error.location is not None


# ---- random numbers -----------------------------------------------------------------------------


def test_random_numbers_that_would_repeat_are_refused_with_the_remedy(scene: Scene) -> None:
    device = scene.x.device
    torch.rand(4, device=device)
    error = _refused(scene, lambda: scene.x.add_(torch.rand(4, device=device)))
    assert "draw" in str(error).lower()
    assert "before the capture" in str(error)


def test_a_generator_that_drew_before_a_refused_capture_has_not_moved(scene: Scene) -> None:
    device = scene.x.device
    torch.manual_seed(3)
    expected = torch.rand(4, device=device).tolist()
    torch.manual_seed(3)
    _refused(scene, lambda: torch.rand(4, device=device))
    assert torch.rand(4, device=device).tolist() == expected, "the sequence was shifted"


def test_numbers_drawn_before_each_replay_neither_repeat_nor_shift(scene: Scene) -> None:
    noise = filled(scene.driver, 0.0)
    out = filled(scene.driver, 0.0)
    torch.add(scene.x, noise, out=out)
    with scene.capture() as capture:
        torch.add(scene.x, noise, out=out)
    seen = []
    torch.manual_seed(7)
    with capture.graph.instantiate() as executable:
        for _ in range(3):
            noise.uniform_()
            replay(executable)
            seen.append((out - 1).tolist())
    torch.manual_seed(7)
    expected = []
    for _ in range(3):
        noise.uniform_()
        expected.append((scene.x + noise - 1).tolist())
    assert seen == expected
    assert len({tuple(each) for each in seen}) == 3


def _refused(scene: Scene, step: Any) -> CaptureError:
    with pytest.raises(CaptureError) as caught, scene.capture():
        step()
    assert scene.is_usable()
    return caught.value


_TORCHS_OWN = """
import torch, graphcore
x = torch.zeros(4, device="cuda")
x.copy_(torch.rand(4, device="cuda"))
graph = torch.cuda.CUDAGraph(keep_graph=True)
with torch.cuda.graph(graph):
    x.copy_(torch.rand(4, device="cuda"))
adopted = graphcore.Graph.adopt(graph)
executable = adopted.instantiate()
def drawn(launch):
    values = []
    for _ in range(3):
        launch(); torch.cuda.synchronize()
        values.append(tuple(x.tolist()))
    return len(set(values))
graph.instantiate()
print(drawn(graph.replay), drawn(executable.launch))
"""


@pytest.mark.gpu
def test_an_adopted_graph_draws_anew_when_torch_replays_it_and_repeats_when_we_do() -> None:
    run = run_script(_TORCHS_OWN)
    assert run.survived, (run.killed_by, run.stderr[-2000:])
    # torch's replay moves its generator; a launch of the graph alone cannot: see Graph.adopt
    assert run.stdout.split() == ["3", "1"]


# ---- counters inside kernels --------------------------------------------------------------------


@pytest.mark.parametrize("resets", [True, False])
def test_a_counter_that_is_not_reset_between_replays_is_found_out(
    graphcore_driver: Driver, resets: bool
) -> None:
    device = device_of(graphcore_driver)
    counter = torch.zeros(1, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        if resets:
            counter.zero_()  # inside the step, so inside the graph
        counter.add_(1)
        return x * counter

    def check() -> None:
        assert_replay_equals_eager(step, [torch.ones(4, device=device)])

    if resets:
        check()
    else:
        with pytest.raises(AssertionError, match="replay differs from eager"):
            check()


# ---- edges --------------------------------------------------------------------------------------


def test_edge_data_that_was_read_outlives_its_graph(graphcore_driver: Driver) -> None:
    bench = Bench(graphcore_driver)
    x = bench.put([1.0])
    late = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)
    with graphcore.capture(driver=graphcore_driver) as capture:
        bench.launch(add_one, x, 1, stream=capture.stream)
        bench.launch(add_one, x, 1, stream=capture.stream, config=late)
        bench.launch(add_one, x, 1, stream=capture.stream)
    graph = capture.graph
    edges = graphcore_driver.edges(graph.handle)
    snapshot = graph.snapshot()
    before = ([edge.data for edge in edges], snapshot.edge_data)
    graph.close()
    del graph, capture
    gc.collect()
    junk = [graphcore_driver.create_graph() for _ in range(64)]  # would take the freed memory
    assert ([edge.data for edge in edges], snapshot.edge_data) == before
    data = dict(zip(snapshot.edges, snapshot.edge_data, strict=True))
    assert data.keys() == {(0, 1), (1, 2)}
    assert data[0, 1] != data[1, 2], "the programmatic edge is told apart"
    for each in junk:
        graphcore_driver.destroy_graph(each)
    bench.close()


def test_a_graph_with_programmatic_edges_is_read_compared_and_cloned(
    graphcore_driver: Driver,
) -> None:
    bench = Bench(graphcore_driver)
    x = bench.put([1.0])
    late = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)

    def captured(config: LaunchConfig) -> graphcore.Graph:
        with graphcore.capture(driver=graphcore_driver) as capture:
            bench.launch(add_one, x, 1, stream=capture.stream)
            bench.launch(add_one, x, 1, stream=capture.stream, config=config)
        return capture.graph

    programmatic, plain = captured(late), captured(ONE_BLOCK)
    (data,) = programmatic.snapshot().edge_data
    assert data != (0, 0, 0)
    assert programmatic.clone().snapshot().edge_data == (data,)
    assert graphcore_driver.edges(programmatic.handle)[0].data == data
    assert not graphcore.diff(programmatic, plain).update_possible
    bench.close()
