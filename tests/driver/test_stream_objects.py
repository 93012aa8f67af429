"""Streams and events as objects: owned and borrowed, ours and other libraries'."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from graphcore.driver import Driver, Stream, open_driver
from graphcore.driver.streams import as_stream, stream_handle
from graphcore.errors import CacheTypeError, CudaError, GraphcoreWarning, LifecycleError


class Protocol:
    """Speaks __cuda_stream__ as a method, like cuda.core."""

    def __init__(self, handle: int, version: int = 0) -> None:
        self.answer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.answer


@pytest.mark.parametrize(
    "stream",
    [
        7,
        Protocol(7),
        SimpleNamespace(__cuda_stream__=(0, 7)),
        SimpleNamespace(cuda_stream=7),
        SimpleNamespace(ptr=7),
    ],
    ids=["int", "protocol", "protocol as a value", "torch", "cupy"],
)
def test_a_handle_is_found_in_every_kind_of_stream(stream: Any) -> None:
    assert stream_handle(stream) == 7


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (True, "expected a graphcore, torch, CuPy or cuda.core stream, .* got bool"),
        (None, "got NoneType"),
        ("7", "got str"),
        (SimpleNamespace(ptr="7"), "got SimpleNamespace"),
        (Protocol(7, version=3), "expected __cuda_stream__ version 0, got 3"),
    ],
    ids=["bool", "none", "text", "no number", "another version"],
)
def test_what_is_no_stream_is_refused(stream: Any, said: str) -> None:
    with pytest.raises(CacheTypeError, match=said):
        stream_handle(stream)


def test_a_stream_speaks_the_stream_protocol_until_it_is_closed(graphcore_driver: Driver) -> None:
    with graphcore_driver.stream() as stream:
        assert stream.__cuda_stream__() == (0, stream.handle)
        assert int(stream) == stream_handle(stream) == stream.handle
        assert stream_handle(Protocol(stream.handle)) == stream.handle
        assert f"{stream.handle:#x} {graphcore_driver.name}:0 owned" in repr(stream)
    for use in (int, stream_handle, Stream.synchronize, Stream.query, Stream.record):
        with pytest.raises(LifecycleError, match="expected an open stream, got a closed one"):
            use(stream)
    stream.close()  # again


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stream_knows_whether_it_blocks(graphcore_driver: Driver, blocking: bool) -> None:
    with graphcore_driver.stream(blocking=blocking) as stream:
        assert stream.is_blocking is blocking


def test_events_order_streams_and_say_when_their_work_is_done(graphcore_driver: Driver) -> None:
    with graphcore_driver.stream() as one, graphcore_driver.stream() as other:
        start = one.record(graphcore_driver.event(timing=True))
        other.wait(start)
        end = other.record(graphcore_driver.event(timing=True))
        end.synchronize()
        other.synchronize()
        assert end.query()
        assert other.query()
        assert end.elapsed_ms_since(start) >= 0
        for event in (start, end):
            event.close()
            event.close()  # again


def test_a_borrowed_stream_keeps_its_object_and_is_not_destroyed(graphcore_driver: Driver) -> None:
    owner = graphcore_driver.stream()
    foreign = Protocol(owner.handle)
    borrowed = as_stream(graphcore_driver, foreign)
    assert borrowed.handle == owner.handle
    assert "borrowed" in repr(borrowed)
    held = len(gc.get_referrers(foreign))
    borrowed.close()
    del borrowed
    gc.collect()
    assert len(gc.get_referrers(foreign)) < held
    owner.synchronize()  # still there
    owner.close()


def test_a_stream_of_ours_stays_itself_within_its_driver(graphcore_driver: Driver) -> None:
    with graphcore_driver.stream() as stream:
        assert as_stream(graphcore_driver, stream) is stream


def test_a_stream_of_another_device_is_refused() -> None:
    one, other = (open_driver("emulated", devices=2, device=device) for device in (0, 1))
    with one.stream() as stream, pytest.raises(CacheTypeError, match="emulated:1, got one of emul"):
        as_stream(other, stream)


def test_a_stream_that_is_dropped_is_destroyed() -> None:
    driver = open_driver("emulated")
    handle = driver.stream().handle
    gc.collect()
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID"):
        driver.query_stream(handle)


def test_what_a_finalizer_cannot_give_back_is_a_warning() -> None:
    driver = open_driver("emulated")
    stream = driver.stream()
    driver.destroy_stream(stream.handle)
    with pytest.warns(GraphcoreWarning, match=r"while finalizing: cuStreamDestroy.*INVALID"):
        stream.close()
