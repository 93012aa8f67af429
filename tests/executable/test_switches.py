"""Updates between graphs that an executable has had before: one call of the driver, all the same.

What such an update must not forget: owners, runs that launches still need, guards, changes of
single nodes, captures under way, and graphs that are no longer what they were.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, fill_value, write_cluster_size
from helpers.tensors import replay

import graphcore
from graphcore import (
    Buffer,
    CacheTypeError,
    Graph,
    LifecycleError,
    OutputGuard,
    StaleGraphError,
    UpdateStatus,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import KernelParams, LaunchConfig, RawUpdate, UpdateResult
from graphcore.executable import update
from graphcore.executable.retired import release_finished
from graphcore.executable.switches import _MOST_VERSIONS
from graphcore.resources.lifetime import OwnerSet
from graphcore.resources.tensors import TensorRef


class Owner:
    """Something that a graph keeps alive."""


def graph_of(bench: Bench, *params: KernelParams, owners: OwnerSet | None = None) -> Graph:
    """A graph of our own, as a capture makes one."""
    handle = build(bench, tuple(map(Step, params)))
    return Graph(bench.driver, bench.driver.clone_graph(handle), owners=owners)


def filling(bench: Bench, x: int, value: float, *owners: object) -> Graph:
    kept = OwnerSet().with_(*owners, label="owner")
    return graph_of(bench, bench.kernel_params(fill_value, x, value, 4), owners=kept)


class Turns:
    """An executable whose graphs, filling ``x`` with 1, 2, ..., have each had their turns."""

    def __init__(self, bench: Bench, count: int = 2, guard: Any = None) -> None:
        self.bench, self.x = bench, bench.alloc(16)
        self.owners = [Owner() for _ in range(count)]
        values = range(1, count + 1)
        self.graphs = [
            filling(bench, self.x, value, owner)
            for value, owner in zip(values, self.owners, strict=True)
        ]
        self.executable = self.graphs[0].instantiate(guard=guard)
        for _ in range(4):
            for index in range(count):
                self.turn(index)

    def turn(self, index: int) -> None:
        """Takes a graph's parameters, launches, and looks at the result."""
        self.bench.poison(self.x, 16)
        assert self.executable.update(self.graphs[index]).status is UpdateStatus.UPDATED
        replay(self.executable, self.bench.stream)
        assert self.bench.get(self.x, 4) == [index + 1] * 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of an emulated driver, by name."""
    noted: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*arguments: Any, **keywords: Any) -> Any:
            noted.append(name)
            return call(*arguments, **keywords)

        return noted_call

    for name in Driver.__abstractmethods__:
        monkeypatch.setattr(EmulatedDriver, name, noting(name, getattr(EmulatedDriver, name)))
    return noted


@pytest.mark.parametrize("count", [2, 3, 5])
def test_graphs_that_take_turns_ask_the_driver_for_the_update_alone(
    calls: list[str], count: int
) -> None:
    bench = Bench(EmulatedDriver())
    turns = Turns(bench, count)
    for index in (0, 1, 0, count - 1) * 3:
        calls.clear()
        outcome = turns.executable.update(turns.graphs[index])
        first = [*calls]
        turns.executable.launch(bench.stream)
        if turns.executable.updates.updated > 4 * count + 5:
            assert first == ["update_exec"]
        assert outcome.status is UpdateStatus.UPDATED
    bench.close()


def test_a_switch_makes_no_objects_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(EmulatedDriver())
    answer = RawUpdate(UpdateResult.SUCCESS)
    monkeypatch.setattr(EmulatedDriver, "update_exec", lambda _self, _executable, _graph: answer)
    turns = Turns(bench, 1)
    turns.graphs.append(filling(bench, turns.x, 2.0))
    switch, graphs = turns.executable.update, turns.graphs
    for number in range(8):
        switch(graphs[number % 2])
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for number in range(200):
            switch(graphs[number % 2])
        grown = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert grown < 20
    bench.close()


def test_a_switch_is_counted_and_told_as_any_update(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    turns = Turns(bench)
    updated = turns.executable.updates.updated
    with caplog.at_level(logging.INFO, "graphcore"):
        outcomes = [turns.executable.update(graph) for graph in turns.graphs * 2]
    assert turns.executable.updates.updated == updated + 4
    assert [message.partition(": ")[2] for message in caplog.messages] == list(map(str, outcomes))
    assert turns.executable.graph is turns.graphs[1]


# ---- owners -------------------------------------------------------------------------------------


def test_owners_take_turns_with_their_graphs(bench: Bench) -> None:
    turns = Turns(bench)
    for index in (0, 1, 0, 1):
        turns.turn(index)
        [owner] = turns.executable.owners
        assert owner.object is turns.owners[index]


class LateEvents(EmulatedDriver):
    """An emulated driver whose events have not happened until the test says so."""

    has_happened = False

    def query_event(self, event: int) -> bool:  # type: ignore[override]
        return self.has_happened and super().query_event(event)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", range(1, 8))
def test_owners_of_a_running_launch_live_however_often_their_graphs_took_turns(rounds: int) -> None:
    driver = LateEvents()
    bench = Bench(driver)
    driver.has_happened = True
    turns = Turns(bench)
    driver.has_happened = False
    watches = [weakref.ref(owner) for owner in turns.owners]
    turns.owners.clear()
    for number in range(rounds):
        turns.executable.update(turns.graphs[number % 2])
        turns.executable.launch(bench.stream)
        if number % 3 == 1:
            release_finished()  # a fence is made, and has not passed
    turns.executable.update(filling(bench, turns.x, 9.0))
    for graph in turns.graphs:
        graph.close()
    gc.collect()
    assert [watch() is not None for watch in watches] == [rounds > 0, rounds > 1 or rounds == 1]
    driver.has_happened = True
    assert release_finished() == 0
    gc.collect()
    assert [watch() for watch in watches] == [None, None]
    bench.close()


def test_a_look_that_spares_turns_leaves_them_cheap() -> None:
    driver = LateEvents()
    bench = Bench(driver)
    driver.has_happened = True
    turns = Turns(bench)
    held = turns.executable._resource.held
    turn = held.turn
    assert release_finished(turns=False) == 1
    assert held.turn is turn
    turns.executable.update(filling(bench, turns.x, 9.0))
    turns.executable.launch(bench.stream)
    assert release_finished(turns=False) == 0, "what was new is looked at"
    bench.close()


def test_owners_that_were_let_go_are_kept_again_after_their_next_turn() -> None:
    driver = LateEvents()
    bench = Bench(driver)
    driver.has_happened = True
    turns = Turns(bench)
    assert release_finished() == 0  # all has run: only the current owners are kept
    driver.has_happened = False
    watch = weakref.ref(turns.owners[0])
    turns.owners.clear()
    turns.executable.update(turns.graphs[0])
    turns.executable.launch(bench.stream)
    turns.executable.update(turns.graphs[1])
    turns.graphs.pop(0).close()
    gc.collect()
    assert watch() is not None, "its launch runs"
    assert release_finished() == 1
    driver.has_happened = True
    assert release_finished() == 0
    gc.collect()
    assert watch() is None
    bench.close()


def test_releasing_on_another_thread_while_graphs_take_turns_loses_nothing() -> None:
    driver = LateEvents()
    bench = Bench(driver)
    turns = Turns(bench)
    stop = threading.Event()

    def release() -> None:
        while not stop.is_set():
            release_finished()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        for number in range(300):
            turns.executable.update(turns.graphs[number % 2])
            turns.executable.launch(bench.stream)
    finally:
        stop.set()
        thread.join()
    watches = [weakref.ref(owner) for owner in turns.owners]
    turns.owners.clear()
    turns.graphs.clear()
    gc.collect()
    assert None not in [watch() for watch in watches]
    turns.executable.close()
    driver.has_happened = True
    assert release_finished() == 0
    gc.collect()
    assert [watch() for watch in watches] == [None, None]
    bench.close()


def test_a_graph_that_keeps_something_else_now_is_not_taken_for_what_it_was(bench: Bench) -> None:
    turns = Turns(bench)
    other = Owner()
    turns.graphs[0].keep(OwnerSet().with_(other, label="other"))
    turns.turn(0)
    assert turns.executable.owners.labels() == ("other",)


# ---- what else must not be forgotten ------------------------------------------------------------


def test_a_closed_graph_is_refused(bench: Bench) -> None:
    turns = Turns(bench)
    turns.graphs[0].close()
    with pytest.raises(LifecycleError, match="got a closed one"):
        turns.executable.update(turns.graphs[0])
    turns.turn(1)


def test_a_closed_executable_is_refused(bench: Bench) -> None:
    turns = Turns(bench)
    turns.executable.close()
    with pytest.raises(LifecycleError, match="update: expected an open executable"):
        turns.executable.update(turns.graphs[0])


@pytest.mark.parametrize("wrong", [None, 3, "graph", object()])
def test_what_is_no_graph_is_refused_after_many_turns_too(bench: Bench, wrong: Any) -> None:
    turns = Turns(bench)
    with pytest.raises(CacheTypeError, match="expected a Graph"):
        turns.executable.update(wrong)


def test_a_capture_under_way_is_noticed(bench: Bench) -> None:
    turns = Turns(bench)
    with (
        pytest.raises(LifecycleError, match="not while a capture is under way"),
        graphcore.capture(driver=bench.driver),
    ):
        turns.executable.update(turns.graphs[0])
    turns.turn(0)


def test_changes_of_single_nodes_are_gone_with_the_version(bench: Bench) -> None:
    turns = Turns(bench)
    for _ in range(2):
        turns.turn(0)
        turns.executable.set_params(0, {1: 7.0})
        replay(turns.executable, bench.stream)
        assert bench.get(turns.x, 4) == [7.0] * 4
        turns.turn(1)
        turns.turn(0)


def test_prepared_changes_go_on_after_a_switch(bench: Bench) -> None:
    turns = Turns(bench)
    bound = turns.executable.bind_params(0)
    for value in (5.0, 6.0):
        turns.turn(1)
        bound(turns.x, value, 4)
        replay(turns.executable, bench.stream)
        assert bench.get(turns.x, 4) == [value] * 4
        turns.turn(0)


def test_a_node_that_is_switched_off_stays_off(bench: Bench) -> None:
    turns = Turns(bench)
    turns.turn(0)
    turns.executable.enable(0, False)
    for graph in turns.graphs * 2:
        bench.poison(turns.x, 16)
        turns.executable.update(graph)
        replay(turns.executable, bench.stream)
        assert bench.get(turns.x, 4) != bench.get(turns.x, 4), "nothing was written"
    turns.executable.enable(0)
    turns.turn(1)


def test_a_cluster_size_that_is_not_applied_is_found_every_time(bench: Bench) -> None:
    out = bench.alloc(4)
    sized = [
        graph_of(
            bench,
            bench.kernel_params(
                write_cluster_size,
                out,
                config=LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(size, 1, 1)),
            ),
        )
        for size in (2, 2, 4)
    ]
    executable = sized[0].instantiate()
    for index in (1, 0) * 4:
        assert executable.update(sized[index]).status is UpdateStatus.UPDATED
    for index, size in ((2, 4), (0, 2), (2, 4)):
        outcome = executable.update(sized[index])
        assert (outcome.status, outcome.field) == (UpdateStatus.REINSTANTIATED, "cluster")
        bench.poison(out, 4)
        replay(executable, bench.stream)
        assert bench.get(out, 1, "int32") == [size]


def test_a_graph_of_several_cluster_sizes_is_compared_with_another_only_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = [bench.alloc(4), bench.alloc(4)]

    def mixed() -> Graph:
        configs = [LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(size, 1, 1)) for size in (2, 4)]
        pairs = zip(outs, configs, strict=True)
        return graph_of(
            bench,
            *(bench.kernel_params(write_cluster_size, out, config=each) for out, each in pairs),
        )

    graphs = [mixed(), mixed()]
    executable = graphs[0].instantiate()
    reads: list[int] = []
    read = update.read_outline

    def noting(*arguments: Any, **keywords: Any) -> Any:
        reads.append(1)
        return read(*arguments, **keywords)

    monkeypatch.setattr(update, "read_outline", noting)
    for number in range(1, 9):
        del reads[:]
        assert executable.update(graphs[number % 2]).status is UpdateStatus.UPDATED
        assert bool(reads) is (number == 1), number
    replay(executable, bench.stream)
    assert [bench.get(out, 1, "int32") for out in outs] == [[2], [4]]


def test_a_new_executable_behind_the_object_forgets_what_the_old_one_knew(bench: Bench) -> None:
    turns = Turns(bench)
    two = graph_of(
        bench,
        bench.kernel_params(fill_value, turns.x, 3.0, 4),
        bench.kernel_params(add_one, turns.x, 4),
    )
    turns.turn(1)
    assert turns.executable.update(two).status is UpdateStatus.REINSTANTIATED
    assert turns.executable.update(turns.graphs[0]).status is UpdateStatus.REINSTANTIATED
    for index in (1, 0, 1, 0, 1):
        turns.turn(index)


def test_a_driver_that_refuses_what_it_took_before_is_explained() -> None:
    bench = Bench(EmulatedDriver())
    turns = Turns(bench)
    answer = RawUpdate(UpdateResult.PARAMETERS_CHANGED)
    bench.driver.update_exec = lambda _executable, _graph: answer  # type: ignore[method-assign]
    outcome = turns.executable.update(turns.graphs[0], reinstantiate=False)
    assert outcome.status is UpdateStatus.REFUSED
    assert "parameters_changed" in outcome.reason
    del bench.driver.update_exec
    turns.turn(0)
    bench.close()


def test_a_failure_of_the_driver_passes_and_changes_nothing() -> None:
    bench = Bench(EmulatedDriver())
    turns = Turns(bench)
    turns.turn(1)
    bench.driver.faults.inject("update_exec")  # type: ignore[attr-defined]
    with pytest.raises(graphcore.CudaError):
        turns.executable.update(turns.graphs[0])
    assert turns.executable.graph is turns.graphs[1]
    [owner] = turns.executable.owners
    assert owner.object is turns.owners[1]
    turns.turn(0)
    bench.close()


def test_guarded_outputs_see_the_runs_of_each_graph(bench: Bench) -> None:
    turns = Turns(bench)
    turns.turn(0)
    kind = "cpu" if bench.driver.is_emulated else "cuda"
    output = TensorRef(turns.x, (4,), (1,), "float32", 4, kind, bench.driver.device)
    guard = OutputGuard(turns.executable, output)
    turns.turn(0)
    assert guard.is_overwritten
    turns.turn(0)
    guard = OutputGuard(turns.executable, output)
    assert not guard.is_overwritten
    turns.turn(1)
    # the executable may write what it wrote before
    assert guard.is_overwritten


def test_a_guard_hears_the_owners_of_the_graph_it_runs_and_no_others(bench: Bench) -> None:
    buffers = [Buffer.allocate(4, driver=bench.driver) for _ in range(2)]
    graphs = [
        graph_of(
            bench,
            bench.kernel_params(add_one, buffer.address, 4),
            owners=OwnerSet().with_(buffer, label=f"buffer {number}"),
        )
        for number, buffer in enumerate(buffers)
    ]
    executable = graphs[0].instantiate(guard="owners")
    for number in range(1, 8):
        executable.update(graphs[number % 2])
        executable.launch(bench.stream)
    buffers[0].close()
    executable.launch(bench.stream)
    buffers[1].close()
    with pytest.raises(StaleGraphError, match="buffer 1: memory"):
        executable.launch(bench.stream)


def test_a_marked_executable_is_as_it_should_be_after_the_next_turn(bench: Bench) -> None:
    for guard in (None, "owners"):
        turns = Turns(bench, guard=guard)
        turns.executable.mark_stale("was moved", "keys")
        assert turns.executable.marked is not None
        turns.turn(0)
        turns.turn(1)
        assert turns.executable.marked is None
        assert turns.executable.check() == []


def test_what_is_known_is_bounded(bench: Bench) -> None:
    x = bench.alloc(16)
    graphs = [filling(bench, x, float(value)) for value in range(3 * _MOST_VERSIONS)]
    executable = graphs[0].instantiate()
    for _ in range(2):
        for value, graph in enumerate(graphs):
            executable.update(graph)
            assert len(executable._known_switches._from) <= _MOST_VERSIONS
            replay(executable, bench.stream)
            assert bench.get(x, 4) == [value] * 4


def test_a_graph_that_is_gone_is_not_kept_by_what_is_known_of_it(bench: Bench) -> None:
    turns = Turns(bench)
    turns.turn(1)
    resource = weakref.ref(turns.graphs[0].resource)
    other = filling(bench, turns.x, 3.0).instantiate()  # its source is another graph
    for index in (0, 1, 0, 1):
        other.update(turns.graphs[index])
    turns.executable.close()
    del turns.executable
    turns.graphs[0].close()
    gc.collect()
    assert resource() is None
