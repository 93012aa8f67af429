"""Times of steps on the device: by events around launches, without waiting for them."""

from __future__ import annotations

from helpers.moe_steps import Scene

from graphcore.driver.emulated import EmulatedDriver
from graphcore.moe import Kind
from graphcore.moe.steps.device_times import DeviceTimes


def test_launches_of_each_kind_are_timed_where_it_is_asked_for(graphcore_driver):
    scene = Scene(graphcore_driver, device_times=True)
    lane = scene.lane()
    lane.kinds(6)
    graphcore_driver.synchronize()
    totals = scene.reuse.totals
    assert {kind: each.timed for kind, each in totals.items()} == {
        Kind.DIRECT: 1, Kind.CAPTURE: 1, Kind.REPLAY: 4,
    }  # fmt: skip
    assert all(each.timed == each.calls for each in totals.values())
    assert all(each.device >= 0 for each in totals.values())
    assert sum(each.device for each in totals.values()) > 0


def test_nobody_is_timed_otherwise():
    scene = Scene(EmulatedDriver())
    scene.lane().kinds(3)
    assert {(each.timed, each.device) for each in scene.reuse.totals.values()} == {(0, 0.0)}


def test_events_are_used_again(graphcore_driver):
    times, stream = DeviceTimes(graphcore_driver), graphcore_driver.stream()
    for _ in range(200):
        with times.around(Kind.REPLAY, stream):
            pass
    graphcore_driver.synchronize()
    assert times.sums()[Kind.REPLAY][0] == 200
    assert len(times._spare) <= 2 * 200
    before = len(times._spare)
    with times.around(Kind.REPLAY, stream):
        pass
    graphcore_driver.synchronize()
    assert times.sums()[Kind.REPLAY][0] == 201
    assert len(times._spare) == before


def test_a_launch_that_fails_is_not_timed():
    driver = EmulatedDriver()
    times = DeviceTimes(driver)
    try:
        with times.around(Kind.REPLAY, driver.stream()):
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert times.sums() == {}
