"""What a capture accepts: its options, and a stream that fits them."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

from graphcore.driver import CaptureMode, Driver, Stream, active, as_stream
from graphcore.driver.records import CaptureState
from graphcore.errors import CacheTypeError, CaptureError, ConfigurationError, LifecycleError
from graphcore.executable.expectation import check_expectation
from graphcore.interop.drivers import same_driver
from graphcore.interop.torch import MemoryPool
from graphcore.interop.torch_workspaces import expects_products

LegacyWork = Literal["error", "ignore"]


def check_options(mode: str, on_legacy_work: str, expect: object) -> None:
    """Raises ConfigurationError for an option that :func:`capture` does not know."""
    _check_choice("mode", mode, get_args(CaptureMode))
    check_legacy_work(on_legacy_work)
    if expect is not None:
        check_expectation(expect)


def check_legacy_work(choice: object) -> None:
    """Raises ConfigurationError for a choice that :func:`capture` does not know."""
    _check_choice("on_legacy_work", choice, get_args(LegacyWork))


def check_label(label: object) -> None:
    """Raises ConfigurationError for a label that is no text."""
    if not isinstance(label, str):
        raise ConfigurationError(f"label: expected a str, got {label!r}")


def check_pool(pool: object) -> None:
    """Raises CacheTypeError for a pool that is none of ours."""
    if pool is not None and not isinstance(pool, MemoryPool):
        raise CacheTypeError(
            f"pool: expected a graphcore.interop.torch.MemoryPool or None, got "
            f"{type(pool).__name__}"
        )


def stream_for_pool(
    driver: Driver, given: Any, pool: MemoryPool, on_legacy_work: LegacyWork
) -> Any:
    """The stream of a capture into a shared pool: the given one, else the pool's own.

    Raises:
        ConfigurationError: The pool is of another device.
    """
    if pool.device != driver.device:
        raise ConfigurationError(
            f"pool: expected one of device {driver.device}, got one of device {pool.device}"
        )
    if given is not None:
        return given
    return pool.capture_stream(
        driver, blocking=on_legacy_work == "error", products=expects_products(driver)
    )


def refuse_second() -> None:
    """Raises CaptureError where graphs are off, or this thread captures already."""
    if os.environ.get("GRAPHCORE_DISABLE") == "1":
        raise CaptureError(
            "capture: the environment variable GRAPHCORE_DISABLE=1 turns graphs off; unset it, or "
            "run the step without a capture"
        )
    other = active.current()
    if other is not None:
        raise CaptureError(
            f"capture: {other.name} is under way on this thread; end it first, or capture on "
            "another thread. It was not harmed."
        )


def fitting_stream(driver: Driver, given: Any, on_legacy_work: LegacyWork) -> Stream:
    """A lent stream, or the given one where it fits; raises as :func:`capture` says."""
    wants_blocking = on_legacy_work == "error"
    if given is None:
        return driver.capture_stream(blocking=wants_blocking, products=expects_products(driver))
    stream = as_stream(driver, given)
    if stream.handle in (0, 1, 2):
        raise ConfigurationError(
            f"stream: expected a stream that can capture, got default stream {stream.handle}; "
            "pass None, or a stream that was created"
        )
    refuse_busy(driver, stream)  # first: asking a capturing stream anything else breaks its capture
    device = driver.stream_device(stream.handle)
    if device != driver.device:
        raise CacheTypeError(
            f"stream: expected one of device {driver.device}, got one of device {device}"
        )
    if stream.is_blocking != wants_blocking:
        words = {True: "a blocking", False: "a non-blocking"}
        other = "ignore" if wants_blocking else "error"
        raise ConfigurationError(
            f"on_legacy_work={on_legacy_work!r}: expected {words[wants_blocking]} stream, got "
            f"{words[not wants_blocking]} one; pass stream=None, another stream, or "
            f"on_legacy_work={other!r}"
        )
    return stream


def refuse_busy(driver: Driver, stream: Stream) -> None:
    """Raises CaptureError where somebody else captures on ``stream``."""
    if driver.capture_status(stream.handle).state is not CaptureState.NONE:
        raise CaptureError(
            f"stream: expected one that is not capturing, got {stream.handle:#x}, on which "
            "somebody else captures; it was not harmed"
        )


def refuse_instantiation(driver: Driver) -> None:
    """Raises LifecycleError where making an executable would break a capture under way.

    One of this thread unless it is relaxed, and in mode "global" one of any thread.
    """
    own = active.current()
    for capture in active.under_way():
        is_own = capture is own
        breaks = capture.mode != "relaxed" if is_own else capture.mode == "global"
        if breaks and same_driver(driver, capture.driver):
            where = "on this thread" if is_own else "on another thread"
            raise LifecycleError(
                f"instantiate: {capture.name} is under way {where} in mode {capture.mode}, which "
                "CUDA would break; instantiate after it, or capture with mode='relaxed'"
            )


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"{field}: expected one of {choices}, got {value!r}")
