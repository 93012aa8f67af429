"""Captures take lent streams: graphs that live share none, those that are gone give theirs back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tensors import filled, replay, replayed

import graphcore
from graphcore import CaptureError, Graph, GraphExec, GraphPlan
from graphcore.driver import Driver, Stream
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.lent_streams import LentStream, lane_of
from graphcore.executable import Capture
from graphcore.executable.capture_place import CapturePlace
from graphcore.interop.torch import MemoryPool


def step(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def captured(driver: Driver, value: float = 1.0, **options: Any) -> Graph:
    x = filled(driver, float(value))
    return graphcore.capture_function(step, x, driver=driver, **options)


def streams_of(graph: Graph | GraphExec) -> list[Stream]:
    return [each.object for each in graph.owners if isinstance(each.object, Stream)]


def handles_of(*graphs: Graph | GraphExec) -> list[int]:
    return [stream.handle for graph in graphs for stream in streams_of(graph)]


def next_handle(driver: Driver) -> int:
    """Of the stream that a capture would get now."""
    with graphcore.capture(driver=driver) as capture:
        filled(driver, 1.0).add_(1)
    return capture.stream.handle


# ---- one after another, and at once -------------------------------------------------------------


def test_graphs_that_are_dropped_one_after_another_are_captured_on_one_stream(
    graphcore_driver: Driver,
) -> None:
    handles = set()
    for value in range(5):
        graph = captured(graphcore_driver, value)
        handles.update(handles_of(graph))
        assert replayed(graph, graph.outputs) == [value * 2 + 1] * 4
        graph.close()
        del graph
    assert len(handles) == 1
    assert graphcore_driver.own_streams() == tuple(handles)


def test_graphs_that_live_at_once_have_streams_of_their_own(graphcore_driver: Driver) -> None:
    graphs = [captured(graphcore_driver, value) for value in range(4)]
    assert len(set(handles_of(*graphs))) == 4
    assert graphcore_driver.capture_streams.lent == 4
    for value, graph in enumerate(graphs):
        assert replayed(graph, graph.outputs) == [value * 2 + 1] * 4
    gone = handles_of(graphs.pop(1))
    del graph
    gc.collect()
    assert [next_handle(graphcore_driver)] == gone


def test_captures_on_one_given_stream_share_it_and_it_is_never_lent(
    graphcore_driver: Driver,
) -> None:
    own = graphcore_driver.stream(blocking=True)
    graphs = [captured(graphcore_driver, stream=own) for _ in range(2)]
    assert handles_of(*graphs) == [own.handle] * 2
    del graphs
    assert next_handle(graphcore_driver) != own.handle
    own.synchronize()


def test_a_stream_of_a_capture_may_be_given_to_another_and_both_hold_it(
    graphcore_driver: Driver,
) -> None:
    first = captured(graphcore_driver)
    (stream,) = streams_of(first)
    second = captured(graphcore_driver, 3.0, stream=stream)
    handle = stream.handle
    del stream
    first.close()
    assert next_handle(graphcore_driver) != handle
    assert replayed(second, second.outputs) == [7.0] * 4
    second.close()
    del first, second
    gc.collect()
    assert graphcore_driver.capture_streams.lent == 0
    assert handle in graphcore_driver.own_streams()


def test_captures_into_one_pool_share_a_stream_that_goes_back_with_the_pool(
    graphcore_driver: Driver,
) -> None:
    pool = MemoryPool(graphcore_driver.device)
    graphs = [captured(graphcore_driver, pool=pool) for _ in range(3)]
    (handle,) = set(handles_of(*graphs))
    del graphs
    assert next_handle(graphcore_driver) != handle
    del pool
    assert graphcore_driver.capture_streams.lent == 0


# ---- what holds a stream ------------------------------------------------------------------------


def executable(graph: Graph) -> Any:
    made = graph.instantiate()
    graph.close()
    return made


def clone(graph: Graph) -> Any:
    made = graph.clone()
    graph.close()
    return made


def updated(graph: Graph) -> Any:
    made = captured(graph.driver, 5.0).instantiate()
    assert made.update(graph)
    graph.close()
    return made


def rebound(graph: Graph) -> Any:
    made = graph.instantiate()
    made.rebind({"argument 0": filled(graph.driver, 9.0)})
    graph.close()
    return made


def embedded(graph: Graph) -> Any:
    with graph.instantiate() as made, graphcore.capture(driver=graph.driver) as capture:
        made.launch(capture.stream)
    graph.close()
    return capture.graph


def planned(graph: Graph) -> Any:
    plan = GraphPlan()
    plan.embed(graph)
    made = plan.build({}, driver=graph.driver)
    graph.close()
    return made


def captured_function(graph: Graph) -> Any:
    """The stream object alone, as somebody keeps it who launches there."""
    (stream,) = streams_of(graph)
    graph.close()
    return stream


HOLDERS = [executable, clone, updated, rebound, embedded, planned, captured_function]


@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
def test_a_stream_goes_back_only_when_the_last_that_works_with_its_graph_is_gone(
    graphcore_driver: Driver, hold: Any
) -> None:
    graph = captured(graphcore_driver)
    (handle,) = handles_of(graph)
    holder = hold(graph)
    others = [captured(graphcore_driver) for _ in range(3)]
    assert handle not in handles_of(*others)
    del others
    if isinstance(holder, (Graph, GraphExec)):
        holder.close()
    del holder, graph
    gc.collect()
    idle = graphcore_driver.capture_streams.idle
    assert graphcore_driver.capture_streams.lent == 0
    assert handle in handles_of(*[captured(graphcore_driver) for _ in range(idle)])


def test_an_executable_that_took_another_graph_lets_go_of_the_first_ones_stream(
    graphcore_driver: Driver,
) -> None:
    first, second = captured(graphcore_driver), captured(graphcore_driver, 3.0)
    made = first.instantiate()
    handles = handles_of(first, second)
    assert made.update(second)
    first.close()
    second.close()
    del first, second
    gc.collect()
    assert next_handle(graphcore_driver) == handles[0]
    replay(made)


def test_a_stream_that_its_user_closes_is_lent_to_nobody_and_the_graph_goes_on(
    graphcore_driver: Driver,
) -> None:
    graph = captured(graphcore_driver)
    (stream,) = streams_of(graph)
    lane = lane_of(stream)
    assert lane is not None
    assert lane in graph.owners
    stream.close()
    assert stream.handle not in graphcore_driver.own_streams()
    assert replayed(graph, graph.outputs) == [3.0] * 4


# ---- captures that fail -------------------------------------------------------------------------


def test_captures_that_are_broken_one_after_another_take_the_same_streams(
    graphcore_driver: Driver,
) -> None:
    """A stream of its own each time would leave torch's workspace of it behind each time."""
    x = filled(graphcore_driver, 1.0)
    broken = set()

    def break_it() -> None:
        with graphcore.capture(driver=graphcore_driver) as capture, capture.fork() as side:
            broken.update((capture.stream.handle, side.stream.handle))
            x.add_(1)
            graphcore_driver.synchronize_stream(capture.stream.handle)

    for _ in range(5):
        with pytest.raises(CaptureError):
            break_it()
        gc.collect()
    assert len(broken) == 2
    graph = captured(graphcore_driver)
    assert set(handles_of(graph)) <= broken
    assert replayed(graph, graph.outputs) == [3.0] * 4


