"""Stream capture through the CUDA driver."""

from __future__ import annotations

from collections.abc import Iterable

from graphcore.driver.api import CaptureMode
from graphcore.driver.cuda.check import ask
from graphcore.driver.cuda.context import CudaCalls, in_context
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


class CaptureCalls(CudaCalls):
    """The part of the driver that begins, ends and steers captures."""

    @in_context
    def begin_capture(
        self, stream: StreamHandle, mode: CaptureMode, *, graph: GraphHandle | None = None
    ) -> None:
        if graph is None:
            ask(cuda.cuStreamBeginCapture, stream, _MODES[mode])
        else:
            ask(cuda.cuStreamBeginCaptureToGraph, stream, graph, None, None, 0, _MODES[mode])

    @in_context
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        return GraphHandle(int(ask(cuda.cuStreamEndCapture, stream)))

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
        return _MODE_NAMES[int(ask(cuda.cuThreadExchangeStreamCaptureMode, _MODES[mode]))]
