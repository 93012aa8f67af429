"""What each kind of step asks of the driver, in order: launch before destroy, new before old."""

from __future__ import annotations

import pytest
from helpers.moe_recording import Recording
from helpers.moe_steps import Scene

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.moe import CallableStep, Kind, Reason
from graphcore.moe.decisions.driver_steps import DROP_STEPS, Step, driver_steps
from graphcore.resources.buffer import Buffer

NEVER = 1 << 40


def scene_of(recording: Recording, on: bool) -> Scene:
    return Scene(recording.driver, decode_boundary_overlap=int(on))


def steps_of(lane, recording, *, settles=False):
    """The kind of one step, and what it asked for; ``settles``: until nothing of it runs."""
    lane.choose()
    recording.taken()
    result = lane.scene.reuse.run(lane.step, stream=lane.scene.stream)
    if settles:
        lane.scene.driver.synchronize()
        lane.scene.reuse.cache.collect()
    return result.kind, recording.taken()


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_a_warm_up_a_capture_and_a_replay_ask_in_order(recording, on):
    lane = scene_of(recording, on).lane()
    for kind in (Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY, Kind.REPLAY):
        expected = driver_steps(kind, decode_boundary_overlap=on)
        assert steps_of(lane, recording) == (kind, expected)


def test_an_update_launches_before_it_destroys_the_old_description(recording):
    lane = scene_of(recording, True).lane()
    lane.kinds(3)
    expected = driver_steps(Kind.UPDATE, decode_boundary_overlap=True)
    lane.move_output()
    # the graph that the executable was made from stays with it: its nodes are named by it
    assert steps_of(lane, recording) == (Kind.UPDATE, expected[:-1])
    for _ in range(2):
        lane.move_output()
        assert steps_of(lane, recording) == (Kind.UPDATE, expected)


def test_a_refused_update_makes_the_new_executable_before_the_old_one_goes(recording):
    lane = scene_of(recording, True).lane()
    lane.kinds(3)
    lane.extra = 1
    lane.step.set_value("extra", 1)
    kind, steps = steps_of(lane, recording)
    assert kind is Kind.REINSTANTIATE
    tried = driver_steps(Kind.UPDATE, decode_boundary_overlap=True)[:3]
    assert steps == (*tried, *driver_steps(Kind.REINSTANTIATE, decode_boundary_overlap=True))
    assert steps.count(Step.LAUNCH) == 1
    assert lane.run().kind is Kind.REPLAY


def test_without_the_option_a_change_drops_executable_then_description(recording):
    lane = scene_of(recording, False).lane()
    lane.kinds(3)
    lane.move_output()
    assert steps_of(lane, recording, settles=True) == (Kind.DECLINED, DROP_STEPS)
    assert steps_of(lane, recording) == (Kind.CAPTURE, driver_steps(Kind.CAPTURE))


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_a_plain_step_that_changed_updates_when_it_comes_again(recording, on):
    scene = scene_of(recording, on)
    lane = scene.lane(name="plain")
    step = CallableStep("plain", lane.layers.launch, tensors={"x": lane.x, "out": lane.out}, rows=2)

    def run():
        recording.taken()
        return scene.reuse.run(step, stream=scene.stream).kind, recording.taken()

    lane.choose()
    assert [run()[0] for _ in range(3)] == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]
    expected = driver_steps(Kind.UPDATE, decode_boundary_overlap=on)
    first = tuple(each for each in expected if each is not Step.DESTROY_OLD_GRAPH)
    for steps in (first, expected):
        step.set("out", Buffer.allocate(lane.out.shape, driver=scene.driver))
        assert run() == (Kind.DIRECT, ())
        assert run() == (Kind.UPDATE, steps)
        assert run() == (Kind.REPLAY, driver_steps(Kind.REPLAY))


WAITS = ("synchronize", "synchronize_stream", "synchronize_event", "read", "write")


@pytest.mark.parametrize("kind", [Kind.CAPTURE, Kind.REPLAY, Kind.UPDATE, Kind.REINSTANTIATE])
def test_no_step_with_a_graph_waits_for_the_device(kind):
    driver = EmulatedDriver()
    scene = Scene(driver, decode_boundary_overlap=1)
    lane = scene.lane()
    lane.kinds(1 if kind is Kind.CAPTURE else 3)
    if kind is Kind.REINSTANTIATE:
        lane.extra = 1
        lane.step.set_value("extra", 1)
    elif kind is Kind.UPDATE:
        lane.move_output()
    lane.choose()
    # what a node takes is measured once for a driver, with the device idle
    Scene(driver).lane().kinds(2)
    waits = {call: driver.faults.inject(call, after=NEVER) for call in WAITS}
    assert scene.reuse.run(lane.step, stream=scene.stream).kind is kind
    assert {call: NEVER - each.good_calls for call, each in waits.items()} == dict.fromkeys(
        WAITS, 0
    )


def test_a_replay_asks_the_driver_for_one_launch_and_nothing_else():
    driver = EmulatedDriver()
    scene = Scene(driver)
    lane = scene.lane()
    lane.kinds(4)
    lane.choose()
    calls = sorted(Driver.__abstractmethods__ - {"raise_launch", "close"})
    made = {call: driver.faults.inject(call, after=NEVER) for call in calls}
    assert scene.reuse.run(lane.step, stream=scene.stream).kind is Kind.REPLAY
    asked = {call: NEVER - each.good_calls for call, each in made.items()}
    assert {call: count for call, count in asked.items() if count} == {"launch_graph": 1}


def test_a_manifest_that_is_replaced_drops_executable_then_description(recording):
    scene = scene_of(recording, True)
    lane = scene.lane()
    lane.kinds(3)
    scene.publish(scene.manifest)
    assert steps_of(lane, recording, settles=True) == (Kind.DIRECT, DROP_STEPS)
    assert scene.reuse.records[-1].result.reason is Reason.GENERATION
