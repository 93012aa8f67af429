"""Tensors for tests of both drivers: torch tensors on the device the driver works on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from graphcore import Graph, GraphExec
from graphcore.driver import Driver, Stream, open_driver
from graphcore.errors import DriverUnavailable


def cuda_driver() -> Driver:
    """A CUDA driver for tests of what only a device can do; skips where there is none."""
    try:
        return open_driver("cuda")
    except DriverUnavailable as error:
        pytest.skip(str(error))


def device_of(driver: Driver) -> torch.device:
    """CPU tensors are the emulated driver's device memory."""
    return torch.device("cpu") if driver.is_emulated else torch.device("cuda", driver.device)


def filled(driver: Driver, value: float, *shape: int) -> torch.Tensor:
    device = device_of(driver)
    _warm_up(device)
    return torch.full(shape or (4,), value, device=device)


@functools.cache
def _warm_up(device: torch.device) -> None:
    """Loads the kernels that tests capture: loading one inside a capture may break it."""
    x = torch.zeros(4, device=device)
    x.add_(1).mul_(2).copy_(x * 2 + 1)
    x.fill_(0).add_(x - 1)


def poisoned(driver: Driver, *shape: int) -> torch.Tensor:
    return filled(driver, float("nan"), *shape)


def replay(executable: GraphExec, stream: Stream | None = None, times: int = 1) -> None:
    """Launches between two waits, so that neither torch's work nor the graph's is overtaken."""
    executable.driver.synchronize()
    for _ in range(times):
        executable.launch(stream)
    executable.driver.synchronize()


def replayed(graph: Graph, output: torch.Tensor, stream: Stream | None = None) -> list[Any]:
    """What a launch of ``graph`` writes to ``output``, which is poisoned before."""
    output.fill_(float("nan"))
    with graph.instantiate() as executable:
        replay(executable, stream)
    values: list[Any] = output.tolist()
    return values
