"""Steps and checks that the tests of the cache share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.tensors import filled, replay

import graphcore
from graphcore import EagerExec, GraphCache, GraphExec
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver


class Steps:
    """Steps by key: ``x * key + 1`` of a static input; counts how often each one runs in Python."""

    def __init__(self, driver: Driver, *shape: int) -> None:
        self.driver = driver
        self.x = filled(driver, 2.0, *(shape or (4,)))
        self.runs = 0

    def __call__(self, key: int) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            self.runs += 1
            return self.x * key + 1

        return step

    def of(self, key: int) -> torch.Tensor:
        """The step itself, for ``capture_all``."""
        return self(key)()


def check(executable: GraphExec | EagerExec, value: float) -> None:
    """A launch writes ``value`` to every element of the poisoned output."""
    output = executable.outputs
    if output is not None:
        output.fill_(float("nan"))
    if isinstance(executable, EagerExec):
        executable.launch()
    else:
        replay(executable)
    # NaN would be the least and the greatest
    assert [edge.item() for edge in executable.outputs.aminmax()] == [value, value]


def add_up(cache: GraphCache) -> None:
    """The counters add up, and agree with what the cache holds."""
    counted = cache.counters
    assert counted.lookups == counted.hits + counted.misses + counted.absent
    assert counted.misses == counted.captures + counted.failures
    ends = counted.instantiated + counted.updated + counted.reinstantiated
    assert counted.captures == ends
    assert len(cache) == counted.instantiated - counted.evicted - counted.closed


def reasons(cache: GraphCache) -> list[str]:
    """Every decision as text."""
    return [str(decision) for decision in cache.decisions]


def state_of(cache: GraphCache) -> Any:
    """What a call that raises must not change."""
    return cache.keys(), cache.bytes, len(cache)


def foreign_graph() -> graphcore.Graph:
    """A graph of another driver than any test's."""
    return graphcore.capture_function(lambda: None, driver=EmulatedDriver())
