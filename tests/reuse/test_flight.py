"""What runs is not taken away: launches under way, pins of the device, captures of other code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.caching import Steps, add_up, check, reasons
from helpers.contract import in_thread
from helpers.kernels import ONE_BLOCK
from helpers.spinning import MILLISECOND, spin
from helpers.tensors import cuda_driver, filled

import graphcore
from graphcore import GraphCache, GraphExec
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.executable.retired import release_finished
from graphcore.interop import current_stream


class LateEvents(EmulatedDriver):
    """Events have not happened until somebody waits for them, or ``finish``."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: set[int] = set()
        self.waited = 0
        self.is_finished = False

    def query_event(self, event: Any) -> bool:
        super().query_event(event)
        return self.is_finished or event in self.happened

    def synchronize_event(self, event: Any) -> None:
        super().synchronize_event(event)
        self.waited += event not in self.happened
        self.happened.add(event)


@pytest.fixture
def late() -> Iterator[LateEvents]:
    driver = LateEvents()
    yield driver
    driver.is_finished = True
    release_finished()


def launched(cache: GraphCache, key: int, steps: Steps) -> GraphExec:
    executable = cache.get_or_capture(key, steps(key))
    assert isinstance(executable, GraphExec)
    executable.launch(steps.driver.stream())
    return executable


# ---- with events that are late, on the emulated driver -------------------------------------------


def test_an_entry_in_flight_stays_while_another_can_go(late: LateEvents) -> None:
    cache, steps = GraphCache(max_entries=2, driver=late), Steps(late)
    running = launched(cache, 1, steps)
    cache.get_or_capture(2, steps(2))
    cache.get_or_capture(3, steps(3))
    assert cache.keys() == [1, 3]
    assert not running.is_closed
    assert late.waited == 0
    late.is_finished = True
    cache.get_or_capture(4, steps(4))
    assert cache.keys() == [3, 4], "it ran to its end: the least recently used goes"


def test_where_all_are_in_flight_the_least_recently_used_is_waited_for(late: LateEvents) -> None:
    cache, steps = GraphCache(max_entries=2, driver=late), Steps(late)
    launched(cache, 1, steps)
    launched(cache, 2, steps)
    cache.get_or_capture(3, steps(3))
    assert cache.keys() == [2, 3]
    assert late.waited == 1
    assert "after its running launch" in reasons(cache)[-2]
    add_up(cache)


def test_a_launch_after_it_was_seen_idle_is_in_flight_again(late: LateEvents) -> None:
    cache, steps = GraphCache(max_entries=2, driver=late), Steps(late)
    first, second = launched(cache, 1, steps), cache.get_or_capture(2, steps(2))
    late.is_finished = True
    cache.get_or_capture(3, steps(3))  # looks at 1, which is not in flight, and takes it
    assert first.is_closed
    late.is_finished = False
    second.launch(late.stream())
    cache.get_or_capture(4, steps(4))
    assert cache.keys() == [2, 4]


@pytest.mark.parametrize("how", ["evicted", "idle", "closed"])
def test_idle_entries_in_flight_stay_and_asked_ones_keep_their_memory(
    late: LateEvents, how: str
) -> None:
    now = [0.0]
    cache = GraphCache(idle_seconds=10, clock=lambda: now[0], driver=late)
    steps = Steps(late)
    executable = launched(cache, 1, steps)
    watch = weakref.ref(executable.graph)
    size = cache.bytes
    if how == "idle":
        now[0] = 100.0
        assert cache.collect() == 0
        assert not executable.is_closed
        late.is_finished = True
        assert cache.collect() == 1
    elif how == "closed":
        executable.close()
        assert cache.get(1) is None
        assert watch() is not None
        late.is_finished = True
        cache.collect()
    else:
        assert cache.evict(1)
        assert executable.is_closed, "it takes no more launches"
        assert watch() is not None, "but what it works on lives"
        assert (len(cache), cache.bytes) == (0, size)
        late.is_finished = True
        cache.collect()
    gc.collect()
    assert watch() is None
    assert cache.bytes == 0
    add_up(cache)


def test_an_update_keeps_the_old_owners_until_their_launch_is_over(late: LateEvents) -> None:
    cache, steps = GraphCache(driver=late), Steps(late)
    executable = cache.get_or_capture(1, steps(1), family="decode")
    executable.launch(late.stream())
    old = weakref.ref(executable.outputs)
    assert cache.get_or_capture(2, steps(2), family="decode") is executable
    gc.collect()
    assert old() is not None
    late.is_finished = True
    cache.collect()
    gc.collect()
    assert old() is None


def test_an_update_that_does_not_fit_beside_the_old_graph_waits_for_it(late: LateEvents) -> None:
    steps = Steps(late)
    probe = GraphCache(driver=late)
    probe.get_or_capture(1, steps(1))
    cache = GraphCache(max_bytes=probe.bytes, driver=late)
    executable = cache.get_or_capture(1, steps(1), family="decode")
    executable.launch(late.stream())
    assert cache.get_or_capture(2, steps(2), family="decode") is executable
    assert cache.bytes <= probe.bytes
    assert late.waited == 1


