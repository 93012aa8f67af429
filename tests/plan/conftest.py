"""A bench on each driver, for tests that turn plans into work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.contract import Bench

from graphcore.driver import Driver


@pytest.fixture
def bench(graphcore_driver: Driver) -> Iterator[Bench]:
    """A bench on the emulated driver, then on CUDA."""
    bench = Bench(graphcore_driver)
    yield bench
    bench.close()
