"""capture.fork(): branches run beside each other, come together again, or are named."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.kernels import ONE_BLOCK, add_one, scale
from helpers.tensors import filled, poisoned, replay, replayed

import graphcore
from graphcore import CacheTypeError, CaptureError, ConfigurationError, Graph, LifecycleError
from graphcore.driver import Driver, Stream, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState
from graphcore.interop import current_stream


class Work:
    """A driver and a launch of our kernel: by handle, as libraries launch."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.function = driver.function(add_one)
        self.x = filled(driver, 1.0)

    def launch(self, stream: Stream | int) -> None:
        arguments = add_one.pack(self.x.data_ptr(), 4)
        self.driver.launch(self.function, ONE_BLOCK, arguments, int(stream))  # type: ignore[arg-type]


@pytest.fixture
def work(graphcore_driver: Driver) -> Work:
    return Work(graphcore_driver)


def _edges(graph: Graph) -> set[tuple[int, int]]:
    """The edges that no longer path makes superfluous (an event may bring such)."""
    edges = set(graph.snapshot().edges)
    after: dict[int, set[int]] = {}
    for source, target in sorted(edges, reverse=True):
        after.setdefault(source, set()).update({target}, after.get(target, ()))
    return {
        (source, target)
        for source, target in edges
        if not any(target in after.get(other, ()) for first, other in edges if first == source)
    }


def _failure(step: Callable[[], object]) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        step()
    return caught.value


# ---- shapes -------------------------------------------------------------------------------------


def test_a_fork_runs_on_its_stream_and_joins_at_the_end_of_its_block(work: Work) -> None:
    driver = work.driver
    x, y, z = filled(driver, 1.0), poisoned(driver), poisoned(driver)
    seen: list[int] = []
    with graphcore.capture(driver=driver) as capture:
        x.add_(1)
        with capture.fork() as side:
            seen.append(current_stream(driver))
            y.copy_(x)
        seen.append(current_stream(driver))
        z.copy_(y)
    assert seen == [side.stream.handle, capture.stream.handle]
    assert side.is_joined
    assert _edges(capture.graph) == {(0, 1), (1, 2)}
    x.fill_(5.0)
    assert replayed(capture.graph, z) == [6.0] * 4