def test_a_closed_cache_has_waited_for_what_ran(late: LateEvents) -> None:
    cache, steps = GraphCache(driver=late), Steps(late)
    launched(cache, 1, steps)
    cache.close()
    assert late.waited == 1
    assert cache.bytes == 0


@pytest.mark.parametrize("how", ["lost context", "closed driver"])
def test_where_nothing_can_run_any_more_nothing_is_kept(late: LateEvents, how: str) -> None:
    cache, steps = GraphCache(driver=late), Steps(late)
    watch = weakref.ref(launched(cache, 1, steps).graph)
    if how == "closed driver":
        late.close()
    else:
        late.faults.inject("query_event", code="CUDA_ERROR_ILLEGAL_ADDRESS", count=9)
    cache.close()
    gc.collect()
    assert watch() is None
    assert cache.bytes == 0


# ---- on both drivers -----------------------------------------------------------------------------


def test_an_entry_taken_away_during_a_capture_is_destroyed_after_it(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    executable = cache.get_or_capture(1, steps(1))
    check(executable, 3.0)
    destroyed: list[int] = []
    destroy = graphcore_driver.destroy_exec

    def noting(handle: Any) -> None:
        destroyed.append(handle)
        destroy(handle)

    monkeypatch.setattr(graphcore_driver, "destroy_exec", noting)
    cache.get_or_capture(2, steps(2))
    before = list(destroyed)
    with graphcore.capture(driver=graphcore_driver) as capture:
        cache.evict(1)
        assert executable.is_closed
        cache.evict(2)
        steps.x.add_(1)
        assert destroyed == before
    cache.collect()
    assert len(capture.graph.snapshot().nodes) == 1
    assert cache.bytes == 0


def test_an_entry_taken_away_beside_another_threads_capture_breaks_nothing(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    check(cache.get_or_capture(1, steps(1)), 3.0)
    with graphcore.capture(driver=graphcore_driver, mode="global") as capture:
        in_thread(lambda: cache.evict(1))
        steps.x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1
    cache.collect()
    assert cache.bytes == 0


def test_a_lookup_inside_another_librarys_capture_does_not_break_it(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, steps = GraphCache(max_entries=1, driver=graphcore_driver), Steps(graphcore_driver)
    launched(cache, 1, steps)
    query = graphcore_driver.query_event
    monkeypatch.setattr(graphcore_driver, "query_event", lambda event: False)
    cache.evict(1)
    cache.get_or_capture(2, steps(2))
    monkeypatch.setattr(graphcore_driver, "query_event", query)
    with graphcore_driver.stream() as stream:
        graphcore_driver.begin_capture(stream.handle, "thread_local")  # nobody told graphcore
        assert cache.get(2) is not None
        graph = graphcore_driver.end_capture(stream.handle)
        graphcore_driver.destroy_graph(graph)
    cache.collect()
    assert cache.keys() == [2]


# ---- with kernels that take long, on a device ----------------------------------------------------


def slow_step(
    driver: Driver, x: torch.Tensor, flag: torch.Tensor, milliseconds: int
) -> Callable[[], torch.Tensor]:
    """``(x + 1) * 2`` with a kernel in between that takes its time."""

    def step() -> torch.Tensor:
        between = x + 1
        function = driver.function(spin)
        arguments = spin.pack(flag.data_ptr(), 1.0, milliseconds * MILLISECOND)
        driver.launch(function, ONE_BLOCK, arguments, current_stream(driver))
        return between * 2

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["budget", "asked"])
def test_memory_of_a_running_graph_is_not_given_back(how: str) -> None:
    driver = cuda_driver()
    x, flag = filled(driver, 1.0, 1 << 20), filled(driver, 0.0, 1)
    cache = GraphCache(max_entries=1, driver=driver)
    executable = cache.get_or_capture("slow", slow_step(driver, x, flag, 300), warmup=1)
    output = executable.outputs
    output.fill_(float("nan"))
    watch = weakref.ref(executable.graph)  # type: ignore[union-attr]
    driver.synchronize()
    stream = driver.stream()
    executable.launch(stream)
    if how == "asked":
        cache.evict("slow")
        assert not stream.query(), "the launch runs on"
        assert watch() is not None
        assert cache.bytes > 0
        stream.synchronize()
        cache.collect()
    else:
        cache.get_or_capture("next", lambda: x * 3)
        assert stream.query(), "it was waited for"
    gc.collect()
    assert watch() is None
    assert executable.is_closed
    driver.synchronize()
    assert output.unique().tolist() == [4.0]
    add_up(cache)


@pytest.mark.gpu
def test_a_warm_up_in_a_shared_pool_does_not_disturb_a_graph_that_runs_there() -> None:
    driver = cuda_driver()
    x, flag = filled(driver, 1.0, 1 << 20), filled(driver, 0.0, 1)
    cache = GraphCache(share_pool=True, driver=driver)
    slow = cache.get_or_capture("slow", slow_step(driver, x, flag, 300), warmup=1)
    slow.outputs.fill_(float("nan"))
    driver.synchronize()
    slow.launch(driver.stream())
    # its temporaries lie where those of the running graph do
    cache.get_or_capture("other", lambda: (x + 50) * 2)
    driver.synchronize()
    assert slow.outputs.unique().tolist() == [4.0]