def test_a_stream_that_a_broken_capture_did_not_leave_is_not_lent_again() -> None:
    driver = EmulatedDriver()
    with pytest.raises(CaptureError), graphcore.capture(driver=driver) as capture:
        driver.faults.inject("end_capture", count=2)
    handle = capture.stream.handle
    driver.destroy_graph(driver.end_capture(handle))
    del capture
    gc.collect()
    assert handle not in driver.own_streams()
    assert driver.capture_streams.idle == 0


def test_a_stream_of_which_the_driver_does_not_say_that_it_is_free_is_not_lent_again() -> None:
    driver = EmulatedDriver()
    driver.faults.inject("begin_capture")
    driver.faults.inject("capture_status", after=1)  # the first asks before it begins
    with pytest.raises(graphcore.CudaError):
        graphcore.capture(driver=driver).__enter__()
    gc.collect()
    assert driver.own_streams() == ()


def test_the_driver_is_not_asked_about_a_stream_that_was_closed_in_a_block_that_fails(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, closed, asked = filled(graphcore_driver, 1.0), set[int](), set[int]()
    ask = graphcore_driver.capture_status

    def asking(handle: Any) -> Any:
        asked.update({handle} & closed)
        return ask(handle)

    def fail() -> None:
        with graphcore.capture(driver=graphcore_driver) as capture:
            fork = capture.fork()
            with fork:
                x.add_(1)
            closed.add(fork.stream.handle)
            fork.stream.close()
            raise ZeroDivisionError

    monkeypatch.setattr(graphcore_driver, "capture_status", asking)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert closed
    assert not asked


class Restless(list[Any]):
    """Cannot be looked through."""

    def __iter__(self) -> Any:
        raise KeyError("restless")


def _fails_in_its_block(capture: Capture, x: torch.Tensor) -> None:
    with capture:
        x.add_(1)
        raise ZeroDivisionError


def _is_broken(capture: Capture, x: torch.Tensor) -> None:
    with capture:
        x.add_(1)
        capture.driver.synchronize_stream(capture.stream.handle)


def _keeps_what_cannot_be_kept(capture: Capture, x: torch.Tensor) -> None:
    with capture:
        x.add_(1)
        capture.keep(Restless([1]))


def _fails_in_its_warm_up(capture: Capture, x: torch.Tensor) -> None:
    capture.warm_up(lambda: x.fill_(1 // 0), 1)


@pytest.mark.parametrize(
    "fail",
    [_fails_in_its_block, _is_broken, _keeps_what_cannot_be_kept, _fails_in_its_warm_up],
    ids=lambda fail: fail.__name__.lstrip("_"),
)
def test_however_a_capture_fails_its_workspaces_stay_with_the_stream(
    graphcore_driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[Capture, torch.Tensor], None],
) -> None:
    """Torch keeps a workspace for the stream, where the next capture works in it."""
    kept: list[CapturePlace] = []
    monkeypatch.setattr(CapturePlace, "keep_workspaces", lambda place, _=(): kept.append(place))
    capture, x = graphcore.capture(driver=graphcore_driver), filled(graphcore_driver, 1.0)
    with pytest.raises((ZeroDivisionError, CaptureError, KeyError)):
        fail(capture, x)
    assert len(kept) == 1


def test_a_capture_without_what_was_expected_keeps_its_workspaces(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[CapturePlace] = []
    monkeypatch.setattr(CapturePlace, "keep_workspaces", lambda place, _=(): kept.append(place))
    x = filled(graphcore_driver, 1.0)
    with pytest.raises(CaptureError), graphcore.capture(driver=graphcore_driver, expect=5):
        x.add_(1)
    assert len(kept) == 1


def test_an_error_of_the_block_that_broke_nothing_gives_the_stream_back(
    graphcore_driver: Driver,
) -> None:
    with pytest.raises(ZeroDivisionError), graphcore.capture(driver=graphcore_driver) as capture:
        _ = 1 // 0
    handle = capture.stream.handle
    del capture
    gc.collect()
    assert next_handle(graphcore_driver) == handle


def test_captures_that_could_not_begin_take_one_stream_in_all() -> None:
    driver = EmulatedDriver()
    for _ in range(3):
        with graphcore.testing.inject(driver, "begin_capture"), pytest.raises(graphcore.CudaError):
            graphcore.capture(driver=driver).__enter__()
        gc.collect()
    (handle,) = driver.own_streams()
    assert next_handle(driver) == handle


# ---- forks and threads --------------------------------------------------------------------------


def test_side_streams_are_lent_too_and_held_by_the_graph(graphcore_driver: Driver) -> None:
    x, y = filled(graphcore_driver, 1.0), filled(graphcore_driver, 2.0)
    used = []
    for _ in range(3):
        with graphcore.capture(driver=graphcore_driver) as capture:
            with capture.fork():
                x.add_(1)
            with capture.fork():
                y.add_(1)
        graph = capture.graph
        assert all(isinstance(stream, LentStream) for stream in streams_of(graph))
        used.append(set(handles_of(graph)))
        assert len(used[-1]) == 3
        assert next_handle(graphcore_driver) not in used[-1]
        graph.close()
        del graph, capture
        gc.collect()
    assert used[1] <= used[0] | set(graphcore_driver.own_streams())
    assert len(graphcore_driver.own_streams()) <= 4


def test_threads_that_capture_at_once_share_no_stream(graphcore_driver: Driver) -> None:
    together = threading.Barrier(3)
    graphs: list[list[Graph]] = [[], [], []]
    inputs = [filled(graphcore_driver, value) for value in (1.0, 2.0, 3.0)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(4):
                together.wait(timeout=60)
                graph = graphcore.capture_function(
                    step, inputs[index], driver=graphcore_driver, on_legacy_work="ignore"
                )
                graphs[index].append(graph)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    made = [graph for each in graphs for graph in each]
    assert len(set(handles_of(*made))) == 12
    for value, each in zip((3.0, 5.0, 7.0), graphs, strict=True):
        assert all(replayed(graph, graph.outputs) == [value] * 4 for graph in each)
