"""Processes and devices: fork and spawn, what crosses and what does not, two devices in one."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from helpers.every_fault import handles
from helpers.isolated import run_script
from helpers.soak import Soak

import graphcore
from graphcore import CacheTypeError, DriverUnavailable, GraphPlan, GraphSnapshot
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver

STEP = """
import numpy
import graphcore
from helpers.kernels import ONE_BLOCK, add_one

def step(driver, times):
    with graphcore.Buffer.allocate((4,), "float32", driver=driver) as buffer:
        buffer.write(numpy.zeros(4, "float32"))
        plan = graphcore.GraphPlan("step")
        plan.launch(add_one, ONE_BLOCK, plan.buffer("x", (4,)), 4)
        executable = plan.build({"x": buffer}, driver=driver).instantiate()
        for _ in range(times):
            executable.launch()
        driver.synchronize()
        executable.close()
        return buffer.read().tolist()
"""


def test_a_forked_child_and_its_parent_capture_and_replay_each_for_itself() -> None:
    done = run_script(
        STEP
        + """
import os
driver = graphcore.open_driver("emulated")
assert step(driver, 1) == [1.0] * 4
child = os.fork()
if not child:
    assert step(driver, 3) == [3.0] * 4          # the driver of before the fork
    assert step(graphcore.open_driver("emulated"), 2) == [2.0] * 4
    os._exit(7)
assert step(driver, 5) == [5.0] * 4
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert done.survived, done.stderr
    assert "child 7" in done.stdout


def test_a_child_forked_inside_a_capture_may_end_and_the_capture_goes_on() -> None:
    done = run_script(
        STEP
        + """
import os
import torch
driver = graphcore.open_driver("emulated")
x = torch.zeros(4)
with graphcore.capture(driver=driver) as capture:
    x.add_(1)
    child = os.fork()
    if not child:
        os._exit(5)
    status = os.waitpid(child, 0)[1]
    x.add_(1)
with capture.graph.instantiate() as executable:
    executable.launch()
print("child", os.waitstatus_to_exitcode(status), x.tolist())
"""
    )
    assert done.survived, done.stderr
    assert "child 5 [2.0, 2.0, 2.0, 2.0]" in done.stdout


def test_spawned_processes_take_plans_and_snapshots_and_open_drivers_of_their_own() -> None:
    plan = GraphPlan("crosses")
    plan.memset(plan.buffer("x", (4,)), 3.0)
    driver = EmulatedDriver()
    tensors = {"x": torch.zeros(4)}
    snapshot = plan.build(tensors, driver=driver).snapshot()
    done = run_script(
        """
import multiprocessing, pickle, sys
import torch
import graphcore

def work(plan):
    driver = graphcore.open_driver("emulated")
    tensors = {"x": torch.zeros(4)}
    plan.run(tensors, driver=driver)
    return tensors["x"].tolist(), plan.build(tensors, driver=driver).snapshot()

if __name__ == "__main__":
    plan, snapshot = pickle.loads(bytes.fromhex(sys.argv[1]))
    values, made = work(plan)
    assert graphcore.diff(snapshot, made).update_possible
    print(values)
""",
        pickle.dumps((plan, snapshot)).hex(),
    )
    assert done.survived, done.stderr
    assert "[3.0, 3.0, 3.0, 3.0]" in done.stdout


@pytest.mark.parametrize("what", ["driver", "stream", "event", "graph", "executable", "buffer"])
def test_what_has_a_handle_of_a_driver_is_neither_pickled_nor_copied_and_says_so(
    graphcore_driver: Driver, what: str
) -> None:
    graph = graphcore.capture_function(lambda: None, driver=graphcore_driver)
    made: Any = {
        "driver": lambda: graphcore_driver,
        "stream": graphcore_driver.stream,
        "event": graphcore_driver.event,
        "graph": lambda: graph,
        "executable": graph.instantiate,
        "buffer": lambda: graphcore.Buffer.allocate((4,), "float32", driver=graphcore_driver),
    }[what]()
    for cross in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(CacheTypeError, match="cannot be copied or pickled"):
            cross(made)


def test_facts_are_pickled() -> None:
    x = torch.zeros(4)
    plan = GraphPlan("facts")
    plan.memset(plan.buffer("x", (4,)), 3.0)
    graph = plan.build({"x": x}, driver=EmulatedDriver())
    for fact in (graph.snapshot(), graph.fingerprint(), graph.memory_report()):
        assert pickle.loads(pickle.dumps(fact)) == fact
    again = pickle.loads(pickle.dumps(plan))
    assert again.to_json() == plan.to_json()
    assert isinstance(pickle.loads(pickle.dumps(graph.snapshot())), GraphSnapshot)


@pytest.mark.filterwarnings("ignore::graphcore.GraphcoreWarning")
def test_two_devices_in_one_process_keep_their_state_apart() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    soaks = [Soak(driver, seed) for seed, driver in enumerate((first, second))]
    for _ in range(12):
        for soak in soaks:
            soak.run(5)
    before = [soak.held() for soak in soaks]
    for each in before:
        del each["python blocks"]
    soaks[0].run(40)
    after = soaks[1].held()
    del after["python blocks"]
    # handles are the machine's, bytes are each device's
    soaks[0].drop_all()
    assert after["device bytes"] == before[1]["device bytes"]
    assert (first.device, second.device) == (0, 1)
    counts = []
    for driver in (first, second):  # streams that wait are each driver's own
        graphs, nodes, executables, streams, events, _ = handles(driver)
        streams += driver.capture_streams.idle
        counts.append((graphs, nodes, executables, streams, events))
    assert counts[0] == counts[1]


def test_python_without_its_global_lock_is_refused_with_the_way_to_switch_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(DriverUnavailable, match="free-threaded Python: expected its global lock"):
        graphcore.open_driver("emulated")
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    graphcore.open_driver("emulated").close()
