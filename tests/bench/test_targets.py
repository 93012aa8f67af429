"""Targets: a note says what was to be reached, what came of it, and whether all of it is."""

import pytest

from graphcore.bench.results import Row
from graphcore.bench.targets import Target

ROW = Row("it", "us", 2.4, 2.0, {"torch": 3.0}, 0.896, 1.25, {}, error=1e-6)


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (Target(of_floor=0.90), "reached"),  # as it is shown
        (Target(of_floor=0.91), "MISSED"),
        (Target(vs_best_peer=1.25), "reached"),
        (Target(vs_best_peer=1.26, of_floor=0.5), "MISSED"),
        (Target(most=2.4), "reached"),
        (Target(most=2.3), "MISSED"),
        (Target(error=1e-6), "reached"),
        (Target(of_floor=0.1, error=1e-7), "MISSED"),
    ],
)
def test_a_target_is_reached_or_missed(target, verdict):
    assert target.told(ROW)["about"].endswith(f": {verdict}")


def test_a_note_names_the_case_what_was_wanted_and_what_was_found():
    told = Target(of_floor=0.90, vs_best_peer=1.0, most=2.5, error=2e-6).told(ROW)["about"]
    assert told == (
        "it: target 0.90 of the floor (got 0.90), 1.00 of the best peer (got 1.25), "
        "2.5 us at most (got 2.40), error 2e-06 at most (got 1.0e-06): reached"
    )
