"""Stream captures: sequences, forks, joins, modes, and how each rule of CUDA is broken.

An operation that breaks a rule invalidates every capture it touches; the capture then lasts until
its end is asked for, once, and gives no graph. What is not allowed, and with which code, follows
the CUDA documentation of stream capture and what was seen on a device (docs/driver-notes.md).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from graphcore.driver.api import CaptureMode
from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.emulated.graph import Graph, Graphs, Node, Payload, ancestors
from graphcore.driver.emulated.streams import EventState, StreamState
from graphcore.driver.records import (
    CaptureState,
    CaptureStatus,
    EventParams,
    NodeKind,
)

# what a capture may leave in a conditional body; others are added to the body by hand, or cannot be
# in one
MOVED_KINDS = frozenset(
    {NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET, NodeKind.EMPTY, NodeKind.CHILD}
)
_MODES = ("global", "thread_local", "relaxed")

_sequences = itertools.count(1)


@dataclass(eq=False, slots=True)
class Capture:
    """A capture under way.

    ``graph`` takes the nodes: the caller's, or a new one. What is captured into a graph that is
    embedded in another (``body``) is captured apart, and moved in when the capture succeeded.
    """

    origin: StreamState
    mode: CaptureMode
    graph: Graph
    body: Graph | None = None
    thread: int = field(default_factory=threading.get_ident)
    sequence: int = field(default_factory=lambda: next(_sequences))
    streams: list[StreamState] = field(default_factory=list)
    is_invalid: bool = False
    is_over: bool = False

    @property
    def has_blocking_stream(self) -> bool:
        return any(stream.is_blocking for stream in self.streams)

    def adopt(self, stream: StreamState, frontier: Iterable[Node]) -> None:
        """Makes ``stream`` part of the capture."""
        stream.capture = self
        stream.frontier = list(frontier)
        self.streams.append(stream)


class _ThreadMode(threading.local):
    def __init__(self) -> None:
        self.mode: CaptureMode = "global"


class Captures:
    """The captures under way on a machine."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._active: list[Capture] = []
        self._thread = _ThreadMode()

    # ---- begin and end ----------------------------------------------------------------------

    def begin(self, stream: StreamState, mode: CaptureMode, graph: Graph | None) -> None:
        check_mode(mode)
        if stream.is_legacy:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "the legacy stream cannot")
        if stream.capture is not None:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE", "the stream is capturing already")
        if graph is not None and graph.is_being_captured:
            raise invalid("the graph is being captured into already")
        body = graph if graph is not None and graph.parent is not None else None
        if graph is None or body is not None:
            graph = self._graphs.create(stream.device)
        capture = Capture(stream, mode, graph, body)
        capture.graph.is_being_captured = True
        capture.adopt(stream, ())
        self._active.append(capture)

    def end(self, stream: StreamState) -> Graph:
        capture = stream.capture
        if capture is None:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE", "the stream is not capturing")
        if capture.origin is not stream:
            capture.is_invalid = True
            raise Refused(
                "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", f"stream {capture.origin.handle:#x} began it"
            )
        refusal = _refused_end(capture)
        self._finish(capture)
        if refusal is not None or capture.body is not None:
            # a given graph dies with its failed capture too
            self._graphs.forget(capture.graph)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame
        if capture.body is None:
            return capture.graph
        self._graphs.find(capture.body.handle)
        for node in capture.body.take(capture.graph).values():
            self._graphs.register_node(node)
        return capture.body

    def _finish(self, capture: Capture) -> None:
        self._active.remove(capture)
        capture.is_over = True
        capture.graph.is_being_captured = False
        for stream in capture.streams:
            stream.capture = None
            stream.frontier = []

    def leave(self, stream: StreamState) -> None:
        """The stream is destroyed: its capture cannot be ended or joined any more."""
        if stream.capture is not None:
            stream.capture.is_invalid = True
            if stream.capture.origin is stream:
                capture = stream.capture
                self._finish(capture)
                self._graphs.forget(capture.graph)

    # ---- what streams may do ----------------------------------------------------------------

    def target(self, stream: StreamState) -> Capture | None:
        """The capture that work on ``stream`` goes into, None where it runs at once."""
        self.refuse_implicit(stream)
        capture = stream.capture
        if capture is not None and capture.is_invalid:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        return capture

    def add(self, capture: Capture, stream: StreamState, payload: Payload) -> Node:
        """Captures one node on ``stream``."""
        node = capture.graph.append(payload, stream.frontier)
        self._graphs.register_node(node)
        stream.frontier = [node]
        return node

    def refuse_implicit(self, stream: StreamState, *, invalidates: bool = True) -> None:
        """IMPLICIT for the legacy stream while a blocking stream of its device captures."""
        if not stream.is_legacy:
            return
        touched = [
            capture
            for capture in self._active
            if capture.has_blocking_stream and capture.graph.device == stream.device
        ]
        if touched:
            self._invalidate(touched if invalidates else [])
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")

    def refuse_waiting(self, stream: StreamState) -> None:
        """UNSUPPORTED for a host that waits for, or asks about, a stream.

        A capturing stream refuses in every mode; another one where a capture's mode forbids it.
        """
        self.refuse_implicit(stream)
        self.refuse_capturing(stream)
        self.refuse_unsafe("waiting for a stream")

    def refuse_capturing(self, stream: StreamState) -> None:
        """UNSUPPORTED for what no capturing stream takes."""
        if stream.capture is not None:
            self._invalidate([stream.capture])
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "the stream is capturing")

    def refuse_waiting_for_all(self, device: int) -> None:
        """UNSUPPORTED for a host that waits for a device with a capturing stream."""
        touched = [capture for capture in self._active if capture.graph.device == device]
        if touched:
            self._invalidate(touched)
            raise Refused(
                "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "a stream of the device is capturing"
            )

    def refuse_unsafe(self, what: str) -> None:
        """UNSUPPORTED for a call that some capture's mode forbids to this thread."""
        forbidding = [capture for capture in self._active if self._forbids(capture)]
        if forbidding:
            self._invalidate(forbidding)
            modes = ", ".join(sorted({capture.mode for capture in forbidding}))
            raise Refused(
                "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", f"{what} during a capture of mode {modes}"
            )

    def _forbids(self, capture: Capture) -> bool:
        if capture.mode == "relaxed" or self._thread.mode == "relaxed":
            return False
        if capture.thread == threading.get_ident():
            return True
        return capture.mode == "global" and self._thread.mode == "global"

    def exchange_mode(self, mode: CaptureMode) -> CaptureMode:
        check_mode(mode)
        before = self._thread.mode
        self._thread.mode = mode
        return before

    def invalidate(self, stream: StreamState) -> None:
        if stream.capture is not None:
            self._invalidate([stream.capture])

    @staticmethod
    def _invalidate(captures: Iterable[Capture]) -> None:
        for capture in captures:
            capture.is_invalid = True

    # ---- events -----------------------------------------------------------------------------

    def record(self, event: EventState, stream: StreamState, *, external: bool) -> None:
        if event.device != stream.device:
            raise Refused("CUDA_ERROR_INVALID_HANDLE", "event and stream are of different devices")
        capture = self.target(stream)
        if capture is None:
            if external:
                raise _outside("external")
            event.record_now()
        elif external:
            params = EventParams(event.handle, NodeKind.EVENT_RECORD)
            self.add(capture, stream, Payload(params, event=event))
        else:
            event.record_captured(capture, stream.frontier)

    def wait(self, stream: StreamState, event: EventState, *, external: bool) -> None:
        capture = self.target(stream)
        if external:
            if capture is None:
                raise _outside("external")
            params = EventParams(event.handle, NodeKind.EVENT_WAIT)
            self.add(capture, stream, Payload(params, event=event))
        elif event.capture is None:
            # an event that was never recorded is nothing to wait for, in a capture too
            if capture is not None and event.recorded_at is not None:
                capture.is_invalid = True
                raise Refused("CUDA_ERROR_STREAM_CAPTURE_ISOLATION")
        else:
            self._wait_captured(stream, capture, event.capture, event.frontier)

    def _wait_captured(
        self,
        stream: StreamState,
        capture: Capture | None,
        other: Capture,
        frontier: tuple[Node, ...],
    ) -> None:
        if other.is_over:
            self.invalidate(stream)
            raise _of_the_past()
        if other.is_invalid:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        if capture is None:
            if stream.is_legacy:
                self._invalidate([other])
                raise Refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "the legacy stream cannot")
            other.adopt(stream, frontier)
        elif capture is not other:
            self._invalidate([capture, other])
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_MERGE")
        else:
            stream.join(list(frontier))

    def refuse_captured(self, event: EventState) -> None:
        """CAPTURED_EVENT for a host that waits for, or asks about, an event of a capture."""
        if event.capture is None:
            self.refuse_unsafe("asking about an event")
            return
        if event.capture.is_over:
            raise _of_the_past()
        self._invalidate([event.capture])
        raise Refused("CUDA_ERROR_CAPTURED_EVENT")

    @staticmethod
    def refuse_time_of(event: EventState) -> None:
        """CAPTURED_EVENT for the time of an event of a capture; no capture minds the question."""
        if event.capture is not None:
            raise (
                _of_the_past() if event.capture.is_over else Refused("CUDA_ERROR_CAPTURED_EVENT")
            )

    # ---- reading and steering ---------------------------------------------------------------

    def status(self, stream: StreamState) -> CaptureStatus:
        self.refuse_implicit(stream, invalidates=False)
        capture = stream.capture
        if capture is None:
            return CaptureStatus(CaptureState.NONE)
        if capture.is_invalid:
            return CaptureStatus(CaptureState.INVALIDATED, capture.sequence)
        return CaptureStatus(
            CaptureState.ACTIVE,
            capture.sequence,
            capture.graph.handle,
            tuple(node.handle for node in stream.frontier),
        )

    def set_frontier(self, stream: StreamState, handles: Iterable[int]) -> None:
        capture = stream.capture
        if capture is None:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE", "the stream is not capturing")
        if capture.is_invalid:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        stream.frontier = self._graphs.find_in(capture.graph, handles)


