"""Failures users really hit, kind 3: calls that no capture allows are prevented or explained."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.isolated import run_script
from helpers.kernels import ONE_BLOCK, add_one, fill_value
from helpers.scene import Scene
from helpers.tensors import replay

import graphcore
from graphcore import CaptureError
from graphcore.driver import Driver, kernel
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.buffer import Buffer


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


# ---- what is refused, by the call and the line ---------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """``act`` is refused; ``remedy``: words of what to do; ``call`` is named where it is ours."""

    act: Callable[[Scene], object]
    remedy: str
    call: str | None = None


def _wait_for_an_event(scene: Scene) -> None:
    scene.before.synchronize()  # type: ignore[attr-defined]


def _ask_an_event(scene: Scene) -> None:
    scene.before.query()  # type: ignore[attr-defined]


def _launch_a_raw_executable(scene: Scene) -> None:
    scene.driver.launch_graph(scene.raw, scene.stream.handle)  # type: ignore[attr-defined]


def _instantiate(scene: Scene) -> None:
    scene.driver.instantiate(scene.raw_graph)  # type: ignore[attr-defined]


REFUSED = {
    "item": Refused(lambda scene: scene.x.sum().item(), "before"),
    "tolist": Refused(lambda scene: scene.x.tolist(), "before"),
    "a branch on a value": Refused(lambda scene: bool(scene.x[0] > 0), "before"),
    "a boolean index": Refused(lambda scene: scene.x[scene.x > 0], "before"),
    "printing a tensor": Refused(lambda scene: repr(scene.x), "before"),
    "waiting for the device": Refused(
        lambda scene: scene.driver.synchronize(), "nothing to wait for", "cuCtxSynchronize"
    ),
    "waiting for the stream": Refused(
        lambda scene: scene.stream.synchronize(), "nothing to wait for", "cuStreamSynchronize"
    ),
    "waiting for another stream": Refused(
        lambda scene: scene.other.synchronize(), "nothing to wait for", "cuStreamSynchronize"
    ),
    "asking the stream": Refused(lambda scene: scene.stream.query(), "ask about", "cuStreamQuery"),
    "waiting for an event": Refused(_wait_for_an_event, "to wait for", "cuEventSynchronize"),
    "asking an event": Refused(_ask_an_event, "ask about", "cuEventQuery"),
    "allocating": Refused(lambda scene: scene.driver.alloc(4), "allocate and free", "cuMemAlloc"),
    "a free of raw memory": Refused(
        lambda scene: scene.driver.free(scene.memory),  # type: ignore[attr-defined]
        "allocate and free before",
        "cuMemFree",
    ),
    "launching a raw executable": Refused(
        _launch_a_raw_executable, "GraphExec.launch", "cuGraphLaunch"
    ),
    "instantiating": Refused(_instantiate, "instantiate before", "cuGraphInstantiateWithParams"),
    "destroying a raw executable": Refused(
        lambda scene: scene.driver.destroy_exec(scene.raw),  # type: ignore[attr-defined]
        "destroy it after the capture",
        "cuGraphExecDestroy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_no_capture_allows_is_explained_with_its_line_and_the_remedy(
    scene: Scene, name: str
) -> None:
    case, driver = REFUSED[name], scene.driver
    scene.before = scene.other.record()  # type: ignore[attr-defined]
    scene.memory = driver.alloc(4)  # type: ignore[attr-defined]
    scene.raw_graph = driver.create_graph()  # type: ignore[attr-defined]
    scene.raw = driver.instantiate(scene.raw_graph)  # type: ignore[attr-defined]
    try:
        error = scene.failure(case.act)
    finally:  # the refused calls did nothing
        driver.destroy_exec(scene.raw)  # type: ignore[attr-defined]
        driver.destroy_graph(scene.raw_graph)  # type: ignore[attr-defined]
        driver.free(scene.memory)  # type: ignore[attr-defined]
    words = str(error)
    assert error.location is not None
    assert error.location in words
    assert case.remedy in words.split("What to do:")[1]
    if case.call is not None:
        assert f"{error.code} ({case.call})" in words


def test_an_error_that_the_step_swallows_is_still_named_with_its_line(scene: Scene) -> None:
    def step(_: Scene) -> None:
        with contextlib.suppress(graphcore.CudaError):
            scene.other.query()  # the line

    error = scene.failure(step)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    line = f"{__file__}:{step.__code__.co_firstlineno + 2}"
    assert error.location == line
    assert f"cuStreamQuery answered CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, at {line}" in str(error)


def test_where_nobody_was_seen_to_break_the_capture_the_suspects_are_named() -> None:
    scene = Scene(EmulatedDriver())
    driver = scene.driver
    assert isinstance(driver, EmulatedDriver)
    error = scene.failure(lambda _: driver.invalidate_capture(scene.stream.handle))
    assert error.location is None
    assert "another library made it" in str(error)


# ---- what is prevented --------------------------------------------------------------------------


def _never_seen() -> Any:
    """A kernel that no driver has loaded."""
    return kernel(
        "first_use",
        "f32* x, i32 n",
        'extern "C" __global__ void first_use(float* x, int n) { if (threadIdx.x < n) '
        "x[threadIdx.x] += 2.0f; }",
        lambda _config, x, n: x.array(n).__iadd__(2),
    )


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_kernel_of_ours_is_loaded_inside_a_capture(scene: Scene, mode: str) -> None:
    first = _never_seen()
    arguments = first.pack(scene.x.data_ptr(), 4)
    with scene.capture(mode=mode) as capture:
        function = scene.driver.function(first)
        scene.driver.launch(function, ONE_BLOCK, arguments, scene.stream.handle)
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert scene.x.tolist() == [3.0] * 4


def test_a_launch_of_an_executable_of_ours_becomes_a_child_node(scene: Scene) -> None:
    with scene.capture() as inner:
        scene.x.add_(1)
    executable = inner.graph.instantiate()
    with scene.capture() as capture:
        executable.launch(scene.stream)
        executable.launch()
    assert [node.kind.value for node in capture.graph.snapshot().nodes] == ["child", "child"]


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_what_the_block_drops_is_freed_and_destroyed_after_it(scene: Scene, mode: str) -> None:
    with scene.capture() as inner:
        scene.x.add_(1)
    kept: list[Any] = [inner.graph.instantiate(), Buffer.allocate(4, driver=scene.driver)]
    kept.append(inner.graph.clone())
    handle = kept[0].handle
    with scene.capture(mode=mode) as capture:
        kept.clear()
        gc.collect()  # of ours: they wait
        scene.x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1
    if scene.driver.is_emulated:  # on a device a dead handle is not to be used
        with pytest.raises(graphcore.CudaError):
            scene.driver.destroy_exec(handle)
    assert scene.is_usable()


class _ForeignGraph:
    """Another library's graph in garbage that only the collector finds; destroyed at once then."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.graph = driver.create_graph()
        self.executable = driver.instantiate(self.graph)
        self.itself = self

    def __del__(self) -> None:
        try:
            self.driver.destroy_exec(self.executable)
        except graphcore.CudaError:
            self.driver.destroyed_late.append(self.executable)  # type: ignore[attr-defined]
        self.driver.destroy_graph(self.graph)


