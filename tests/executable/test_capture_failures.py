"""A capture that fails: the error explains itself, and everything else is as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.scene import Scene, free_memory

import graphcore
from graphcore import CaptureError, CudaError
from graphcore.driver import LEGACY_STREAM, Driver, Stream, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.buffer import Buffer


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


# ---- every capture error of CUDA, by its code ---------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``act`` breaks the rule of ``code``; ``hint`` is a word of the remedy."""

    code: str
    act: Callable[[Scene], object]
    hint: str


def _read_from_the_host(scene: Scene) -> object:
    return scene.x[0].item()


def _wait_for_the_stream(scene: Scene) -> object:
    return scene.stream.synchronize()


def _swallow_an_error(scene: Scene) -> None:
    with pytest.raises(CudaError):
        scene.stream.synchronize()


def _join_two_captures(scene: Scene) -> None:
    with _other_capture(scene) as event:
        scene.stream.wait(event)


@contextmanager
def _other_capture(scene: Scene) -> Iterator[Any]:
    scene.driver.begin_capture(scene.other.handle, "thread_local")
    try:
        scene.launch(scene.other)
        yield scene.other.record()
    finally:
        with pytest.raises(CudaError, match="STREAM_CAPTURE_INVALIDATED"):
            scene.driver.end_capture(scene.other.handle)


def _end_on_the_side_stream(scene: Scene) -> None:
    scene.other.wait(scene.stream.record())
    scene.driver.end_capture(scene.other.handle)


def _leave_the_side_stream_unjoined(scene: Scene) -> None:
    scene.other.wait(scene.stream.record())
    scene.launch(scene.other)


def _wait_for_an_event_of_before(scene: Scene) -> None:
    scene.stream.wait(scene.driver_event)  # type: ignore[attr-defined]


def _launch_on_the_legacy_stream(scene: Scene) -> None:
    scene.launch(Stream(scene.driver, LEGACY_STREAM, owned=False))


def _ask_about_a_captured_event(scene: Scene) -> object:
    return scene.stream.record().query()


def _end_on_another_thread(scene: Scene) -> object:
    return in_thread(lambda: scene.driver.end_capture(scene.stream.handle))


