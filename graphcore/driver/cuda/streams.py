"""Streams and events of the CUDA driver."""

from __future__ import annotations

from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.check import ask, error_of
from graphcore.driver.cuda.context import LAST_NAMED_STREAM, CudaCalls, in_context
from graphcore.driver.cuda.versions import cuda
from graphcore.driver.records import EventHandle, StreamHandle

NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
_NO_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_RECORD_EXTERNAL = int(cuda.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
_WAIT_EXTERNAL = int(cuda.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)
_NOT_READY = int(cuda.CUresult.CUDA_ERROR_NOT_READY)


class StreamCalls(CudaCalls):
    """The part of the driver that makes, orders and waits for streams and events."""

    # streams made here, and whether they are blocking: capturing ones are not to be asked
    _own_streams: dict[StreamHandle, bool]

    @in_context
    def create_stream(self, *, blocking: bool, priority: int = 0) -> StreamHandle:
        flags = 0 if blocking else NON_BLOCKING
        stream = StreamHandle(int(ask(cuda.cuStreamCreateWithPriority, flags, priority)))
        self._own_streams[stream] = blocking
        return stream

    @in_context
    def destroy_stream(self, stream: StreamHandle) -> None:
        ask(cuda.cuStreamDestroy, stream)
        self._own_streams.pop(stream, None)

    def own_streams(self) -> tuple[StreamHandle, ...]:
        return tuple(self._own_streams)

    @in_context
    def synchronize_stream(self, stream: StreamHandle) -> None:
        ask(cuda.cuStreamSynchronize, stream)

    @in_context
    def query_stream(self, stream: StreamHandle) -> bool:
        return _is_done(cuda.cuStreamQuery(stream)[0], "cuStreamQuery")

    @in_context
    def stream_is_blocking(self, stream: StreamHandle) -> bool:
        if stream <= LAST_NAMED_STREAM:
            return True
        known = self._own_streams.get(stream)
        if known is not None:
            return known
        if _captures(stream):
            # the driver refuses too, and breaks the capture besides
            raise cuda_error("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cuStreamGetFlags")
        return not int(ask(cuda.cuStreamGetFlags, stream)) & NON_BLOCKING

    @in_context
    def stream_device(self, stream: StreamHandle) -> int:
        # a capturing stream is not to be asked: the driver refuses, and the capture breaks
        if stream <= LAST_NAMED_STREAM or stream in self._own_streams or _captures(stream):
            return self.device
        return int(ask(cuda.cuStreamGetDevice, stream))

    @in_context
    def wait_event(
        self, stream: StreamHandle, event: EventHandle, *, external: bool = False
    ) -> None:
        ask(cuda.cuStreamWaitEvent, stream, event, _WAIT_EXTERNAL if external else 0)

    @in_context
    def create_event(self, *, timing: bool) -> EventHandle:
        return EventHandle(int(ask(cuda.cuEventCreate, 0 if timing else _NO_TIMING)))

    @in_context
    def destroy_event(self, event: EventHandle) -> None:
        ask(cuda.cuEventDestroy, event)

    @in_context
    def record_event(
        self, event: EventHandle, stream: StreamHandle, *, external: bool = False
    ) -> None:
        # CUDA refuses the external flag outside a capture
        flags = _RECORD_EXTERNAL if external else 0
        ask(cuda.cuEventRecordWithFlags, event, stream, flags)

    @in_context
    def synchronize_event(self, event: EventHandle) -> None:
        ask(cuda.cuEventSynchronize, event)

    @in_context
    def query_event(self, event: EventHandle) -> bool:
        return _is_done(cuda.cuEventQuery(event)[0], "cuEventQuery")

    @in_context
    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        return float(ask(cuda.cuEventElapsedTime, start, end))


def _captures(stream: StreamHandle) -> bool:
    return bool(int(ask(cuda.cuStreamIsCapturing, stream)))


def _is_done(code: Any, call: str) -> bool:
    if not code:
        return True
    if int(code) == _NOT_READY:
        return False
    raise error_of(code, call)
