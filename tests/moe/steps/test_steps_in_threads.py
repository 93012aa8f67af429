"""Steps of several threads, with captures among them: nobody breaks anybody's capture or step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.contract import in_thread
from helpers.moe_steps import Lane, Scene

from graphcore.driver import active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.moe import Kind, Reason

ROUNDS = 12


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def without_a_stream(lane: Lane) -> Lane:
    """The same step, whose function names no stream, as one over torch or CuPy does."""
    lane.step._takes_stream = False
    lane.step._function = lambda: lane._launch(None)
    lane.step._staged = lambda: lane._staged(None)
    return lane


def first_steps(driver: Any, **more: Any) -> list[Lane]:
    """Two scenes that share nothing but the driver, each with a step that ran once."""
    lanes = [Scene(driver, **more).lane() for _ in range(2)]
    for lane in lanes:
        lane.choose()
        lane.wanted = lane.expected()
        lane.scene.reuse.run(lane.step, stream=lane.scene.stream)
    return lanes


def often(lane: Lane, stream: Any) -> list[Any]:
    """Rounds of warm-up, capture and replay of changed steps."""
    found = []
    for number in range(ROUNDS):
        lane.step.set_value("round", number)
        found += [lane.scene.reuse.run(lane.step, stream=stream) for _ in range(3)]
    return found


@pytest.mark.parametrize("is_current", [True, False], ids=["current stream", "own stream"])
@pytest.mark.parametrize("names_stream", [True, False], ids=["named", "not named"])
def test_captures_of_one_thread_and_steps_of_another_do_not_meet(
    graphcore_driver, is_current, names_stream
):
    lanes = first_steps(graphcore_driver)
    if not names_stream:
        lanes = [without_a_stream(lane) for lane in lanes]
    streams = [None if is_current else lane.scene.stream for lane in lanes]
    errors: list[BaseException] = []
    results: list[list[Any]] = []

    def run(lane: Lane, stream: Any) -> None:
        try:
            results.append(often(lane, stream))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=both) for both in zip(lanes, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    for found in results:
        assert [each.detail for each in found if each.reason is Reason.NOT_CAPTURABLE] == []
        assert [each.kind for each in found].count(Kind.CAPTURE) == ROUNDS
    graphcore_driver.synchronize()
    assert [lane._output() for lane in lanes] == [lane.wanted for lane in lanes]


def report(lane: Lane) -> None:
    str(lane.scene.reuse.report())


def totals(lane: Lane) -> None:
    lane.scene.pool.totals("layers.0")


def outcome(lane: Lane) -> None:
    lane.layers.admissions["layers.0"].outcome()


def read_output(lane: Lane) -> None:
    lane.out.read()


@pytest.mark.parametrize("look", [report, totals, outcome, read_output])
def test_whoever_looks_from_another_thread_breaks_no_capture_and_is_answered(
    graphcore_driver, look: Callable[[Lane], None]
):
    (lane, _) = first_steps(graphcore_driver)
    errors: list[BaseException] = []
    count, is_over = [0], threading.Event()

    def watch() -> None:
        try:
            while not is_over.is_set():
                look(lane)
                count[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        found = often(lane, lane.scene.stream)
    finally:
        is_over.set()
        thread.join(60)
    assert not errors, errors
    assert count[0] > 1
    assert all(each.reason is not Reason.NOT_CAPTURABLE for each in found), found


def test_slots_change_behind_the_capture_of_another_step(graphcore_driver):
    changed, other = first_steps(graphcore_driver)
    captured: list[Kind] = []

    def pin() -> None:
        for number in range(ROUNDS):
            changed.scene.pool.pin("layers.0", [number % 4])
            changed.scene.pool.unpin("layers.0", [number % 4])

    thread = threading.Thread(target=pin)
    thread.start()
    captured = [each.kind for each in often(other, other.scene.stream)]
    thread.join(60)
    assert captured.count(Kind.CAPTURE) == ROUNDS


# ---- captures that are broken all the same ------------------------------------------------------


def breaking(lane: Lane, breaks: list[int]) -> None:
    """Lets another thread, one that asks nobody, break the first captures of ``lane``."""
    launch = lane._launch

    def function(stream: Any) -> None:
        if active.current() is not None and breaks[0]:
            breaks[0] -= 1
            with pytest.raises(Exception, match="STREAM_CAPTURE"):
                in_thread(lane.scene.driver.synchronize)
        launch(stream)

    lane.step._function = function


def test_a_capture_that_another_thread_broke_is_tried_again_and_the_step_is_right():
    lane = Scene(EmulatedDriver()).lane()
    breaking(lane, [3])
    assert lane.run().kind is Kind.DIRECT
    for _ in range(3):
        result = lane.run()  # checks the bits
        assert (result.kind, result.reason) == (Kind.DECLINED, Reason.NOT_CAPTURABLE)
        assert "on thread" in result.detail
    assert lane.kinds(2) == [Kind.CAPTURE, Kind.REPLAY]


def test_captures_that_are_always_broken_are_given_up_until_the_step_changes():
    lane = Scene(EmulatedDriver()).lane()
    breaks = [1 << 30]
    breaking(lane, breaks)
    lane.run()
    for _ in range(12):
        assert lane.run().reason is Reason.NOT_CAPTURABLE
    assert (1 << 30) - breaks[0] == 8
    breaks[0] = 0
    assert lane.run().reason is Reason.NOT_CAPTURABLE
    lane.step.changed()
    assert lane.kinds(2) == [Kind.CAPTURE, Kind.REPLAY]
