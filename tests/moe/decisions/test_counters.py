"""MoECounting: numbers that are added one by one, and those that are counted together."""

from __future__ import annotations

import pytest

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.counters import MoECounting


def test_a_tally_counts_all_its_names_beside_what_is_added() -> None:
    counting = MoECounting()
    tally = counting.tally({"calls": 1, "ready": 3})
    counting.add("calls")
    for _ in range(2):
        tally.times += 1
    numbers = counting.snapshot()
    assert (numbers.calls, numbers.ready, numbers.replays) == (3, 6, 0)
    with pytest.raises(ConfigurationError, match="expected counters"):
        counting.tally({"call": 1})
