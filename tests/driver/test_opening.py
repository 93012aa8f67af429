"""Which driver open_driver gives: by name, by the environment, by what the machine has."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from graphcore.driver import open_driver, opening
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import ConfigurationError, DriverUnavailable


class NoDevice:
    """In the place of opening CUDA on a machine without a device."""

    calls: int = 0

    def __call__(self, device: int | None) -> Any:
        self.calls += 1
        raise DriverUnavailable("driver 'cuda': no device")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> NoDevice:
    cuda = NoDevice()
    monkeypatch.setattr(opening, "_open_cuda", cuda)
    monkeypatch.setattr(opening, "_told", False)
    monkeypatch.delenv("GRAPHCORE_DRIVER", raising=False)
    return cuda


def test_without_a_device_and_a_name_the_emulated_driver_is_told_of_once(
    no_device: NoDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "graphcore"):
        assert open_driver().is_emulated
        assert open_driver().is_emulated
    assert no_device.calls == 2
    (record,) = caplog.records
    assert "no usable CUDA device (driver 'cuda': no device)" in record.getMessage()


def test_who_names_the_emulated_driver_is_not_told(
    no_device: NoDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "graphcore"):
        assert open_driver("emulated").is_emulated
        monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
        assert open_driver().is_emulated
    assert (no_device.calls, caplog.records) == (0, [])


@pytest.mark.parametrize("by", ["name", "environment"])
def test_cuda_that_is_asked_for_is_never_replaced(
    no_device: NoDevice, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "cuda" if by == "environment" else "")
    with pytest.raises(DriverUnavailable, match="no device"):
        open_driver("cuda" if by == "name" else None)


def test_a_name_goes_before_the_environment(
    no_device: NoDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "cuda")
    assert open_driver("emulated").is_emulated


@pytest.mark.parametrize(
    ("name", "variable", "said"),
    [
        ("metal", "", "name: expected 'cuda' or 'emulated', got 'metal'"),
        (0, "", "name: expected .* or None, got 0; device= chooses a device"),
        (None, "CUDA", "environment variable GRAPHCORE_DRIVER: expected .* got 'CUDA'"),
    ],
)
def test_an_unknown_driver_is_refused_saying_who_asked(
    monkeypatch: pytest.MonkeyPatch, name: Any, variable: str, said: str
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", variable)
    with pytest.raises(ConfigurationError, match=said):
        open_driver(name)


@pytest.mark.parametrize("name", ["cuda", "emulated"])
def test_an_unknown_option_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"driver '{name}': .*speed"):
        open_driver(name, speed=3)


def test_device_and_options_reach_the_emulated_driver(no_device: NoDevice) -> None:
    driver = open_driver(device=1, devices=2, order="adversarial", seed=4)
    assert isinstance(driver, EmulatedDriver)
    assert driver.device == 1


@pytest.mark.gpu
def test_where_there_is_a_device_it_is_what_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHCORE_DRIVER", raising=False)
    driver = open_driver()
    assert (driver.name, driver.device) == ("cuda", 0)
    driver.close()


@pytest.mark.parametrize("name", ["emulated", "cuda", None])
@pytest.mark.parametrize("device", ["a", 1.5, True, (0,)], ids=repr)
def test_a_device_that_is_no_ordinal_is_refused(name: Any, device: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"device: expected an ordinal \(int\) or None, got"
    ):
        open_driver(name, device=device)
