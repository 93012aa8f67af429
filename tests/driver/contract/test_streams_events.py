"""Contract: device, streams and events outside captures."""

from __future__ import annotations

import pytest
from helpers.contract import Bench, covers, in_thread, refused
from helpers.kernels import ONE_BLOCK, add_one, scale

from graphcore.driver import LEGACY_STREAM, Driver


@covers("device_info")
def test_device_info_names_the_device_and_its_memory(graphcore_driver: Driver) -> None:
    info = graphcore_driver.device_info()
    assert info.index == graphcore_driver.device
    assert info.name
    assert info.capability >= (7, 0)
    assert info.total_memory > 2**30
    assert info.multiprocessors > 0
    assert info.driver_version >= (13, 0)


@covers("context_id")
def test_the_context_stays_the_same(graphcore_driver: Driver) -> None:
    assert graphcore_driver.context_id() == graphcore_driver.context_id()
    assert graphcore_driver.context_id() == in_thread(graphcore_driver.context_id)


@covers("memory_info")
def test_memory_info_counts_an_allocation(bench: Bench) -> None:
    size = 64 * 2**20
    free_before, total = bench.driver.memory_info()
    assert 0 < free_before <= total
    bench.alloc(size)
    free_after, total_after = bench.driver.memory_info()
    assert total_after == total
    assert free_before - free_after >= size


@covers("synchronize", "synchronize_stream", "query_stream")
def test_after_a_wait_the_work_has_finished(bench: Bench) -> None:
    x = bench.put([1, 2])
    bench.launch(add_one, x, 2)
    bench.driver.synchronize_stream(bench.stream.handle)
    assert bench.driver.query_stream(bench.stream.handle) is True
    bench.launch(add_one, x, 2)
    bench.driver.synchronize()
    assert bench.driver.query_stream(bench.stream.handle) is True
    assert bench.get(x, 2) == [3, 4]


@covers("create_stream", "destroy_stream", "stream_is_blocking", "stream_device")
@pytest.mark.parametrize("blocking", [False, True], ids=["non_blocking", "blocking"])
def test_a_stream_keeps_the_kind_it_was_made_as(graphcore_driver: Driver, blocking: bool) -> None:
    stream = graphcore_driver.create_stream(blocking=blocking)
    assert graphcore_driver.stream_is_blocking(stream) is blocking
    assert graphcore_driver.stream_device(stream) == graphcore_driver.device
    graphcore_driver.destroy_stream(stream)


@covers("stream_is_blocking", "stream_device")
def test_the_legacy_stream_is_blocking_and_on_the_device(graphcore_driver: Driver) -> None:
    assert graphcore_driver.stream_is_blocking(LEGACY_STREAM) is True
    assert graphcore_driver.stream_device(LEGACY_STREAM) == graphcore_driver.device


@covers("create_stream")
def test_a_stream_takes_a_priority(bench: Bench) -> None:
    stream = bench.driver.create_stream(blocking=False, priority=-1)
    assert bench.driver.query_stream(stream) is True
    bench.driver.destroy_stream(stream)


@covers("launch")
def test_the_legacy_stream_takes_work(bench: Bench) -> None:
    x = bench.put([1])
    function = bench.driver.function(add_one)
    bench.driver.launch(function, ONE_BLOCK, add_one.pack(x, 1), LEGACY_STREAM)
    assert bench.get(x, 1) == [2]


@covers("create_event", "destroy_event", "record_event", "wait_event", "query_event")
def test_a_stream_waits_for_an_event_of_another(bench: Bench) -> None:
    x = bench.put([1])
    side = bench.new_stream()
    event = bench.driver.create_event(timing=False)
    bench.launch(add_one, x, 1)
    bench.driver.record_event(event, bench.stream.handle)
    bench.driver.wait_event(side.handle, event)
    bench.launch(scale, x, 10.0, 1, stream=side)
    bench.driver.synchronize_stream(side.handle)
    assert bench.driver.query_event(event) is True
    assert bench.get(x, 1) == [20]
    bench.driver.destroy_event(event)


@covers("query_event", "synchronize_event")
def test_an_event_never_recorded_has_happened(bench: Bench) -> None:
    event = bench.new_event()
    assert bench.driver.query_event(event.handle) is True
    bench.driver.synchronize_event(event.handle)


@covers("wait_event")
def test_waiting_for_an_event_never_recorded_waits_for_nothing(bench: Bench) -> None:
    x = bench.put([1])
    bench.driver.wait_event(bench.stream.handle, bench.new_event().handle)
    bench.launch(add_one, x, 1)
    assert bench.get(x, 1) == [2]


@covers("elapsed_ms", "synchronize_event")
def test_two_timing_events_have_time_between_them(bench: Bench) -> None:
    start, end = bench.new_event(timing=True), bench.new_event(timing=True)
    x = bench.put([1])
    bench.driver.record_event(start.handle, bench.stream.handle)
    bench.launch(add_one, x, 1)
    bench.driver.record_event(end.handle, bench.stream.handle)
    bench.driver.synchronize_event(end.handle)
    assert bench.driver.elapsed_ms(start.handle, end.handle) > 0


@covers("elapsed_ms")
@pytest.mark.parametrize(
    ("timing", "record"),
    [(False, True), (True, False)],
    ids=["made_without_timing", "never_recorded"],
)
def test_elapsed_ms_refuses_an_event_without_a_time(
    bench: Bench, timing: bool, record: bool
) -> None:
    start, end = bench.new_event(timing=timing), bench.new_event(timing=True)
    if record:
        bench.driver.record_event(start.handle, bench.stream.handle)
    bench.driver.record_event(end.handle, bench.stream.handle)
    bench.driver.synchronize()
    with refused("INVALID_HANDLE"):
        bench.driver.elapsed_ms(start.handle, end.handle)


@covers("record_event")
def test_an_external_record_is_refused_outside_a_capture(bench: Bench) -> None:
    event = bench.new_event()
    with refused("ILLEGAL_STATE"):
        bench.driver.record_event(event.handle, bench.stream.handle, external=True)


@covers("wait_event")
def test_an_external_wait_is_refused_outside_a_capture(bench: Bench) -> None:
    event = bench.new_event()
    bench.driver.record_event(event.handle, bench.stream.handle)
    with refused("ILLEGAL_STATE"):
        bench.driver.wait_event(bench.stream.handle, event.handle, external=True)


@covers("close")
def test_handles_are_still_their_owners_after_the_driver_is_closed(
    graphcore_driver: Driver,
) -> None:
    stream = graphcore_driver.create_stream(blocking=False)
    event = graphcore_driver.create_event(timing=False)
    address = graphcore_driver.alloc(16)
    graph = graphcore_driver.create_graph()
    graphcore_driver.close()
    graphcore_driver.close()
    graphcore_driver.destroy_graph(graph)
    graphcore_driver.free(address)
    graphcore_driver.destroy_event(event)
    graphcore_driver.destroy_stream(stream)
