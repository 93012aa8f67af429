"""capture(): what it records, where, with which options, and what it leaves as it was."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers.kernels import ONE_BLOCK, add_one
from helpers.tensors import device_of, filled, poisoned, replay, replayed

import graphcore
from graphcore import (
    CacheTypeError,
    CaptureError,
    ConfigurationError,
    LifecycleError,
)
from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState, NodeKind
from graphcore.resources.buffer import Buffer

MODES = ["global", "thread_local", "relaxed"]


def _is_capturing(driver: Driver, stream: Any) -> bool:
    return driver.capture_status(int(stream)).state is not CaptureState.NONE


@pytest.mark.parametrize("mode", MODES)
def test_torch_work_is_captured_and_replayed_on_new_inputs(
    graphcore_driver: Driver, mode: Any
) -> None:
    x, y = filled(graphcore_driver, 1.0), poisoned(graphcore_driver)
    y.copy_(x * 2 + 1)  # warm-up
    y.fill_(float("nan"))
    with graphcore.capture(driver=graphcore_driver, mode=mode) as capture:
        y.copy_(x * 2 + 1)
    assert torch.isnan(y).all(), "capturing must not run the work"
    x.fill_(5.0)
    assert replayed(capture.graph, y) == [11.0] * 4


def test_our_kernels_and_torch_share_a_capture_in_program_order(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    function = driver.function(add_one)
    x = filled(driver, 1.0)
    x.mul_(1)
    with graphcore.capture(driver=driver) as capture:
        x.mul_(3)
        driver.launch(function, ONE_BLOCK, add_one.pack(x.data_ptr(), 4), capture.stream.handle)
        x.mul_(2)
    x.fill_(1.0)
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert x.tolist() == [8.0] * 4
    assert len(capture.graph.snapshot().nodes) == 3


def test_a_block_that_launches_nothing_is_reported(
    graphcore_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "graphcore"):
        with graphcore.capture(driver=graphcore_driver) as capture:
            pass
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "empty graph" in caplog.text
        caplog.clear()
        x = filled(graphcore_driver, 1.0)
        with graphcore.capture(driver=graphcore_driver):
            x.add_(1)
        assert [record.levelname for record in caplog.records] == ["INFO"]
    assert capture.graph.snapshot().nodes == ()


def test_fewer_nodes_than_expected_are_an_error_that_keeps_nothing(
    graphcore_driver: Driver,
) -> None:
    x = filled(graphcore_driver, 1.0)
    stream = graphcore_driver.stream(blocking=True)
    capture = graphcore.capture(stream, driver=graphcore_driver, expect=2)
    with pytest.raises(CaptureError, match="at least 2 nodes, got 1") as caught, capture:
        x.add_(1)
    assert "test_capture.py" in str(caught.value)
    with pytest.raises(LifecycleError, match="ended without error"):
        _ = capture.graph
    with graphcore.capture(stream, driver=graphcore_driver, expect=1) as again:
        x.add_(1)
    assert len(again.graph.snapshot().nodes) == 1


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choice", "blocking"), [("error", True), ("ignore", False)])
def test_without_a_stream_one_that_fits_on_legacy_work_is_made(
    graphcore_driver: Driver, choice: Any, blocking: bool
) -> None:
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver, on_legacy_work=choice) as capture:
        x.add_(1)
    assert capture.stream.is_blocking is blocking
    assert capture.stream in capture.graph.owners


@pytest.mark.parametrize(("choice", "blocking"), [("error", False), ("ignore", True)])
def test_a_stream_that_does_not_fit_is_refused_naming_the_flag(
    graphcore_driver: Driver, choice: Any, blocking: bool
) -> None:
    stream = graphcore_driver.stream(blocking=blocking)
    with pytest.raises(ConfigurationError) as caught:
        graphcore.capture(stream, driver=graphcore_driver, on_legacy_work=choice).__enter__()
    words = str(caught.value)
    assert f"on_legacy_work={choice!r}" in words
    assert f"expected {'a non-' if blocking else 'a '}blocking stream" in words
    assert f"got {'a ' if blocking else 'a non-'}blocking one" in words
    assert not _is_capturing(graphcore_driver, stream)
    assert active.current() is None


def test_legacy_work_breaks_a_capture_on_a_blocking_stream(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    memory = Buffer.allocate(4, driver=driver)
    function = driver.function(add_one)
    with pytest.raises(CaptureError) as caught, graphcore.capture(driver=driver) as capture:
        driver.launch(function, ONE_BLOCK, add_one.pack(memory, 4), 1)
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    assert "on_legacy_work='ignore'" in str(caught.value)
    assert not _is_capturing(driver, capture.stream)


def test_legacy_work_beside_a_non_blocking_stream_runs_at_once_and_is_not_captured(
    graphcore_driver: Driver,
) -> None:
    driver = graphcore_driver
    memory = Buffer.allocate(4, driver=driver)
    memory.write(1.0)
    function = driver.function(add_one)
    with graphcore.capture(driver=driver, on_legacy_work="ignore") as capture:
        driver.launch(function, ONE_BLOCK, add_one.pack(memory, 4), 1)
    assert memory.read().tolist() == [2.0] * 4
    assert capture.graph.snapshot().nodes == ()


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_are_refused(graphcore_driver: Driver, handle: int) -> None:
    with pytest.raises(ConfigurationError, match="stream: expected a stream that can capture"):
        graphcore.capture(handle, driver=graphcore_driver).__enter__()


@pytest.mark.parametrize("wrong", ["a name", 1.5, object()], ids=lambda value: type(value).__name__)
def test_what_is_no_stream_is_a_type_error(graphcore_driver: Driver, wrong: Any) -> None:
    with pytest.raises(CacheTypeError, match="stream: expected"):
        graphcore.capture(wrong, driver=graphcore_driver).__enter__()


@pytest.mark.parametrize("step", [lambda: None, dict], ids=["function", "class"])
def test_a_function_in_the_streams_place_is_told_of_capture_function(step: Any) -> None:
    with pytest.raises(CacheTypeError, match=r"capture_function\(function, \*arguments\)"):
        graphcore.capture(step)


def test_a_stream_of_another_driver_is_a_type_error() -> None:
    one, other = (graphcore.open_driver("emulated", devices=2, device=n) for n in (0, 1))
    with pytest.raises(CacheTypeError, match="expected one of driver emulated:0"):
        graphcore.capture(other.stream(blocking=True), driver=one).__enter__()


def test_the_driver_is_the_streams_where_none_is_given(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(graphcore_driver.stream(blocking=True)) as capture:
        x.add_(1)
    assert capture.driver is graphcore_driver
    assert capture.graph.driver is graphcore_driver


def test_without_driver_and_stream_the_default_driver_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    x = torch.ones(4)
    with graphcore.capture() as capture:
        x.add_(1)
    with graphcore.capture() as second:
        x.add_(2)
    assert capture.driver.name == "emulated"
    assert capture.driver is second.driver


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "local"}, "mode"),
        ({"on_legacy_work": "warn"}, "on_legacy_work"),
        ({"expect": "many"}, "expect"),
        ({"expect": True}, "expect"),
        ({"expect": -1}, "expect"),
        ({"expect": ["add_one"]}, "expect"),
    ],
    ids=str,
)
def test_an_unknown_option_is_refused_with_its_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}: expected"):
        graphcore.capture(**options)


def test_graphcore_disable_refuses_a_bare_capture_and_says_so(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    ran: list[int] = []
    with pytest.raises(CaptureError, match="GRAPHCORE_DISABLE=1"):
        graphcore.capture(driver=graphcore_driver).__enter__()
    with pytest.raises(CaptureError, match="GRAPHCORE_DISABLE=1"):
        graphcore.capture_function(lambda: ran.append(1), driver=graphcore_driver)
    assert ran == []


# ---- one at a time ------------------------------------------------------------------------------


def test_a_second_capture_on_the_thread_is_refused_and_the_first_is_unharmed(
    graphcore_driver: Driver,
) -> None:
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver) as first:
        x.add_(1)
        with pytest.raises(CaptureError) as caught:
            graphcore.capture(driver=graphcore_driver).__enter__()
        x.add_(1)
    words = str(caught.value)
    assert "the capture begun at" in words
    assert "test_capture.py:" in words
    assert f"{first.stream.handle:#x}" in words
    x.fill_(1.0)
    with first.graph.instantiate() as executable:
        replay(executable)
    assert x.tolist() == [3.0] * 4


def test_another_thread_may_capture_at_the_same_time(graphcore_driver: Driver) -> None:
    x, y = filled(graphcore_driver, 1.0), filled(graphcore_driver, 1.0)
    graphs: list[graphcore.Graph] = []

    def other() -> None:
        with graphcore.capture(driver=graphcore_driver) as capture:
            y.add_(1)
        graphs.append(capture.graph)

    with graphcore.capture(driver=graphcore_driver) as first:
        x.add_(1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [len(graph.snapshot().nodes) for graph in (first.graph, *graphs)] == [1, 1]


def test_a_stream_on_which_somebody_else_captures_is_refused(graphcore_driver: Driver) -> None:
    stream = graphcore_driver.stream(blocking=True)
    graphcore_driver.begin_capture(stream.handle, "thread_local")
    with pytest.raises(CaptureError, match="somebody else captures"):
        graphcore.capture(stream, driver=graphcore_driver).__enter__()
    graphcore_driver.destroy_graph(graphcore_driver.end_capture(stream.handle))


def test_a_capture_object_captures_once(graphcore_driver: Driver) -> None:
    capture = graphcore.capture(driver=graphcore_driver)
    with pytest.raises(LifecycleError):
        _ = capture.graph
    with capture:
        pass
    with pytest.raises(LifecycleError, match="captures once"), capture:
        pass
    with pytest.raises(LifecycleError, match="captures once"):
        capture.warm_up(lambda: None, 1)


def test_ending_on_another_thread_is_refused_and_leaves_the_capture(
    graphcore_driver: Driver,
) -> None:
    x = filled(graphcore_driver, 1.0)
    capture = graphcore.capture(driver=graphcore_driver)
    errors: list[BaseException] = []

    def end() -> None:
        try:
            capture.__exit__(None, None, None)
        except CaptureError as error:
            errors.append(error)

    with capture:
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        x.add_(1)
    assert [error.code for error in errors] == ["CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"]  # type: ignore[attr-defined]
    assert len(capture.graph.snapshot().nodes) == 1


# ---- names and owners ---------------------------------------------------------------------------


def test_annotations_nest_into_paths(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver) as capture:
        x.add_(1)
        with capture.annotate("outer"):
            x.add_(2)
            with capture.annotate("inner"):
                x.add_(3)
        with capture.annotate("outer"), capture.annotate("same nodes"):
            x.add_(4)
        with capture.annotate("nothing"):
            pass
    labels = [node.label for node in capture.graph.snapshot().nodes]
    assert labels == ["", "outer", "outer/inner", "outer/same nodes"]


def test_the_modules_of_a_step_name_their_nodes(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(device)
    x = torch.ones(2, 4, device=device)
    capture = graphcore.capture(driver=graphcore_driver)
    with torch.no_grad():
        capture.warm_up(lambda: model(x), 1)
        with capture, capture.annotate_modules(model):
            model(x)
    labels = {node.label for node in capture.graph.snapshot().nodes}
    assert labels == {"0", "1"}
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_only_the_modules_that_are_asked_for_are_named(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()).to(device)
    x = torch.ones(2, 4, device=device)
    model(x)
    with graphcore.capture(driver=graphcore_driver) as capture:
        with pytest.raises(ConfigurationError, match="names: expected names of submodules"):
            capture.annotate_modules(model, ["2"]).__enter__()
        with capture.annotate_modules(model, ["1"]):
            model(x)
    assert [node.label for node in capture.graph.snapshot().nodes] == ["", "1"]


def test_a_label_that_is_lost_is_said(caplog: pytest.LogCaptureFixture) -> None:
    driver = EmulatedDriver()
    x = torch.ones(4)
    with caplog.at_level(logging.WARNING, "graphcore"), graphcore.capture(driver=driver) as capture:
        for after in (0, 1):  # where the block begins, and where it ends
            driver.faults.inject("nodes", after=after)
            with capture.annotate(f"layer {after}"):
                x.add_(1)
    lost = [record.message for record in caplog.records]
    assert len(lost) == 2
    assert "the label 'layer 0' is lost" in lost[0]
    assert "the label 'layer 1' is lost" in lost[1]
    assert [node.label for node in capture.graph.snapshot().nodes] == ["", ""]


def test_annotate_and_keep_are_for_the_block_only(graphcore_driver: Driver) -> None:
    capture = graphcore.capture(driver=graphcore_driver)
    with pytest.raises(LifecycleError, match=r"capture\.keep"):
        capture.keep(object())
    with pytest.raises(LifecycleError, match=r"capture\.annotate"), capture.annotate("early"):
        pass
    with pytest.raises(LifecycleError, match=r"capture\.annotate_modules"):
        capture.annotate_modules(torch.nn.ReLU())


def test_what_the_block_keeps_lives_as_long_as_an_executable(graphcore_driver: Driver) -> None:
    class Resource:
        pass

    kept, noted = Resource(), Resource()
    watch = [weakref.ref(kept), weakref.ref(noted)]
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver) as capture:
        capture.keep(kept, "a resource")
        active.keep(noted, "from a kernel")
        x.add_(1)
    graph = capture.graph
    assert {"a resource", "from a kernel", "capture stream"} <= set(graph.owners.labels())
    executable = graph.instantiate()
    graph.close()
    del kept, noted, capture, graph
    gc.collect()
    assert all(reference() is not None for reference in watch)
    executable.close()
    gc.collect()
    assert all(reference() is None for reference in watch)


def test_a_list_that_holds_itself_is_kept(graphcore_driver: Driver) -> None:
    tensor = torch.zeros(2)
    holder: list[Any] = [tensor]
    holder.append(holder)
    with graphcore.capture(driver=graphcore_driver) as capture:
        capture.keep(holder, "holder")
    assert tensor in capture.graph.owners


@pytest.mark.parametrize("label", [None, 3, b"layer"])
def test_a_label_that_is_no_text_is_refused(graphcore_driver: Driver, label: Any) -> None:
    with graphcore.capture(driver=graphcore_driver) as capture:
        annotation = capture.annotate(label)
        with pytest.raises(ConfigurationError, match="label: expected a str"), annotation:
            pass
        with pytest.raises(ConfigurationError, match="label: expected a str"):
            capture.keep(torch.zeros(1), label)
    assert capture.graph.annotations == ()


def test_keeping_outside_a_capture_does_nothing() -> None:
    active.keep(object(), "nobody's")
    assert active.current() is None


def test_the_collector_rests_inside_and_works_again_after(graphcore_driver: Driver) -> None:
    assert gc.isenabled()
    with graphcore.capture(driver=graphcore_driver):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with graphcore.capture(driver=graphcore_driver):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_rests_until_the_last_capture_of_any_thread_is_over() -> None:
    first_is_over, second_has_begun = threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        with graphcore.capture(driver=EmulatedDriver()):
            second_has_begun.set()
            first_is_over.wait(10)
            seen.append(gc.isenabled())

    other = threading.Thread(target=second)
    with graphcore.capture(driver=EmulatedDriver()):
        other.start()
        assert second_has_begun.wait(10)
    first_is_over.set()
    other.join()
    assert seen == [False]
    assert gc.isenabled()


def test_a_capture_says_what_it_is(graphcore_driver: Driver) -> None:
    capture = graphcore.capture(driver=graphcore_driver)
    assert repr(capture) == "<Capture thread_local not begun>"
    with capture:
        assert repr(capture) == "<Capture thread_local under way>"
    assert "ended with <Graph 0 nodes" in repr(capture)


# ---- capture_function ---------------------------------------------------------------------------


def test_a_function_is_warmed_up_on_the_capture_stream_then_captured(
    graphcore_driver: Driver,
) -> None:
    x = filled(graphcore_driver, 1.0)
    calls: list[bool] = []

    def step(value: torch.Tensor) -> torch.Tensor:
        calls.append(active.current() is not None)
        return value * 3

    graph = graphcore.capture_function(step, x, warmup=2, driver=graphcore_driver)
    assert calls == [False, False, True]
    x.fill_(7.0)
    assert replayed(graph, graph.outputs) == [21.0] * 4
    assert x in graph.owners
    assert step in graph.owners
    assert graph.outputs in graph.owners
    assert {"argument 0", "output", "function"} <= set(graph.owners.labels())


def test_capture_function_keeps_what_a_nested_argument_holds(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    layer = torch.nn.Linear(4, 4, device=device)
    inputs = {"x": torch.ones(1, 4, device=device), "rest": [torch.zeros(1, 4, device=device)]}

    def step(module: torch.nn.Module, values: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = module(values["x"]) + values["rest"][0]
        return result

    graph = graphcore.capture_function(step, layer, inputs, driver=graphcore_driver)
    labels = graph.owners.labels()
    assert {"argument 0.weight", "argument 0.bias"} <= set(labels)
    assert {"argument 1['x']", "argument 1['rest'][0]"} <= set(labels)
    inputs["x"].fill_(2.0)
    expected = step(layer, inputs)
    replayed_values = torch.tensor(replayed(graph, graph.outputs))
    assert torch.allclose(replayed_values, expected.cpu(), atol=1e-6)


@pytest.mark.parametrize("warmup", ["3", None, 1.5, True])
def test_a_warm_up_that_is_no_count_is_refused(warmup: Any) -> None:
    with pytest.raises(ConfigurationError, match="warmup: expected an int"):
        graphcore.capture_function(lambda: None, warmup=warmup)


def test_what_cannot_be_called_is_refused_before_a_capture_begins() -> None:
    with pytest.raises(ConfigurationError, match="fn: expected a callable, got NoneType"):
        graphcore.capture_function(None)  # type: ignore[arg-type]


def test_an_argument_given_by_name_is_refused_with_the_way_to_give_it() -> None:
    with pytest.raises(
        ConfigurationError, match=r"capture_function: .* got scale; .* use a lambda"
    ):
        graphcore.capture_function(lambda x, scale: None, 1, scale=2.0)


def test_a_negative_warm_up_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="warmup: expected at least 0, got -1"):
        graphcore.capture_function(lambda: None, warmup=-1)


def test_copies_and_fills_of_the_driver_become_nodes(graphcore_driver: Driver) -> None:
    from helpers.contract import copy_1d, fill_1d

    source, target = (Buffer.allocate(4, driver=graphcore_driver) for _ in range(2))
    source.write([1.0, 2.0, 3.0, 4.0])
    target.write(float("nan"))
    with graphcore.capture(driver=graphcore_driver) as capture:
        stream = capture.stream.handle
        graphcore_driver.copy(copy_1d(target.address, source.address, 16), stream)
        graphcore_driver.fill(fill_1d(target.address, 0, 1), stream)
    kinds = [node.kind for node in capture.graph.snapshot().nodes]
    assert kinds == [NodeKind.MEMCPY, NodeKind.MEMSET]
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert target.read().tolist() == [0.0, 2.0, 3.0, 4.0]
