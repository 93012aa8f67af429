"""Growth and expected errors: each check passes what is right and fails what is not."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from graphcore.driver import Driver, Stream
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CaptureError, ConfigurationError
from graphcore.testing import assert_no_growth, capture_errors

MIB = 1 << 20


@pytest.mark.exclusive
def test_what_is_given_back_is_no_growth(graphcore_driver: Driver) -> None:
    def action() -> None:
        graphcore_driver.free(graphcore_driver.alloc(4 * MIB))

    assert_no_growth(action, driver=graphcore_driver, allowance=4 * MIB)


@pytest.mark.exclusive
def test_what_is_kept_is_growth(graphcore_driver: Driver) -> None:
    kept: list[int] = []
    with pytest.raises(AssertionError, match=r"grew by \d+ bytes over 5 calls"):
        assert_no_growth(
            lambda: kept.append(graphcore_driver.alloc(64 * MIB)),
            driver=graphcore_driver,
            repeats=5,
            warmup=1,
            allowance=64 * MIB,
        )
    for address in kept:
        graphcore_driver.free(address)


@pytest.mark.parametrize("code", ["STREAM_CAPTURE_INVALIDATED", "CUDA_ERROR_INVALID_VALUE"])
def test_another_error_or_none_fails(code: str) -> None:
    driver = EmulatedDriver()
    with (
        pytest.raises(AssertionError, match=r"expected CUDA_ERROR_.*, got CUDA_ERROR_OUT"),
        capture_errors(code),
    ):
        driver.alloc(1 << 60)
    with (
        pytest.raises(AssertionError, match=r"expected CUDA_ERROR_.*, got no error"),
        capture_errors(code),
    ):
        driver.free(driver.alloc(4))


def test_the_expected_error_passes_and_the_stream_works(graphcore_driver: Driver) -> None:
    with (
        graphcore_driver.stream() as stream,
        capture_errors("STREAM_CAPTURE_UNSUPPORTED", driver=graphcore_driver, stream=stream),
    ):
        graphcore_driver.begin_capture(stream.handle, "thread_local")
        try:
            graphcore_driver.synchronize_stream(stream.handle)
        finally:
            with capture_errors("STREAM_CAPTURE_INVALIDATED"):
                graphcore_driver.end_capture(stream.handle)


def test_a_stream_left_capturing_fails() -> None:
    driver = EmulatedDriver()
    stream = driver.stream()
    driver.begin_capture(stream.handle, "thread_local")
    check = capture_errors("STREAM_CAPTURE_UNSUPPORTED", driver=driver, stream=stream)
    with pytest.raises(AssertionError, match="expected a stream that left its capture, got one"):
        _synchronize_within(check, driver, stream)


def _synchronize_within(
    check: AbstractContextManager[None], driver: Driver, stream: Stream
) -> None:
    with check:
        driver.synchronize_stream(stream.handle)


def test_a_capture_error_counts_by_its_code() -> None:
    with capture_errors("STREAM_CAPTURE_UNSUPPORTED"):
        raise CaptureError("no", code="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")


def _speaks_of_cuda() -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_an_error_of_torch_counts_by_the_code_it_speaks_of() -> None:
    with capture_errors("STREAM_CAPTURE_UNSUPPORTED"):
        _speaks_of_cuda()
    with (
        pytest.raises(AssertionError, match="expected CUDA_ERROR_OUT_OF_MEMORY, got CUDA_ERROR_ST"),
        capture_errors("OUT_OF_MEMORY"),
    ):
        _speaks_of_cuda()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("mine")], ids=repr)
def test_what_is_no_cuda_error_passes_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, capture_errors("STREAM_CAPTURE_UNSUPPORTED"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"warmup": -1}, "warmup: expected at least 0, got -1"),
        ({"allowance": -1}, "allowance: expected at least 0, got -1"),
    ],
    ids=str,
)
def test_a_check_of_growth_that_could_not_fail_is_refused(
    wrong: dict[str, int], words: str
) -> None:
    called: list[int] = []
    with pytest.raises(ConfigurationError, match=words):
        assert_no_growth(lambda: called.append(1), driver=EmulatedDriver(), **wrong)
    assert called == []