def check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise invalid(f"mode: expected one of {', '.join(_MODES)}, got {mode!r}")


def _outside(what: str) -> Refused:
    return Refused("CUDA_ERROR_ILLEGAL_STATE", f"{what}: only inside a capture")


def _of_the_past() -> Refused:
    return invalid("the event was last recorded in a capture that is over")


def _refused_end(capture: Capture) -> Refused | None:
    """Why the end of ``capture`` gives no graph; the capture is over all the same."""
    if capture.mode != "relaxed" and capture.thread != threading.get_ident():
        return Refused("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD")
    if capture.is_invalid:
        return Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    unjoined = _unjoined(capture)
    if unjoined:
        return Refused("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "; ".join(unjoined))
    if capture.body is None:
        return None
    for node in capture.graph.all_nodes():
        if node.kind not in MOVED_KINDS:
            return Refused(
                "CUDA_ERROR_NOT_SUPPORTED",
                f"a conditional body takes no captured node of kind {node.kind.value}",
            )
    return None


def _unjoined(capture: Capture) -> list[str]:
    """What forked streams hold that the origin stream did not wait for, in words."""
    joined = ancestors(capture.origin.frontier)
    words = []
    for stream in capture.streams:
        leaves = [node.handle for node in stream.frontier if node not in joined]
        if stream is not capture.origin and leaves:
            names = ", ".join(f"{handle:#x}" for handle in leaves)
            words.append(f"stream {stream.handle:#x} ends in nodes {names}")
    return words
