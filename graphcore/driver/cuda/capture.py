"""Stream capture through the CUDA driver."""

from __future__ import annotations

from collections.abc import Iterable

from graphcore.driver.api import CaptureMode
from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.bodies import BodyCalls
from graphcore.driver.cuda.check import ask, error_of
from graphcore.driver.cuda.context import in_context
from graphcore.driver.cuda.versions import cuda
from graphcore.driver.records import (
    CaptureState,
    CaptureStatus,
    GraphHandle,
    NodeHandle,
    StreamHandle,
)

_mode = cuda.CUstreamCaptureMode
_MODES: dict[CaptureMode, object] = {
    "global": _mode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    "thread_local": _mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": _mode.CU_STREAM_CAPTURE_MODE_RELAXED,
}
_MODE_NAMES: dict[int, CaptureMode] = {0: "global", 1: "thread_local", 2: "relaxed"}
_STATES = {0: CaptureState.NONE, 1: CaptureState.ACTIVE, 2: CaptureState.INVALIDATED}
_SET_DEPENDENCIES = int(
    cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
)


class CaptureCalls(BodyCalls):
    """The part of the driver that begins, ends and steers captures."""

    # captures under way, by stream: the graph that takes the nodes, and the graph that was given
    _captures: dict[StreamHandle, tuple[GraphHandle | None, GraphHandle | None]]

    @in_context
    def begin_capture(
        self, stream: StreamHandle, mode: CaptureMode, *, graph: GraphHandle | None = None
    ) -> None:
        number = _mode_number(mode, "cuStreamBeginCapture")
        if graph is None or self._is_body(graph):
            ask(cuda.cuStreamBeginCapture, stream, number)
        else:
            ask(cuda.cuStreamBeginCaptureToGraph, stream, graph, None, None, 0, number)
        self._captures[stream] = self.capture_status(stream).graph, graph

    @in_context
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """As the protocol says; what was captured for a conditional body moves in now."""
        code, captured = cuda.cuStreamEndCapture(stream)
        if code:
            self._give_up(stream)
            raise error_of(code, "cuStreamEndCapture")
        graph = self._new_graph(captured)
        _, given = self._captures.pop(stream, (None, None))
        if given is None or given == graph:
            return graph
        self._move_into_body(graph, given)
        return given

    def _give_up(self, stream: StreamHandle) -> None:
        """Remembers which graphs are gone, where the failed end of a capture was its end."""
        code, status, *_ = cuda.cuStreamGetCaptureInfo(stream)
        if not code and _STATES[int(status)] is not CaptureState.NONE:
            return
        graph, given = self._captures.pop(stream, (None, None))
        if graph is not None:
            self._forget_conditionals(graph)
            if graph == given:
                self._gone.add(graph)

    @in_context
    def capture_status(self, stream: StreamHandle) -> CaptureStatus:
        # the edge data that comes last is not looked at: some bindings answer with freed memory
        status, sequence, graph, nodes, *_ = ask(cuda.cuStreamGetCaptureInfo, stream)
        state = _STATES[int(status)]
        if state is not CaptureState.ACTIVE:
            return CaptureStatus(state)
        frontier = tuple(NodeHandle(int(node)) for node in nodes or ())
        return CaptureStatus(state, int(sequence), GraphHandle(int(graph)), frontier)

    @in_context
    def set_capture_frontier(self, stream: StreamHandle, nodes: Iterable[NodeHandle]) -> None:
        handles = [cuda.CUgraphNode(node) for node in nodes]
        ask(
            cuda.cuStreamUpdateCaptureDependencies,
            stream,
            handles,
            None,
            len(handles),
            _SET_DEPENDENCIES,
        )

    @in_context
    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        call = cuda.cuThreadExchangeStreamCaptureMode
        return _MODE_NAMES[int(ask(call, _mode_number(mode, call.__name__)))]


def _mode_number(mode: CaptureMode, call: str) -> object:
    number = _MODES.get(mode)
    if number is None:
        expected = f"mode: expected one of {', '.join(_MODES)}, got {mode!r}"
        raise cuda_error("CUDA_ERROR_INVALID_VALUE", call, description=expected)
    return number
