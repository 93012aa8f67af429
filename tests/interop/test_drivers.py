"""choose_driver: which driver objects mean, where none is given."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from helpers.tensors import filled

import graphcore
from graphcore import ConfigurationError, DriverUnavailable
from graphcore.driver import Driver, kept
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.kept import current_device, default_driver, kept_driver
from graphcore.interop import choose_driver
from graphcore.interop.drivers import same_driver
from graphcore.resources.buffer import Buffer


@pytest.fixture(autouse=True)
def _emulated_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")


def test_our_own_objects_know_their_driver(graphcore_driver: Driver) -> None:
    stream = graphcore_driver.stream()
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    graph = graphcore.Graph(graphcore_driver, graphcore_driver.create_graph())
    for obj in (graphcore_driver, stream, buffer, graph):
        assert choose_driver(obj) is graphcore_driver
    assert choose_driver(None, stream, 7, buffer) is graphcore_driver


def test_tensors_mean_the_kept_driver_of_their_device(graphcore_driver: Driver) -> None:
    chosen = choose_driver(filled(graphcore_driver, 1.0))
    assert (chosen.name, chosen.device) == (graphcore_driver.name, graphcore_driver.device)
    assert choose_driver(filled(graphcore_driver, 2.0)) is chosen


def test_cpu_arrays_mean_the_emulated_driver() -> None:
    assert choose_driver(numpy.ones(3)) is choose_driver(torch.ones(3))
    assert choose_driver(torch.ones(3)).is_emulated
    assert choose_driver(Buffer.view(torch.ones(3))).is_emulated


def test_objects_of_two_drivers_are_refused() -> None:
    one, two = EmulatedDriver(), EmulatedDriver()
    with pytest.raises(ConfigurationError, match="objects of one driver"):
        choose_driver(one.stream(), two.stream())


def test_what_does_not_say_means_the_default_driver() -> None:
    assert choose_driver() is default_driver()
    assert choose_driver(None, 5, "text") is default_driver()
    assert default_driver().is_emulated


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Drivers that the choice opens, in place of real ones."""
    log: list[tuple[Any, Any]] = []

    def open_driver(name: Any = None, *, device: Any = None) -> Any:
        log.append((name, device))
        return SimpleNamespace(name=name or "cuda", device=device)

    monkeypatch.setattr(kept, "open_driver", open_driver)
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(kept, "_defaults", {})
    return log


STREAMS = {
    "torch": SimpleNamespace(cuda_stream=5, device_index=2),
    "cupy": SimpleNamespace(ptr=5, device_id=2),
    "cuda_core": SimpleNamespace(
        __cuda_stream__=lambda: (0, 5), device=SimpleNamespace(device_id=2)
    ),
}


@pytest.mark.parametrize("library", STREAMS)
def test_streams_of_other_libraries_mean_their_device(
    opened: list[tuple[Any, Any]], library: str
) -> None:
    chosen = choose_driver(STREAMS[library])
    assert choose_driver(STREAMS[library]) is chosen
    assert opened == [("cuda", 2)]


@pytest.mark.parametrize(
    "stream",
    [SimpleNamespace(ptr=5, device_id=-1), SimpleNamespace(__cuda_stream__=lambda: (0, 5))],
    ids=["cupy_of_any_device", "no_device"],
)
def test_a_stream_that_does_not_say_means_the_default(
    opened: list[tuple[Any, Any]], stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "current_device", lambda: 0)
    choose_driver(stream)
    assert opened == [(None, 0)]


def test_the_default_is_kept_per_environment_and_device(
    opened: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = iter([0, 0, 1])
    monkeypatch.setattr(kept, "current_device", lambda: next(devices))
    first, again, other = (default_driver() for _ in range(3))
    assert first is again
    assert other is not first
    assert opened == [(None, 0), (None, 1)]
    # one of a name and device, however it was asked for
    assert kept_driver("cuda", 1) is other


def test_the_current_device_is_torchs_then_cupys_then_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CUDARuntimeError(Exception):
        pass

    def no_device() -> int:
        raise CUDARuntimeError

    def cupy(get_device: Any) -> Any:
        runtime = SimpleNamespace(getDevice=get_device, CUDARuntimeError=CUDARuntimeError)
        return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))

    def torch_module(initialized: bool) -> Any:
        return SimpleNamespace(
            cuda=SimpleNamespace(is_initialized=lambda: initialized, current_device=lambda: 4)
        )

    cases: list[tuple[Any, Any, int]] = [
        (torch_module(True), cupy(lambda: 2), 4),
        (torch_module(False), cupy(lambda: 2), 2),
        (None, cupy(lambda: 2), 2),
        (None, cupy(no_device), 0),
        (None, None, 0),
    ]
    for fake_torch, fake_cupy, expected in cases:
        monkeypatch.setitem(sys.modules, "torch", fake_torch)
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
        assert current_device() == expected


def test_a_missing_device_is_said(graphcore_driver: Driver) -> None:
    with pytest.raises(DriverUnavailable):
        kept_driver("cuda", 4096)
    assert same_driver(graphcore_driver, graphcore_driver)
