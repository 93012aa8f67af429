"""Streams and events of the emulated driver. Work on them runs at once, so nothing ever waits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphcore.driver.emulated.calls import Refused
from graphcore.driver.emulated.handles import Table, draw_handle
from graphcore.driver.records import EventHandle, StreamHandle

if TYPE_CHECKING:
    from graphcore.driver.emulated.capture import Capture
    from graphcore.driver.emulated.graph import Node

LEGACY_NUMBERS = (0, 1)
PER_THREAD_NUMBER = 2
_HIGHEST_PRIORITY = -5


def is_named(handle: int) -> bool:
    """Whether a handle means a default stream, of the device or of the thread."""
    return handle in LEGACY_NUMBERS or handle == PER_THREAD_NUMBER


@dataclass(eq=False, slots=True)
class StreamState:
    """A stream: what it was made as, and the capture it belongs to, if any.

    ``frontier`` are the nodes that the next captured node will depend on, in the order in which
    they came (the order of edges matters to an update).
    """

    handle: StreamHandle
    device: int
    is_blocking: bool
    is_legacy: bool = False
    priority: int = 0
    capture: Capture | None = None
    frontier: list[Node] = field(default_factory=list)

    def join(self, nodes: list[Node]) -> None:
        """Adds ``nodes`` to the frontier."""
        self.frontier += [node for node in nodes if node not in self.frontier]


@dataclass(eq=False, slots=True)
class EventState:
    """An event: when it was recorded outside a capture, or where in which capture."""

    handle: EventHandle
    device: int
    has_timing: bool
    recorded_at: float | None = None
    capture: Capture | None = None
    frontier: tuple[Node, ...] = ()

    def record_now(self) -> None:
        self.recorded_at = time.perf_counter()
        self.capture = None
        self.frontier = ()

    def record_captured(self, capture: Capture, frontier: list[Node]) -> None:
        self.recorded_at = None
        self.capture = capture
        self.frontier = tuple(frontier)


class Streams:
    """The streams and events of a machine. Handles 0 and 1 are each device's legacy stream."""

    def __init__(self, devices: int) -> None:
        self._streams: Table[StreamState] = Table("stream")
        self.events: Table[EventState] = Table("event")
        self._legacy = [
            StreamState(StreamHandle(1), device, is_blocking=True, is_legacy=True)
            for device in range(devices)
        ]
        self._per_thread = [
            StreamState(StreamHandle(PER_THREAD_NUMBER), device, is_blocking=True)
            for device in range(devices)
        ]

    def create(self, device: int, *, is_blocking: bool, priority: int) -> StreamState:
        # as on a device, a priority outside the range is taken as the nearest one inside
        stream = StreamState(
            StreamHandle(draw_handle()),
            device,
            is_blocking,
            priority=min(0, max(_HIGHEST_PRIORITY, priority)),
        )
        self._streams.add(stream)
        return stream

    def find(self, handle: int, device: int) -> StreamState:
        if handle in LEGACY_NUMBERS:
            return self._legacy[device]
        if handle == PER_THREAD_NUMBER:
            return self._per_thread[device]
        return self._streams.find(handle)

    def remove(self, handle: int) -> StreamState:
        return self._streams.remove(handle)

    def create_event(self, device: int, *, has_timing: bool) -> EventState:
        event = EventState(EventHandle(draw_handle()), device, has_timing)
        self.events.add(event)
        return event


def elapsed_ms(start: EventState, end: EventState) -> float:
    """Milliseconds between two recorded timing events: host time, which says nothing of a GPU."""
    for name, event in (("start", start), ("end", end)):
        if not event.has_timing or event.recorded_at is None:
            raise Refused(
                "CUDA_ERROR_INVALID_HANDLE",
                f"{name}: expected a recorded event with timing=True",
            )
    assert start.recorded_at is not None
    assert end.recorded_at is not None
    return (end.recorded_at - start.recorded_at) * 1000
