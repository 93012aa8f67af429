"""Entries kept in hand: another graph behind one executable, uses without lookups, who is told."""

from __future__ import annotations

import pytest
from helpers.kernels import ONE_BLOCK, add_one, scale

import graphcore
from graphcore.errors import ConfigurationError
from graphcore.executable import UpdateStatus
from graphcore.reuse import Cause, GraphCache


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def buffer(graphcore_driver):
    made = graphcore.Buffer.allocate((4,), driver=graphcore_driver)
    made.write([0.0] * 4)
    return made


def graph_of(driver, buffer, launches=1, kernel=add_one):
    arguments = (2.0, 4) if kernel is scale else (4,)
    with graphcore.capture(driver=driver) as captured:
        for _ in range(launches):
            packed = kernel.pack(buffer.address, *arguments)
            driver.launch(driver.function(kernel), ONE_BLOCK, packed, captured.stream.handle)
        captured.keep(buffer)
    return captured.graph


def filled(driver, buffer, *keys, **limits):
    cache = GraphCache(driver=driver, **limits)
    for key in keys:
        cache.get_or_build(key, lambda: graph_of(driver, buffer))
    return cache


def test_another_graph_goes_behind_one_executable_and_the_former_one_is_the_callers(
    graphcore_driver, buffer
):
    cache = filled(graphcore_driver, buffer, "step")
    executable = cache.get("step")
    new = graph_of(graphcore_driver, buffer, kernel=scale)
    renewal = cache.renew("step", new)
    assert renewal.outcome.status is UpdateStatus.UPDATED
    assert renewal.former is not None
    assert not renewal.former.is_closed
    renewal.former.close()
    assert cache.get("step") is executable
    buffer.write([3.0] * 4)
    executable.launch()
    graphcore_driver.synchronize()
    assert buffer.read().tolist() == [6.0] * 4


def test_a_refused_update_makes_another_executable_and_its_bytes_are_measured(
    graphcore_driver, buffer
):
    cache = filled(graphcore_driver, buffer, "step")
    before, executable = cache.bytes, cache.get("step")
    renewal = cache.renew("step", graph_of(graphcore_driver, buffer, launches=3))
    assert renewal.outcome.status is UpdateStatus.REINSTANTIATED
    assert cache.get("step") is executable
    assert cache.bytes > before
    executable.launch()
    graphcore_driver.synchronize()
    assert buffer.read().tolist() == [3.0] * 4


def test_a_key_that_is_not_there_is_refused(graphcore_driver, buffer):
    cache = filled(graphcore_driver, buffer, "step")
    with pytest.raises(ConfigurationError, match="'other'"):
        cache.use("other")
    with graph_of(graphcore_driver, buffer) as graph:
        with pytest.raises(ConfigurationError, match="'other'"):
            cache.renew("other", graph)
        assert not graph.is_closed


def test_a_noted_use_counts_when_room_is_made(graphcore_driver, buffer):
    clock = Clock()
    cache = filled(graphcore_driver, buffer, "first", "second", max_entries=2, clock=clock)
    use = cache.use("first")
    cache.get("second")
    clock.now = 1.0
    assert use.note() == 1.0
    cache.get_or_build("third", lambda: graph_of(graphcore_driver, buffer))
    assert cache.keys() == ["first", "third"]


def test_without_a_noted_use_the_other_one_goes(graphcore_driver, buffer):
    cache = filled(graphcore_driver, buffer, "first", "second", max_entries=2, clock=Clock())
    cache.get_or_build("third", lambda: graph_of(graphcore_driver, buffer))
    assert cache.keys() == ["second", "third"]


def test_a_noted_use_keeps_an_entry_from_lying_idle(graphcore_driver, buffer):
    clock = Clock()
    cache = filled(graphcore_driver, buffer, "first", "second", idle_seconds=10, clock=clock)
    use = cache.use("first")
    clock.now = 8.0
    use.note()
    clock.now = 12.0
    assert cache.collect() == 1
    assert cache.keys() == ["first"]
    clock.now = 30.0
    assert cache.collect() == 1


def test_a_listener_is_told_of_what_goes_and_why(graphcore_driver, buffer):
    cache = filled(graphcore_driver, buffer, "first", "second", max_entries=2)
    told = []
    cache.tell(told.append)
    cache.get_or_build("third", lambda: graph_of(graphcore_driver, buffer))
    cache.evict("third")
    assert [(each.key, each.departure.cause) for each in told] == [
        ("first", Cause.COUNT), ("third", Cause.ASKED),
    ]  # fmt: skip