def test_forks_made_at_the_same_place_run_beside_each_other(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        work.x.add_(1)
        left, right = capture.fork(), capture.fork()
        with left:
            work.launch(current_stream(work.driver))
        with right:
            work.launch(current_stream(work.driver))
        work.x.add_(1)
    assert _edges(capture.graph) == {(0, 1), (0, 2), (1, 3), (2, 3)}


def test_a_fork_that_joins_later_runs_beside_what_follows_its_block(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        work.x.add_(1)
        with capture.fork(join=False) as side:
            work.launch(side.stream)
        work.launch(capture.stream)
        with side:  # its branch goes on
            work.launch(side.stream)
        side.join()
        side.join()
        work.launch(capture.stream)
    assert _edges(capture.graph) == {(0, 1), (0, 2), (1, 3), (2, 4), (3, 4)}


def test_forks_nest_and_an_inner_one_begins_where_the_outer_is(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        work.launch(capture.stream)
        with capture.fork() as outer:
            work.launch(outer.stream)
            with capture.fork() as inner:
                work.launch(inner.stream)
            work.launch(outer.stream)
        work.launch(capture.stream)
    assert _edges(capture.graph) == {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_an_inner_fork_may_join_the_capture_instead_of_its_own_branch(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        work.launch(capture.stream)
        with capture.fork() as outer:
            with capture.fork(join=False) as inner:
                work.launch(inner.stream)
            work.launch(outer.stream)
        inner.join()
        work.launch(capture.stream)
    assert _edges(capture.graph) == {(0, 1), (0, 2), (1, 3), (2, 3)}


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_side_stream_of_ones_own_is_used_again(work: Work, rounds: int) -> None:
    side = work.driver.stream()
    with graphcore.capture(driver=work.driver) as capture:
        for _ in range(rounds):
            with capture.fork(side) as fork:
                assert fork.stream is side
                work.launch(side)
    assert len(capture.graph.snapshot().nodes) == rounds
    assert work.driver.capture_status(side.handle).state is CaptureState.NONE


def test_what_runs_beside_a_fork_without_an_order_shows_as_a_race() -> None:
    # the control: the order that a fork gives is the only one there is
    results = set()
    for seed in range(8):
        driver = EmulatedDriver(order="adversarial", seed=seed)
        x = torch.ones(4)
        with graphcore.capture(driver=driver) as capture:
            with capture.fork(join=False) as side:
                x.mul_(3)
            x.add_(1)
            side.join()
        with capture.graph.instantiate() as executable:
            replay(executable)
        results.add(x[0].item())
    assert results == {4.0, 6.0}


def test_labels_of_nodes_in_a_fork_are_theirs(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        work.launch(capture.stream)
        with capture.annotate("layer"), capture.fork() as side, capture.annotate("branch"):
            work.launch(side.stream)
        work.launch(capture.stream)
    assert [node.label for node in capture.graph.snapshot().nodes] == ["", "layer/branch", ""]


def test_an_executable_launched_in_a_fork_becomes_a_child_node_of_the_branch(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as inner:
        work.x.add_(1)
    executable = inner.graph.instantiate()
    with graphcore.capture(driver=work.driver) as capture:
        with capture.fork(join=False) as side:
            executable.launch()
        work.launch(capture.stream)
        side.join()
    assert [node.kind.value for node in capture.graph.snapshot().nodes] == ["child", "kernel"]
    assert _edges(capture.graph) == set()


def test_the_graph_keeps_the_stream_of_a_fork(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        with capture.fork() as side:
            work.launch(side.stream)
        watch = weakref.ref(side.stream)
        del side
    gc.collect()
    assert watch() is not None
    assert "fork stream" in capture.graph.owners.labels()


def test_a_fork_says_what_it_is(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture, capture.fork() as side:
        words = repr(side)
    assert words.startswith(f"<Fork open on stream {side.stream.handle:#x}, begun at ")
    assert "test_branches.py:" in words
    assert repr(side).startswith("<Fork joined")


def test_a_capture_on_another_librarys_stream_forks_too(work: Work) -> None:
    driver = work.driver
    owner = driver.stream()
    foreign = Stream(driver, owner.handle, owned=False)
    with graphcore.capture(foreign, driver=driver, on_legacy_work="ignore") as capture:
        with capture.fork() as side:
            work.launch(side.stream)
        work.launch(capture.stream)
    assert not side.stream.is_blocking
    assert _edges(capture.graph) == {(0, 1)}


# ---- unjoined -----------------------------------------------------------------------------------


def test_a_fork_left_unjoined_is_named_with_its_stream_its_line_and_its_leaf_nodes(
    work: Work,
) -> None:
    stream = work.driver.stream(blocking=True)
    function = work.driver.function(scale)
    forks: list[Any] = []

    def step() -> None:
        with graphcore.capture(stream) as capture:
            work.launch(stream)
            forks.append(capture.fork(join=False))
            with forks[0] as side, capture.annotate("lost"):
                work.launch(side.stream)
                arguments = scale.pack(work.x.data_ptr(), 2.0, 4)
                work.driver.launch(function, ONE_BLOCK, arguments, side.stream.handle)

    error = _failure(step)
    (side,), words = forks, str(error)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    assert error.location == side.place
    assert f"the fork begun at {side.place} on stream {side.stream.handle:#x}" in words
    assert "which ends in node 2 scale (lost)" in words
    assert "add_one" not in words, "only leaves are loose"
    with graphcore.capture(stream) as again:
        work.launch(stream)
    assert len(again.graph.snapshot().nodes) == 1


def test_several_unjoined_branches_are_all_named_those_of_the_users_events_too(
    work: Work,
) -> None:
    own, given = work.driver.stream(), work.driver.stream()

    def step() -> None:
        with graphcore.capture(driver=work.driver) as capture:
            with capture.fork(given, join=False):
                work.launch(given)
            own.wait(capture.stream.record())
            work.launch(own)
            work.launch(capture.stream)

    words = str(_failure(step))
    assert f"stream {given.handle:#x}, which ends in node 0 add_one" in words
    assert f"stream {own.handle:#x}, which ends in node 1 add_one" in words
    assert "node 2" not in words


def test_the_leaves_of_a_stream_that_graphcore_did_not_make_are_named(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = work.driver.stream()
    monkeypatch.setattr(type(work.driver), "own_streams", lambda driver: ())

    def step() -> None:
        with graphcore.capture(driver=work.driver) as capture:
            own.wait(capture.stream.record())
            work.launch(own)

    words = str(_failure(step))
    assert "what no stream that graphcore knows ends in, node 0 add_one" in words


def test_many_leaves_are_counted(work: Work) -> None:
    def step() -> None:
        with graphcore.capture(driver=work.driver) as capture:
            handle = capture.fork(join=False).stream.handle
            work.launch(handle)
            (root,) = work.driver.capture_status(handle).frontier
            for _ in range(11):
                work.driver.set_capture_frontier(handle, [root])
                work.launch(handle)

    assert "node 8 add_one and 2 more" in str(_failure(step))


def test_a_fork_without_work_needs_no_join(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        work.launch(capture.stream)
        capture.fork()
    assert len(capture.graph.snapshot().nodes) == 1


# ---- misuse -------------------------------------------------------------------------------------


def _its_own_stream(capture: Any) -> Any:
    return capture.fork(capture.stream)


def _a_blocking_stream(capture: Any) -> Any:
    return capture.fork(capture.driver.stream(blocking=True))


WRONG_STREAMS: dict[str, tuple[type[Exception], str, Any]] = {
    "default": (ConfigurationError, "got default stream 1", lambda capture: capture.fork(1)),
    "its_own": (ConfigurationError, "which captures already", _its_own_stream),
    "blocking": (ConfigurationError, "expected a non-blocking one", _a_blocking_stream),
    "no_stream": (CacheTypeError, "stream: expected", lambda capture: capture.fork("side")),
}


@pytest.mark.parametrize("name", WRONG_STREAMS)
def test_a_stream_that_cannot_be_a_side_stream_is_refused_and_harms_nothing(
    work: Work, name: str
) -> None:
    error, words, fork = WRONG_STREAMS[name]
    with graphcore.capture(driver=work.driver, on_legacy_work="ignore") as capture:
        with pytest.raises(error, match=words):
            fork(capture)
        work.launch(capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1


def test_a_stream_on_which_somebody_else_captures_is_refused(work: Work) -> None:
    other = work.driver.stream()
    work.driver.begin_capture(other.handle, "thread_local")
    with graphcore.capture(driver=work.driver) as capture:
        with pytest.raises(CaptureError, match="somebody else captures"):
            capture.fork(other)
        work.launch(capture.stream)
    work.driver.destroy_graph(work.driver.end_capture(other.handle))


def test_a_fork_outside_a_capture_or_on_another_thread_is_refused(work: Work) -> None:
    capture = graphcore.capture(driver=work.driver)
    with pytest.raises(LifecycleError, match=r"capture\.fork: expected a capture under way"):
        capture.fork()
    with capture:
        with pytest.raises(LifecycleError, match="expected the thread that captures"):
            in_thread(capture.fork)
        side = capture.fork()
        with pytest.raises(LifecycleError, match="expected the thread that captures"):
            in_thread(side.join)
    with pytest.raises(LifecycleError, match="expected a capture under way, got one that is over"):
        side.join()
    with pytest.raises(LifecycleError, match="got one that is over"), side:
        pass


def test_a_fork_is_entered_once_at_a_time_joined_outside_and_not_entered_again(work: Work) -> None:
    with graphcore.capture(driver=work.driver) as capture:
        with capture.fork() as side:
            work.launch(side.stream)
            with pytest.raises(LifecycleError, match="entered already"), side:
                pass
            with pytest.raises(LifecycleError, match="outside the fork's own block"):
                side.join()
        with pytest.raises(LifecycleError, match="got one that is joined"), side:
            pass
        with capture.fork(side.stream) as again:
            work.launch(again.stream)
    assert _edges(capture.graph) == {(0, 1)}


def test_an_exception_in_a_fork_that_is_caught_leaves_the_capture_whole(work: Work) -> None:

    def fail(side: Any) -> None:
        with side:
            work.launch(side.stream)
            raise KeyError("mine")

    with graphcore.capture(driver=work.driver) as capture:
        with pytest.raises(KeyError):
            fail(capture.fork())
        assert current_stream(work.driver) == capture.stream.handle
        work.launch(capture.stream)
    assert _edges(capture.graph) == {(0, 1)}


def test_a_forbidden_call_in_a_fork_is_explained_and_its_join_hides_nothing(work: Work) -> None:
    side = work.driver.stream()

    def step() -> None:
        with graphcore.capture(driver=work.driver) as capture, capture.fork(side):
            work.launch(side)
            side.synchronize()

    error = _failure(step)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert error.__cause__ is not None
    assert "joining the fork" in error.__cause__.__notes__[0]
    assert active.current() is None
    assert side.query()


def test_a_fork_of_an_invalidated_capture_is_refused_with_the_first_error(work: Work) -> None:
    def step() -> None:
        with graphcore.capture(driver=work.driver) as capture:
            with pytest.raises(graphcore.CudaError):
                capture.stream.synchronize()
            capture.fork()

    error = _failure(step)
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert "cuStreamSynchronize answered CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in str(error)