def test_the_collector_does_not_run_by_itself_in_a_capture(scene: Scene) -> None:
    scene.driver.destroyed_late = []  # type: ignore[attr-defined]
    gc.collect()
    _ForeignGraph(scene.driver)
    with scene.capture() as capture:
        garbage = [[number] for number in range(20_000)]  # enough for many collections
        scene.x.add_(1)
    assert len(garbage) == 20_000
    assert len(capture.graph.snapshot().nodes) == 1
    gc.collect()
    assert scene.driver.destroyed_late == []  # type: ignore[attr-defined]


def test_a_step_that_calls_the_collector_is_told_what_it_destroyed(scene: Scene) -> None:
    scene.driver.destroyed_late = []  # type: ignore[attr-defined]
    held = [_ForeignGraph(scene.driver)]

    def step(_: Scene) -> None:
        held.clear()
        gc.collect()

    error = scene.failure(step)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert "cuGraphExecDestroy answered CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in str(error)
    assert error.location is not None
    assert error.location.startswith(__file__)
    for executable in scene.driver.destroyed_late:  # type: ignore[attr-defined]
        scene.driver.destroy_exec(executable)


def test_a_collection_is_a_suspect_where_no_refused_call_was_seen() -> None:
    scene = Scene(EmulatedDriver())
    driver = scene.driver
    assert isinstance(driver, EmulatedDriver)

    class Unseen:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            driver.invalidate_capture(scene.stream.handle)

    def step(_: Scene) -> None:
        Unseen()
        gc.collect()

    gc.collect()
    words = str(scene.failure(step))
    assert "the garbage collector was called and freed" in words
    assert f"{__file__}:{step.__code__.co_firstlineno + 2}" in words