CASES = {
    "900_item": Case("STREAM_CAPTURE_UNSUPPORTED", _read_from_the_host, "before"),
    "900_synchronize": Case("STREAM_CAPTURE_UNSUPPORTED", _wait_for_the_stream, "warm the step up"),
    "901": Case("STREAM_CAPTURE_INVALIDATED", _swallow_an_error, "the first error says why"),
    "902": Case("STREAM_CAPTURE_MERGE", _join_two_captures, "one capture only"),
    "903": Case("STREAM_CAPTURE_UNMATCHED", _end_on_the_side_stream, "the stream that began it"),
    "904": Case("STREAM_CAPTURE_UNJOINED", _leave_the_side_stream_unjoined, "wait for an event"),
    "905": Case("STREAM_CAPTURE_ISOLATION", _wait_for_an_event_of_before, "record the event again"),
    "906": Case("STREAM_CAPTURE_IMPLICIT", _launch_on_the_legacy_stream, "'ignore'"),
    "907": Case("CAPTURED_EVENT", _ask_about_a_captured_event, "outside captures"),
    "908": Case("STREAM_CAPTURE_WRONG_THREAD", _end_on_another_thread, "the thread that began it"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_capture_error_explains_itself_and_leaves_the_stream_usable(
    scene: Scene, name: str
) -> None:
    case = CASES[name]
    scene.driver_event = scene.other.record()  # type: ignore[attr-defined]
    free = free_memory(scene.driver)
    with pytest.raises(CaptureError) as caught:
        scene.capture_with(case.act)
    error = caught.value
    assert free_memory(scene.driver) >= free, "the failed capture keeps memory"
    assert error.code == f"CUDA_ERROR_{case.code}"
    words = str(error)
    assert error.code in words
    assert "the capture begun at" in words
    assert f"{scene.stream.handle:#x}" in words
    assert "What to do: " in words
    assert case.hint in words
    assert "There is no graph; the stream is usable." in words
    # the line is named, the innermost of the user's: where the block raised, or where the first
    # error was seen that it swallowed; a stream that the user forked with events has none
    if name == "904":
        assert error.location is None
        assert "which ends in node 1 add_one" in words
        assert f"stream {scene.other.handle:#x}" in words
    else:
        assert error.location is not None
        assert "tests/" in error.location
        assert error.location in words
    assert isinstance(error.__cause__, (CudaError, RuntimeError))
    assert scene.is_usable()


def test_the_location_is_the_users_innermost_line(scene: Scene) -> None:
    def step() -> None:
        scene.x.tolist()  # the line

    with pytest.raises(CaptureError) as caught, scene.capture():
        step()
    assert caught.value.location == f"{__file__}:{step.__code__.co_firstlineno + 1}"


def test_a_line_of_a_library_below_the_users_is_named_too(scene: Scene) -> None:
    from torch.nn import Module

    class Reads(Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sum().item()

    with pytest.raises(CaptureError) as caught, scene.capture():
        Reads()(scene.x)
    assert caught.value.location is not None
    assert caught.value.location.startswith(__file__)


# ---- other people's errors ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt, SystemExit])
def test_another_exception_passes_unchanged_with_a_note(
    scene: Scene, kind: type[BaseException]
) -> None:
    thrown = kind("mine")

    def throw(_: Scene) -> None:
        raise thrown

    with pytest.raises(kind) as caught:
        scene.capture_with(throw)
    assert caught.value is thrown
    assert "raised inside the capture begun at" in thrown.__notes__[0]
    assert scene.is_usable()


def test_a_step_that_fails_half_way_keeps_no_memory_and_no_nodes(scene: Scene) -> None:
    class Resource:
        pass

    resources = [Resource()]
    watch = weakref.ref(resources[0])
    free = free_memory(scene.driver)
    with pytest.raises(ZeroDivisionError):
        scene.capture_with(lambda _: active.keep(resources.pop()), lambda _: 1 // 0)
    gc.collect()
    assert watch() is None
    assert scene.x.tolist() == [1.0] * 4
    assert free_memory(scene.driver) >= free
    assert scene.is_usable()


def test_a_cuda_error_of_another_kind_becomes_a_capture_error_with_its_code(scene: Scene) -> None:
    with pytest.raises(CaptureError) as caught, scene.capture():
        scene.driver.destroy_node(0)  # type: ignore[arg-type]
    assert caught.value.code in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE")
    assert scene.is_usable()


class AcceleratorError(RuntimeError):
    """Looks like torch's."""


CuPyError = type("CUDARuntimeError", (Exception,), {"__module__": "cupy_backends.cuda.api.runtime"})

FOREIGN = {
    "torch_unsupported": (
        AcceleratorError("CUDA error: operation not permitted when stream is capturing\nmore"),
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "warm the step up",
    ),
    "cupy_implicit": (
        CuPyError("cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend"),
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "on_legacy_work='ignore'",
    ),
    "torch_generator": (
        RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode."),
        None,
        "draw the numbers before the capture",
    ),
    "torch_unpinned_copy": (
        RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless"),
        None,
        "pinned",
    ),
    "cublas_first_call": (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
        None,
        "warm the step up",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_errors_of_torch_and_cupy_are_explained(scene: Scene, name: str) -> None:
    thrown, code, remedy = FOREIGN[name]
    with pytest.raises(CaptureError) as caught, scene.capture():
        raise thrown
    assert caught.value.code == code
    assert remedy in str(caught.value)
    assert caught.value.__cause__ is thrown
    assert "more" not in str(caught.value)
    assert scene.is_usable()


def test_random_work_of_torch_is_refused_with_the_way_round(scene: Scene) -> None:
    torch.rand(4, device=scene.x.device)
    with pytest.raises(CaptureError) as caught, scene.capture():
        scene.x.add_(torch.rand(4, device=scene.x.device))
    words = str(caught.value)
    assert "Attempt to increase offset for a CUDA generator not in capture mode" in words
    assert "before the capture" in words
    # torch's own capture is no remedy where there is no device
    assert ("torch.cuda.CUDAGraph(keep_graph=True)" in words) is not scene.driver.is_emulated
    assert ("Graph.adopt" in words) is not scene.driver.is_emulated
    assert caught.value.location is not None
    assert scene.is_usable()


def test_a_runtime_error_that_is_not_about_cuda_stays_itself(scene: Scene) -> None:
    with pytest.raises(RuntimeError) as caught, scene.capture():
        raise RuntimeError("shapes do not match")
    assert type(caught.value) is RuntimeError


def test_a_capture_error_of_the_block_gets_its_line(scene: Scene) -> None:
    with pytest.raises(CaptureError) as caught, scene.capture():
        graphcore.capture(driver=scene.driver).__enter__()
    assert caught.value.location is not None
    assert caught.value.location.startswith(__file__)
    assert scene.is_usable()


# ---- failures of the driver itself, injected ----------------------------------------------------


@pytest.fixture
def emulated() -> EmulatedDriver:
    return EmulatedDriver()


def test_a_capture_that_cannot_begin_leaves_nothing(emulated: EmulatedDriver) -> None:
    scene = Scene(emulated)
    emulated.faults.inject("begin_capture")
    with pytest.raises(CudaError), scene.capture():
        pass
    assert scene.is_usable()


def test_what_another_thread_drops_as_a_capture_begins_waits_for_its_end(
    emulated: EmulatedDriver,
) -> None:
    executables = [graphcore.Graph(emulated, emulated.create_graph()).instantiate()]
    begin = emulated.begin_capture

    def begin_and_lose_the_race(*arguments: Any, **keywords: Any) -> None:
        begin(*arguments, **keywords)
        in_thread(executables.clear)

    emulated.begin_capture = begin_and_lose_the_race  # type: ignore[method-assign]
    with graphcore.capture(driver=emulated, mode="global") as capture:
        pass
    assert capture.graph is not None


def test_a_recording_that_cannot_begin_ends_the_capture(
    emulated: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(emulated)

    def recording(stream: int) -> Any:
        raise OSError("no recorder")

    with monkeypatch.context() as patch:
        patch.setattr(emulated, "recording", recording)
        with pytest.raises(OSError, match="no recorder"), scene.capture():
            pass
    assert scene.is_usable()


def test_an_end_that_fails_without_ending_is_repeated(emulated: EmulatedDriver) -> None:
    scene = Scene(emulated)
    with pytest.raises(CaptureError, match="could not be ended") as caught, scene.capture():
        emulated.faults.inject("end_capture")
    assert caught.value.code == "CUDA_ERROR_UNKNOWN"
    assert scene.is_usable()


def test_an_end_that_fails_twice_says_so(emulated: EmulatedDriver) -> None:
    scene = Scene(emulated)
    with pytest.raises(CaptureError) as caught, scene.capture():
        emulated.faults.inject("end_capture", count=2)
    cause = caught.value.__cause__
    assert cause is not None
    assert "ending the capture again" in cause.__notes__[0]
    emulated.destroy_graph(emulated.end_capture(scene.stream.handle))
    assert scene.is_usable()


def test_a_graph_that_cannot_be_counted_is_not_kept(emulated: EmulatedDriver) -> None:
    scene = Scene(emulated)
    with pytest.raises(CudaError):
        scene.capture_with(lambda _: emulated.faults.inject("nodes", count=2))
    assert scene.is_usable()


def test_a_graph_whose_owners_cannot_be_listed_is_not_kept(emulated: EmulatedDriver) -> None:
    class Unreadable(dict[str, object]):
        def items(self) -> Any:
            raise KeyError("no items")

    destroyed: list[int] = []
    destroy = emulated.destroy_graph
    emulated.destroy_graph = lambda graph: (destroyed.append(graph), destroy(graph))  # type: ignore[assignment,func-returns-value]
    with pytest.raises(KeyError, match="no items"), graphcore.capture(driver=emulated) as capture:
        capture.keep(Unreadable(), "argument")
    assert len(destroyed) == 1
    assert active.current() is None


def test_an_annotation_around_a_failure_does_not_hide_it(scene: Scene) -> None:
    with (
        pytest.raises(CaptureError) as caught,
        scene.capture() as capture,
        capture.annotate("layer"),
    ):
        scene.stream.synchronize()
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert scene.is_usable()


def test_memory_allocated_inside_a_capture_is_refused_with_its_reason(scene: Scene) -> None:
    with pytest.raises(CaptureError) as caught, scene.capture():
        Buffer.allocate(4, driver=scene.driver)
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert scene.is_usable()
