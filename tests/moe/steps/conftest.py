"""The driver that writes down what steps ask of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.moe_recording import Recording, recorded
from helpers.moe_steps import Scene

from graphcore.driver import Driver


@pytest.fixture
def recording(graphcore_driver: Driver) -> Iterator[Recording]:
    # what a node takes is measured once for a driver, by instantiating many
    Scene(graphcore_driver).lane().kinds(2)
    with recorded(graphcore_driver) as made:
        yield made
