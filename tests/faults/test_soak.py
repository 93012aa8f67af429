"""A long run of random operations on graphs, caches and experts: right at every step, memory flat."""

from __future__ import annotations

import warnings

import pytest
from helpers.soak import Soak

from graphcore import GraphcoreWarning
from graphcore.driver import Driver

STEPS = {"short": 300, "long": 10_000}
LENGTHS = [pytest.param("short"), pytest.param("long", marks=pytest.mark.slow)]


@pytest.mark.parametrize("length", LENGTHS)
def test_random_operations_on_all_three_systems_are_right_and_leave_memory_flat(
    graphcore_driver: Driver, length: str
) -> None:
    soak = Soak(graphcore_driver, seed=len(length))
    with warnings.catch_warnings():
        # a fault that a finalizer meets cannot be raised
        warnings.simplefilter("ignore", GraphcoreWarning)
        soak.run(STEPS[length] // 5)
        before = soak.held()
        soak.run(STEPS[length] - STEPS[length] // 5)
        after = soak.held()
    blocks = after.pop("python blocks") - before.pop("python blocks")
    assert after == before
    assert blocks < 12_000, "Python's own memory grows"
    assert soak.done.keys() == soak.operations.keys(), "every operation was done"
    if graphcore_driver.is_emulated:
        assert soak.failed >= STEPS[length] / 300
