"""The pytest plugin: one suite, two drivers.

Fixture ``graphcore_driver`` runs a test once on the emulated driver and once, marked ``gpu``, on
CUDA; without a usable device the second is skipped and says why.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphcore.driver import Driver, open_driver
from graphcore.errors import DriverUnavailable


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphcore_driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An open driver: ``emulated``, then ``cuda`` (skipped with the reason where there is none)."""
    try:
        driver = open_driver(request.param)
    except DriverUnavailable as error:
        pytest.skip(str(error))
    yield driver
    driver.close()