# ---- the current device -------------------------------------------------------------------------


def test_a_capture_works_on_a_thread_that_has_no_current_device(scene: Scene) -> None:
    def step() -> graphcore.Graph:
        with scene.capture() as capture:
            scene.launch(scene.stream)
        return capture.graph

    graph = in_thread(step)
    with graph.instantiate() as executable:
        in_thread(lambda: replay(executable))
    assert scene.x.tolist() == [2.0] * 4


def test_the_block_runs_on_the_captures_device_whichever_was_current() -> None:
    driver = EmulatedDriver(devices=2, device=1)
    function = driver.function(add_one)
    x = torch.ones(4)
    with graphcore.capture(driver=driver) as capture:
        driver.launch(function, ONE_BLOCK, add_one.pack(x.data_ptr(), 4), capture.stream.handle)
    assert capture.graph.snapshot().device == 1


def test_a_kernel_of_another_device_is_explained() -> None:
    driver = EmulatedDriver(devices=2, device=1)
    scene = Scene(driver)
    function = driver.for_device(0).function(fill_value)
    arguments = fill_value.pack(scene.x.data_ptr(), 1.0, 4)
    error = scene.failure(
        lambda _: driver.launch(function, ONE_BLOCK, arguments, scene.stream.handle)
    )
    assert error.code == "CUDA_ERROR_INVALID_HANDLE"
    assert "the function is of device 0, the stream of 1" in str(error)


def test_work_of_another_device_is_missed_where_something_was_expected() -> None:
    driver = EmulatedDriver(devices=2, device=1)
    scene, other = Scene(driver), driver.for_device(0)
    function, stream = other.function(add_one), other.stream()
    arguments = add_one.pack(scene.x.data_ptr(), 4)
    with (
        pytest.raises(CaptureError, match="expected at least 1 node, got 0") as caught,
        scene.capture(expect=1),
    ):
        other.launch(function, ONE_BLOCK, arguments, stream.handle)
    assert "on another device" in str(caught.value)


# ---- memory pressure ----------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def test_an_out_of_memory_error_stays_itself_with_the_reason_and_the_remedy(scene: Scene) -> None:
    thrown = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def throw(_: Scene) -> None:
        raise thrown

    with pytest.raises(OutOfMemoryError) as caught:
        scene.capture_with(throw)
    assert caught.value is thrown
    assert "torch.cuda.empty_cache()" in thrown.__notes__[0]
    assert scene.is_usable()


# ---- what only a device can show, in processes of their own -------------------------------------

_DEVICE = """
import json, sys
import torch
import graphcore

def report(**what):
    print(json.dumps(what))
    sys.exit(0)

def outcome(step, result, **options):
    try:
        with graphcore.capture(**options) as capture:
            step()
    except (graphcore.CaptureError, RuntimeError) as error:
        with graphcore.capture(capture.stream) as again:
            pass
        return report(error=str(error), kind=type(error).__name__, usable=True,
                      notes=getattr(error, "__notes__", []))
    with capture.graph.instantiate() as executable:
        torch.cuda.synchronize()
        executable.launch()
        torch.cuda.synchronize()
    report(right=bool(result()))
"""


def _on_device(script: str) -> dict[str, Any]:
    run = run_script(_DEVICE + script)
    assert run.survived, (run.killed_by, run.stderr[-2000:])
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said


