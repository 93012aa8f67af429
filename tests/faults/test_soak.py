"""Random operations on graphs, caches and experts: right at every step, and memory flat."""

from __future__ import annotations

import warnings

import pytest
from helpers.soak import Soak

from graphcore import GraphcoreWarning
from graphcore.driver import Driver

STEPS = 300  # `make soak` does ten thousand


@pytest.mark.exclusive  # compares the device's free memory
def test_random_operations_on_all_three_systems_are_right_and_leave_memory_flat(
    graphcore_driver: Driver,
) -> None:
    soak = Soak(graphcore_driver, seed=5)
    with warnings.catch_warnings():
        # a fault that a finalizer meets cannot be raised
        warnings.simplefilter("ignore", GraphcoreWarning)
        soak.run(STEPS // 5)
        before = soak.held()
        soak.run(STEPS - STEPS // 5)
        after = soak.held()
    blocks = after.pop("python blocks") - before.pop("python blocks")
    assert after == before
    assert blocks < 12_000, "Python's own memory grows"
    assert soak.done.keys() == soak.operations.keys(), "every operation was done"
    if graphcore_driver.is_emulated:
        assert soak.failed >= STEPS / 300
