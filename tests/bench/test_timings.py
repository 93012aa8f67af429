"""What is concluded from samples: medians of ratios within rounds."""

import pytest

from graphcore.bench.timings import Spread, Timings

TIMINGS = Timings(
    {
        # the middle round was slow for everybody: ratios do not see it
        "ours": [(2.0, 2.0), (20.0, 20.0), (2.0, 4.0)],
        "floor": [(1.0, 1.0), (10.0, 10.0), (1.0, 1.0)],
        "slow": [(4.0, 4.0), (40.0, 40.0), (9.0, 9.0)],
    }
)


def test_a_ratio_is_taken_within_each_round():
    speed = TIMINGS.speed("ours", "floor")
    assert speed == Spread(median=0.5, low=pytest.approx(1 / 3), high=0.5)


def test_the_allowance_makes_the_floor_slower():
    assert TIMINGS.speed("ours", "floor", extra=1.0).high == 1.0


def test_a_slower_peer_gives_more_than_one():
    assert TIMINGS.speed("ours", "slow") == Spread(2.0, 2.0, 3.0)


def test_seconds_are_the_median_over_rounds():
    assert TIMINGS.seconds("ours") == Spread(3.0, 2.0, 20.0)


def test_what_an_arm_takes_beyond_another_is_told_within_each_round():
    assert TIMINGS.beyond("ours", "floor") == Spread(2.0, 1.0, 10.0)


def test_the_same_arm_against_itself_shows_the_noise():
    assert TIMINGS.same_against_same("ours") == Spread(1.0, 0.5, 1.0)


def test_the_fastest_of_some_arms_is_found_and_none_of_none():
    assert TIMINGS.fastest(["slow", "ours"]) == "ours"
    assert TIMINGS.fastest([]) is None
