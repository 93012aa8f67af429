"""Injected faults: the call fails as often as asked, before it does anything, then works again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernels import ONE_BLOCK, add_one

import graphcore
from graphcore import CaptureError, ConfigurationError, CudaError, GraphcoreWarning
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.testing import capture_errors, inject


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


@pytest.mark.parametrize("code", ["OUT_OF_MEMORY", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_a_call_fails_as_often_as_asked_after_as_many_good_ones(
    driver: EmulatedDriver, code: str
) -> None:
    free, _ = driver.memory_info()
    injected = inject(driver, "alloc", code=code, count=2, after=1)
    driver.free(driver.alloc(4))
    for expected in (1, 2):
        with capture_errors("OUT_OF_MEMORY"):
            driver.alloc(4)
        assert injected.fired == expected
    assert injected.is_spent
    driver.free(driver.alloc(4))
    assert driver.memory_info()[0] == free


def test_as_a_block_it_ends_with_it(driver: EmulatedDriver) -> None:
    with inject(driver, "alloc", count=5) as injected, pytest.raises(CudaError, match="injected"):
        driver.alloc(4)
    assert repr(injected) == "<Injection CUDA_ERROR_UNKNOWN into alloc: 1 of 5 fired>"
    driver.free(driver.alloc(4))
    injected.cancel()


def test_faults_of_one_call_fire_in_their_order(driver: EmulatedDriver) -> None:
    inject(driver, "alloc", code="OUT_OF_MEMORY")
    later = inject(driver, "alloc", code="NOT_PERMITTED")
    with capture_errors("OUT_OF_MEMORY"):
        driver.alloc(4)
    assert later.fired == 0
    with capture_errors("NOT_PERMITTED"):
        driver.alloc(4)


def _kernel(driver: EmulatedDriver, x: torch.Tensor, stream: Any) -> None:
    arguments = add_one.pack(x.data_ptr(), 4)
    driver.launch(driver.function(add_one), ONE_BLOCK, arguments, stream.handle)


STEPS: dict[str, Callable[[EmulatedDriver, torch.Tensor, Any], Any]] = {
    "a kernel of ours": _kernel,
    "an operation of torch": lambda driver, x, stream: x.add_(1),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_launch_that_fails_in_a_capture_is_a_capture_error_and_the_next_capture_works(
    driver: EmulatedDriver, step: str
) -> None:
    x = torch.ones(4)
    stream = driver.stream(blocking=True)

    def capture() -> graphcore.Graph:
        with graphcore.capture(stream) as capturing:
            STEPS[step](driver, x, stream)
        return capturing.graph

    with inject(driver, "launch", code="LAUNCH_FAILED"), pytest.raises(CaptureError) as caught:
        capture()
    assert caught.value.code == "CUDA_ERROR_LAUNCH_FAILED"
    assert len(capture().snapshot().nodes) == 1


def test_a_launch_of_a_graph_fails_and_its_executable_works_again(driver: EmulatedDriver) -> None:
    x = torch.ones(4)
    graph = graphcore.capture_function(lambda: x.add_(1), warmup=0, driver=driver)
    with graph.instantiate() as executable:
        with inject(driver, "launch_graph", code="LAUNCH_TIMEOUT"), pytest.raises(CudaError):
            executable.launch()
        assert x.tolist() == [1.0] * 4
        executable.launch()
    assert x.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"call": "frobnicate"}, "call: expected a method of Driver, got 'frobnicate'$"),
        ({"call": "aloc"}, "got 'aloc'; did you mean 'alloc'"),
        ({"call": "alloc", "count": 0}, "expected count >= 1"),
        ({"call": "alloc", "after": -1}, "after >= 0"),
    ],
    ids=str,
)
def test_a_fault_that_could_not_fire_is_refused(
    driver: EmulatedDriver, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        inject(driver, **wrong)


@pytest.mark.gpu
def test_a_device_cannot_be_told_to_fail() -> None:
    with pytest.raises(ConfigurationError, match="driver: expected an emulated one, got 'cuda'"):
        inject(graphcore.open_driver("cuda"), "alloc")


def test_what_is_no_emulated_driver_is_refused() -> None:
    not_a_driver: Driver = object()  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="driver: expected an emulated one"):
        inject(not_a_driver, "alloc")


def test_a_code_that_is_none_of_cudas_is_refused_and_every_code_of_cuda_is_taken(
    driver: EmulatedDriver,
) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'CUDA_ERROR_OUT_OF_MEMORY'"):
        inject(driver, "alloc", code="OUT_OF_MEMROY")
    driver.free(driver.alloc(4))
    with inject(driver, "alloc", code="ECC_UNCORRECTABLE"), pytest.raises(CudaError) as caught:
        driver.alloc(4)
    assert caught.value.number == 214


def test_a_block_in_which_nothing_failed_is_told(driver: EmulatedDriver) -> None:
    with pytest.warns(GraphcoreWarning, match="nothing failed in it"), inject(driver, "alloc"):
        pass
    with pytest.warns(GraphcoreWarning, match="call alloc often enough"):  # noqa: SIM117
        with inject(driver, "alloc", after=1):
            driver.free(driver.alloc(4))
    # what went wrong in the block is what is told
    with pytest.raises(KeyError), inject(driver, "alloc"):
        raise KeyError