FIRST_CALLS = {
    "cublas": """
a = torch.ones(64, 64, device="cuda"); out = torch.zeros(64, 64, device="cuda")
outcome(lambda: torch.mm(a, a, out=out), lambda: (out == 64).all())
""",
    "a lazily loaded kernel": """
x = torch.ones(64, device="cuda"); out = torch.zeros(64, device="cuda")
outcome(lambda: torch.erfinv(x * 0, out=out), lambda: (out == 0).all())
""",
    "cupy": """
import cupy
x = cupy.ones(64, cupy.float32)
module = cupy.RawModule(code='extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
outcome(lambda: module.get_function("twice")((1,), (64,), (x,)), lambda: (x == 2).all())
""",
    "triton": """
import triton, triton.language as tl, tempfile, importlib.util
source = '''
import triton, triton.language as tl
@triton.jit
def twice(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) * 2)
'''
path = tempfile.mkdtemp() + "/twice_kernel.py"
open(path, "w").write(source)
spec = importlib.util.spec_from_file_location("twice_kernel", path)
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
x = torch.ones(64, device="cuda")
outcome(lambda: module.twice[(1,)](x, 64), lambda: (x == 2).all())
""",
}


@pytest.mark.gpu
@pytest.mark.parametrize("library", FIRST_CALLS)
def test_a_librarys_first_call_in_a_capture_works_or_is_explained(library: str) -> None:
    said = _on_device(FIRST_CALLS[library])
    if "error" in said:
        assert said["kind"] == "CaptureError", said
        assert "warm the step up on the capture stream" in said["error"]
        assert said["usable"]
    else:
        assert said["right"]


@pytest.mark.gpu
@pytest.mark.parametrize("library", FIRST_CALLS)
def test_capture_function_makes_a_librarys_first_call_before_the_capture(library: str) -> None:
    warmed = FIRST_CALLS[library].replace("outcome(", "warmed(")
    said = _on_device(
        """
def warmed(step, result):
    graph = graphcore.capture_function(step, warmup=1)
    report(right=len(graph.snapshot().nodes) >= 1)
"""
        + warmed
    )
    assert said["right"]


@pytest.mark.gpu
def test_memory_that_runs_out_in_a_capture_is_told_and_the_stream_works_on() -> None:
    said = _on_device("""
torch.cuda.set_per_process_memory_fraction(0.02)
limit = int(torch.cuda.get_device_properties(0).total_memory * 0.02)
cached = torch.empty(limit * 3 // 4, dtype=torch.uint8, device="cuda")
del cached  # torch keeps the block, and cannot give it back inside a capture
made = []
outcome(lambda: made.append(torch.zeros(limit // 2, dtype=torch.uint8, device="cuda")),
        lambda: (made[0] == 0).all())
""")
    if "error" in said:
        assert said["usable"]
        assert said["kind"] == "CaptureError" or "empty_cache()" in said["notes"][0], said
    else:
        assert said["right"]


@pytest.mark.gpu
def test_the_replay_of_a_graph_of_torch_in_a_capture_is_explained() -> None:
    said = _on_device("""
x = torch.ones(4, device="cuda"); x.add_(1)
inner = torch.cuda.CUDAGraph()
with torch.cuda.graph(inner):
    x.add_(1)
outcome(inner.replay, lambda: True)
""")
    assert said["kind"] == "CaptureError"
    # torch may stumble before the launch, over what it copies for its generators
    reasons = ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "torch does not allow this call")
    assert any(reason in said["error"] for reason in reasons), said
    assert said["usable"]


@pytest.mark.gpu
def test_a_graph_of_torch_in_garbage_does_not_break_a_capture() -> None:
    said = _on_device("""
x = torch.ones(4, device="cuda"); x.add_(1)
class Holder: pass
def garbage():
    holder = Holder(); holder.itself = holder
    holder.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(holder.graph):
        x.add_(1)
garbage()
x.fill_(1)
def step():
    made = [[number] for number in range(20_000)]
    x.add_(1)
outcome(step, lambda: (x == 2).all())
""")
    assert said == {"right": True}


@pytest.mark.gpu
def test_the_block_runs_with_the_captures_device_current() -> None:
    said = _on_device("""
x = torch.ones(4, device="cuda"); x.add_(1)
seen = []
outcome(lambda: (x.add_(1), seen.append(torch.cuda.current_device())), lambda: seen == [0])
""")
    assert said == {"right": True}


def test_what_a_device_shows_is_asked_for_in_scripts_that_compile() -> None:
    for script in FIRST_CALLS.values():
        compile(_DEVICE + script, "script", "exec")
