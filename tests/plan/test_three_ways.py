"""One plan, three ways, the same bytes: random plans against NumPy, and plans saved and loaded."""

from __future__ import annotations

from typing import Any

import numpy
from helpers.plan_sites import WAYS, do
from helpers.random_plans import PROGRAMS, Program, fresh_arrays, run_numpy, write_plan
from hypothesis import HealthCheck, given, settings

from graphcore import Buffer
from graphcore.driver import Driver


def _examples(driver: Driver) -> Any:
    return settings(
        max_examples=500 if driver.is_emulated else 200,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_random_plans_do_the_same_bytes_run_captured_and_built(graphcore_driver: Driver) -> None:
    stream = graphcore_driver.stream()
    buffers = {
        name: Buffer.allocate(array.shape, str(array.dtype), driver=graphcore_driver)
        for name, array in fresh_arrays().items()
    }
    seen = {"changed": 0}

    @_examples(graphcore_driver)
    @given(PROGRAMS)
    def check(program: Program) -> None:
        plan, start, expected = write_plan(program), fresh_arrays(), run_numpy(program)
        seen["changed"] += any((start[name] != expected[name]).any() for name in start)
        for way in WAYS:
            for name, array in start.items():
                buffers[name].write(array)
            do(plan, buffers, way, stream)
            for name, array in expected.items():
                numpy.testing.assert_array_equal(buffers[name].read(), array, f"{way}: {name}")

    check()
    assert seen["changed"] > 150
