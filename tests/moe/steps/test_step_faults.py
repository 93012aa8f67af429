"""Faults: one at every driver call of every kind of step; the next step is right, nothing leaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from helpers.every_fault import each_fault, handles, interrupts_instead
from helpers.moe_steps import Lane, Scene

from graphcore.driver import active
from graphcore.driver.codes import cuda_error
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CudaError, GraphcoreError
from graphcore.executable import GraphExec
from graphcore.moe import Kind, Way
from graphcore.testing import inject


def lane_of(driver: EmulatedDriver, steps: int, **options: Any) -> Lane:
    lane = Scene(driver, **options).lane()
    lane.kinds(steps)
    lane.choose()
    lane.wanted = lane.expected()
    return lane


def first(driver: EmulatedDriver) -> Lane:
    return lane_of(driver, 0)


def seen_once(driver: EmulatedDriver) -> Lane:
    return lane_of(driver, 1)


def captured(driver: EmulatedDriver) -> Lane:
    return lane_of(driver, 3)


def moved(driver: EmulatedDriver) -> Lane:
    lane = lane_of(driver, 3, decode_boundary_overlap=1)
    lane.move_output()
    return lane


def with_more_nodes(driver: EmulatedDriver) -> Lane:
    lane = lane_of(driver, 3, decode_boundary_overlap=1)
    lane.extra = 1
    lane.step.changed()
    lane.step.set_value("extra", 1)
    return lane


def another_manifest(driver: EmulatedDriver) -> Lane:
    lane = lane_of(driver, 3)
    lane.scene.publish(lane.scene.manifest)
    return lane


def another_stream(driver: EmulatedDriver) -> Lane:
    lane = lane_of(driver, 3)
    lane.scene.stream = driver.stream(blocking=True)
    return lane


STATES: dict[str, tuple[Callable[[EmulatedDriver], Lane], Kind]] = {
    "direct": (first, Kind.DIRECT),
    "capture": (seen_once, Kind.CAPTURE),
    "replay": (captured, Kind.REPLAY),
    "update": (moved, Kind.UPDATE),
    "re-instantiate": (with_more_nodes, Kind.REINSTANTIATE),
    "declined": (another_stream, Kind.DECLINED),
    "another manifest": (another_manifest, Kind.DIRECT),
}


def step(lane: Lane) -> Any:
    return lane.scene.reuse.run(lane.step, stream=lane.scene.stream)


@pytest.mark.filterwarnings("ignore:while:graphcore.GraphcoreWarning")  # nothing else can be said
# in a finalizer nothing can be raised: Python prints it and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("prepare", "kind"), STATES.values(), ids=STATES)
@pytest.mark.parametrize("fault", ["error", "Ctrl-C"])
def test_after_a_fault_at_any_call_of_a_step_the_next_one_is_right(
    prepare, kind, fault, monkeypatch
):
    if fault == "Ctrl-C":
        interrupts_instead(monkeypatch)
    assert step(prepare(EmulatedDriver())).kind is kind
    places = set()
    for _, faulted in each_fault(prepare, step):
        lane = faulted.state
        scene, reuse = lane.scene, lane.scene.reuse
        places.add(faulted.where.split()[0])
        assert active.current() is None, faulted.where
        assert scene.manifests.ownership.users() == {}, faulted.where
        if faulted.error is None:  # it was made good, and the step has run
            assert lane.out.read().tobytes() == lane.wanted, faulted.where
        elif fault == "error":
            assert isinstance(faulted.error, GraphcoreError)
            notes = getattr(faulted.error, "__notes__", ())
            was_decided = any("the step was to" in note for note in notes)
            # what failed while facts were found out was no step yet
            assert reuse.counters.failed == was_decided, faulted.where
        for _ in range(4):
            result = lane.run()  # checks the bits
        assert result.kind is Kind.REPLAY, faulted.where
        assert len(reuse.cache) == 1, faulted.where
        reuse.close()
        assert scene.manifests.ownership.users() == {}
    assert places


@pytest.mark.filterwarnings("ignore:while:graphcore.GraphcoreWarning")
@pytest.mark.parametrize("name", ["capture", "update", "re-instantiate", "replay"])
def test_steps_with_faults_leave_no_graph_no_executable_and_no_event_behind(name):
    prepare, _ = STATES[name]
    for driver, faulted in each_fault(prepare, step):
        if faulted.where.startswith(("destroy", "free")):
            continue  # what the driver does not give back nobody can
        lane = faulted.state
        reuse = lane.scene.reuse
        lane.kinds(2)
        reuse.close()
        driver.synchronize()
        gc.collect()
        machine = driver._machine
        left = len(machine.graphs._graphs._items), len(machine.executables._items)
        assert left == (0, 0), faulted.where
        assert handles(driver)


def test_a_launch_that_fails_behind_an_update_leaves_what_was_captured():
    lane = moved(EmulatedDriver())
    driver, reuse = lane.scene.driver, lane.scene.reuse
    with inject(driver, "launch_graph"), pytest.raises(CudaError):
        step(lane)
    # the executable has the new parameters already: a replay of it is a replay of the new graph
    assert lane.run().kind is Kind.REPLAY
    assert reuse.counters.updates == 0
    assert reuse.counters.failed == 1


def test_an_error_of_the_update_leaves_the_executable_of_before():
    lane = moved(EmulatedDriver())
    driver, home = lane.scene.driver, lane.layers.out
    executable = lane.executable
    with inject(driver, "update_exec"), pytest.raises(CudaError):
        step(lane)
    assert lane.executable is executable
    assert not executable.is_closed
    assert home is lane.layers.out
    assert lane.run().kind is Kind.UPDATE
    assert lane.executable is executable


def test_out_of_memory_at_a_re_instantiation_leaves_the_executable_of_before():
    lane = with_more_nodes(EmulatedDriver())
    executable = lane.executable
    memory = inject(lane.scene.driver, "instantiate", code="OUT_OF_MEMORY")
    with memory, pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        step(lane)
    assert lane.executable is executable
    assert not executable.is_closed
    assert lane.run().kind is Kind.REINSTANTIATE
    assert lane.run().kind is Kind.REPLAY


def test_what_no_capture_allows_runs_without_a_graph_and_is_not_tried_again():
    scene = Scene(EmulatedDriver())
    lane = scene.lane()
    waits = [True]
    launch = lane._launch

    def function(stream):
        launch(stream)
        if waits[0]:
            scene.driver.synchronize()

    lane.step._function = function
    assert lane.run().kind is Kind.DIRECT
    for _ in range(3):
        result = lane.run()
        assert (result.kind, result.way) == (Kind.DECLINED, Way.DIRECT)
    # looked at once: two calls for that step, one for each other
    assert lane.calls == ["run"]
    waits[0] = False
    lane.step.changed()
    assert lane.kinds(2) == [Kind.CAPTURE, Kind.REPLAY]


def test_an_error_behind_the_change_of_an_executable_gives_it_up(monkeypatch):
    lane = moved(EmulatedDriver())
    executable, look = lane.executable, GraphExec._look_at_new
    errors = [cuda_error("CUDA_ERROR_UNKNOWN", "cuPointerGetAttribute")]

    def fail_once(self):
        if errors:
            raise errors.pop()
        look(self)

    monkeypatch.setattr(GraphExec, "_look_at_new", fail_once)
    with pytest.raises(CudaError) as caught:
        step(lane)
    assert any("the change was made" in note for note in caught.value.__notes__)
    assert executable.is_closed
    home = lane.scene.buffer(2)
    lane.move_output(home)
    assert lane.kinds(3) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]
