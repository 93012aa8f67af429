"""How arms are sampled, with a clock that only moves when an arm says so."""

import gc
import os

import pytest

from graphcore.bench.harness import Arm, Effort, measure, order, python_arm
from graphcore.errors import ConfigurationError


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


def counting(name, seconds, log):
    def burst(calls):
        log.append(name)
        return calls * seconds

    return Arm(name, burst)


@pytest.mark.parametrize(
    ("count", "number", "expected"),
    [
        (2, 0, [0, 1, 1, 0]),
        (2, 1, [1, 0, 0, 1]),
        (3, 1, [1, 2, 0, 0, 2, 1]),
        (1, 5, [0, 0]),
    ],
    ids=["A B B A", "B A A B", "three arms turn", "one arm"],
)
def test_the_order_turns_by_the_round_and_is_mirrored_within_it(count, number, expected):
    assert order(count, number) == expected


def test_every_arm_is_sampled_twice_in_each_round_in_that_order():
    log = []
    arms = [counting("a", 1.0, log), counting("b", 2.0, log)]
    timings = measure(arms, Effort(rounds=2, bursts=1, calls=3), lambda: None)
    assert log == ["a", "b", *"abba", *"baab"]  # the first two warm up
    assert timings.rounds == {"a": [(1.0, 1.0)] * 2, "b": [(2.0, 2.0)] * 2}


def test_the_queue_is_drained_before_every_burst_and_never_timed():
    clock, drained = FakeClock(), []

    def drain():
        drained.append(clock.now)
        clock.spend(1000.0)

    arm = python_arm("ours", lambda: clock.spend(0.5), clock=clock)
    timings = measure([arm], Effort(rounds=3, bursts=4, calls=8), drain)
    assert timings.seconds("ours").median == pytest.approx(0.5)
    assert len(drained) == 1 + 3 * 2 * 4 + 1


def test_a_sample_is_the_median_of_its_bursts():
    seconds = iter([0.0, *[1.0, 100.0, 1.0] * 2])
    timings = measure(
        [Arm("noisy", lambda calls: next(seconds) * calls)], Effort(1, 3, 2), lambda: None
    )
    assert timings.rounds == {"noisy": [(1.0, 1.0)]}


def test_collection_rests_and_the_thread_gets_its_cores_back_even_after_a_failure():
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    seen = []

    def burst(calls):
        seen.append(gc.isenabled())
        raise RuntimeError("broken arm")

    with pytest.raises(RuntimeError, match="broken arm"):
        measure([Arm("broken", burst)], Effort(1, 1, 1), lambda: None)
    assert seen == [False]
    assert gc.isenabled()
    if cores is not None:
        assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("arguments", [(), ("stream",), ("graph", "stream")], ids=len)
def test_a_call_gets_its_arguments_as_often_as_asked(arguments):
    seen = []
    arm = python_arm("ours", lambda *given: seen.append(given), *arguments)
    assert arm.burst(3) >= 0
    assert seen == [arguments] * 3


def test_two_arms_of_one_name_are_refused():
    arms = [counting("a", 1.0, []), counting("a", 1.0, [])]
    with pytest.raises(ConfigurationError, match="names that differ"):
        measure(arms, Effort(1, 1, 1), lambda: None)


@pytest.mark.parametrize("field", ["rounds", "bursts", "calls"])
def test_an_effort_of_nothing_is_refused(field):
    with pytest.raises(ConfigurationError, match=f"{field}: expected at least 1, got 0"):
        Effort(**{field: 0})
