"""Pauses between looks at a running generation: few, and what is waited for is seen in time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from graphcore.decode.pace import Pace

STEP = 1.3e-3
OVERSLEPT = 60e-6
"""What a sleep takes longer than it was asked for."""
LEAST = 500e-6 + OVERSLEPT


@dataclass(frozen=True)
class Waited:
    """Looks that found nothing, the longest pause, and how late the end was seen, in seconds."""

    looks: int
    longest: float
    late: float
    ended: float


def waited(
    came: list[float], budget: int, *, may_end_early: bool, oversleeping: float = OVERSLEPT
) -> Waited:
    """Waits for all tokens of a generation, of which token k comes at ``came[k]``."""
    pace, now, pauses = Pace(may_end_early=may_end_early), 0.0, []
    while now < came[-1]:
        published = sum(moment <= now for moment in came)
        pauses.append(pace.pause(now, published, budget - published))
        now += pauses[-1] + oversleeping
    return Waited(len(pauses), max(pauses), now - came[-1], came[-1])


def evenly(count: int, step: float = STEP, first: float | None = None) -> list[float]:
    behind = step if first is None else first
    return [behind + step * index for index in range(count)]


@pytest.mark.parametrize(
    ("may_end_early", "most"), [(False, 16), (True, 45)], ids=["no end", "an end that never comes"]
)
def test_a_generation_of_128_tokens_takes_few_looks(may_end_early: bool, most: int) -> None:
    found = waited(evenly(128), 128, may_end_early=may_end_early)
    assert 8 < found.looks <= most
    assert found.late <= LEAST + 0.02 * found.ended


@pytest.mark.parametrize("step", [0.2e-3, 0.5e-3, STEP, 5e-3, 20e-3])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 128, 1000])
@pytest.mark.parametrize("may_end_early", [False, True])
def test_a_generation_that_uses_its_budget_is_seen_in_time(
    step: float, count: int, may_end_early: bool
) -> None:
    for shift in range(9):  # looks fall elsewhere within a token
        came = evenly(count, step, first=step * (1 + shift / 9))
        found = waited(came, count, may_end_early=may_end_early)
        assert found.late <= max(LEAST, 0.02 * found.ended + OVERSLEPT)
        assert found.longest <= 50e-3


@pytest.mark.parametrize("step", [0.5e-3, STEP, 5e-3, 20e-3])
@pytest.mark.parametrize("ended_at", [1, 2, 3, 10, 50, 129, 300, 511])
def test_a_generation_that_ends_before_its_budget_is_seen_late_by_four_tokens_at_most(
    step: float, ended_at: int
) -> None:
    for shift in range(9):
        came = evenly(ended_at, step, first=step * (1 + shift / 9))
        found = waited(came, 512, may_end_early=True)
        assert found.late <= max(LEAST, 4 * step + OVERSLEPT, 0.02 * found.ended + OVERSLEPT)


def test_where_nothing_can_end_early_the_same_waits_would_be_later() -> None:
    """The control of the test above: the cap is what makes it pass."""
    found = waited(evenly(129), 512, may_end_early=False)
    assert found.late > 20 * STEP


def test_a_prompt_before_the_first_token_makes_no_pause_too_long() -> None:
    """300 ms are 230 tokens' time: taken for a token's, half of what is left would be 19 s."""
    for may_end_early in (False, True):
        came = evenly(128, first=0.3)
        found = waited(came, 128, may_end_early=may_end_early)
        assert found.late <= max(LEAST, 0.02 * found.ended + OVERSLEPT)
        assert found.longest < STEP * 128 / 2
        alone = waited(came[:1], 128, may_end_early=may_end_early)
        assert alone.late <= 0.02 * 0.3 + OVERSLEPT
        assert alone.looks < 250  # of pauses of 200 us there would be 1150


def test_before_the_first_token_pauses_grow_with_the_time_that_has_passed() -> None:
    for may_end_early in (False, True):
        pace = Pace(may_end_early=may_end_early)
        pauses = [pace.pause(now, 0, 64) for now in (0.0, 0.3e-3, 2e-3, 20e-3, 1.0, 1000.0)]
        assert pauses == pytest.approx([200e-6, 300e-6, 500e-6, 500e-6, 20e-3, 50e-3])


@pytest.mark.parametrize("published", [0, 1, 40])
@pytest.mark.parametrize("may_end_early", [False, True])
def test_where_the_next_token_is_waited_for_pauses_stay_short(
    published: int, may_end_early: bool
) -> None:
    pace, elapsed, pauses = Pace(may_end_early=may_end_early), 0.0, []
    for _ in range(40):
        pauses.append(pace.pause(elapsed, published, 1))
        elapsed += 1.0
    assert pauses[:5] == pytest.approx([20e-6, 40e-6, 80e-6, 160e-6, 200e-6])
    assert max(pauses) == 200e-6


@pytest.mark.parametrize("may_end_early", [False, True])
def test_a_generation_that_stalls_is_looked_at_every_50_ms_at_least(may_end_early: bool) -> None:
    pace, now, pauses = Pace(may_end_early=may_end_early), 0.0, []
    while now < 60.0:
        published = min(int(now / STEP), 30)
        pauses.append(pace.pause(now, published, 128 - published))
        now += pauses[-1]
    assert pauses[-1] == max(pauses) == 50e-3
    assert len(pauses) < 1500


def test_a_budget_that_is_used_up_without_a_last_word_is_looked_at_soon() -> None:
    pace = Pace(may_end_early=False)
    moments = ((0.0, 1), (0.05, 40), (0.0985, 63), (0.1, 64))
    pauses = [pace.pause(now, done, 64 - done) for now, done in moments]
    assert pauses[1] == pytest.approx(0.05 / 40 * 23.5 / 2 + 0.05 / 50)
    # a quarter of a token's time
    assert pauses[2:] == pytest.approx([0.0985 / 63 / 4, 0.1 / 64 / 4])


def test_near_the_end_most_of_the_time_that_is_left_is_slept_at_once() -> None:
    pace = Pace(may_end_early=False)
    pace.pause(0.0, 1, 999)
    assert pace.pause(0.998, 998, 2) == pytest.approx(0.998 / 998 * 1.5 * 7 / 8)


def test_tokens_that_come_faster_and_faster_are_seen_late_by_little() -> None:
    steps = [2 * STEP - STEP * index / 128 for index in range(128)]
    found = waited(list(itertools.accumulate(steps)), 128, may_end_early=False)
    assert found.late <= max(LEAST, 0.02 * found.ended + OVERSLEPT)
