"""The emulated driver: device, streams, events, memory, kernels and captures.

Graphs and executables are in ``graph_calls.py``; the rules are in the parts this file calls. A
method here resolves handles, asks the rules, and does the work at once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from graphcore.driver import active
from graphcore.driver.api import CaptureMode
from graphcore.driver.emulated import conditional
from graphcore.driver.emulated.calls import Refused, entry, invalid
from graphcore.driver.emulated.execution import Order
from graphcore.driver.emulated.functions import Function, KernelOperation, check_launch
from graphcore.driver.emulated.graph import Payload
from graphcore.driver.emulated.graph_calls import GraphCalls
from graphcore.driver.emulated.machine import Machine
from graphcore.driver.emulated.memory import check_copy, check_fill, run_copy, run_fill
from graphcore.driver.emulated.operation import Operation
from graphcore.driver.emulated.streams import StreamState, elapsed_ms, is_named
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import (
    Allocation,
    CaptureStatus,
    DeviceInfo,
    EventHandle,
    FunctionHandle,
    FunctionInfo,
    GraphHandle,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeHandle,
    StreamHandle,
)
from graphcore.driver.tensor_map import TensorMap
from graphcore.errors import ConfigurationError

_ONE_THREAD = LaunchConfig((1, 1, 1), (1, 1, 1))
# the device that is emulated: the one the rules were measured on
_NAME = "emulated device"
_CAPABILITY = (9, 0)
_MULTIPROCESSORS = 132
_SHARED_BYTES = 232448
_DRIVER_VERSION = (13, 0)


class EmulatedDriver(GraphCalls):
    """CUDA's graph rules in Python, for one device of an emulated machine.

    Args:
        device: Ordinal of this driver's device.
        devices: How many devices the machine has; :meth:`for_device` gives the others' drivers.
        order: "program", or "adversarial": independent nodes run in another random order at each
            launch.
        seed: Of those orders.
        total_memory: Bytes each device has; allocations beyond answer OUT_OF_MEMORY.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    name: ClassVar[str] = "emulated"
    is_emulated: ClassVar[bool] = True

    def __init__(
        self,
        device: int = 0,
        *,
        devices: int = 1,
        order: Order = "program",
        seed: int = 0,
        total_memory: int = 16 * 2**30,
    ) -> None:
        self._machine = Machine(devices, order, seed, total_memory)
        self._join(device)

    def _join(self, device: int) -> None:
        self._own_streams: set[StreamHandle] = set()
        if not 0 <= device < self._machine.devices:
            raise ConfigurationError(
                f"device: expected 0 to {self._machine.devices - 1}, got {device}"
            )
        self.device = device
        self._closed = False

    def for_device(self, device: int) -> EmulatedDriver:
        """The driver of another device of the same machine; handles are good in both."""
        other = type(self).__new__(type(self))
        other._machine = self._machine
        other._join(device)
        return other

    # ---- device -------------------------------------------------------------------------------

    @entry("cuDeviceGetAttribute")
    def device_info(self) -> DeviceInfo:
        return DeviceInfo(
            self.device,
            _NAME,
            _CAPABILITY,
            self._machine.memory.total,
            _MULTIPROCESSORS,
            _DRIVER_VERSION,
            _SHARED_BYTES,
        )

    @entry("cuCtxGetId")
    def context_id(self) -> int:
        return self._machine.contexts[self.device]

    @entry("cuCtxSynchronize")
    def synchronize(self) -> None:
        self._machine.captures.refuse_waiting_for_all(self.device)

    @entry("cuMemGetInfo")
    def memory_info(self) -> tuple[int, int]:
        memory = self._machine.memory
        return memory.free_bytes(self.device), memory.total

    @entry("cuDevicePrimaryCtxRelease", when_closed=True)
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._destroy_capture_streams()
            self._machine.memory.drop_retained()

    # ---- streams and events -------------------------------------------------------------------

    @entry("cuStreamCreateWithPriority")
    def create_stream(self, *, blocking: bool, priority: int = 0) -> StreamHandle:
        streams = self._machine.streams
        stream = streams.create(self.device, is_blocking=blocking, priority=priority).handle
        self._own_streams.add(stream)
        return stream

    @entry("cuStreamDestroy", when_closed=True)
    def destroy_stream(self, stream: StreamHandle) -> None:
        self._machine.captures.leave(self._machine.streams.remove(stream))
        self._own_streams.discard(stream)

    def own_streams(self) -> tuple[StreamHandle, ...]:
        return tuple(self._own_streams)

    @entry("cuStreamSynchronize")
    def synchronize_stream(self, stream: StreamHandle) -> None:
        self._machine.captures.refuse_waiting(self._stream(stream))

    @entry("cuStreamQuery")
    def query_stream(self, stream: StreamHandle) -> bool:
        self._machine.captures.refuse_waiting(self._stream(stream))
        return True

    @entry("cuStreamGetFlags")
    def stream_is_blocking(self, stream: StreamHandle) -> bool:
        found = self._stream(stream)
        if not (is_named(stream) or stream in self._own_streams) and found.capture is not None:
            raise Refused(
                "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "another's stream, and it is capturing"
            )
        return found.is_blocking

    @entry("cuStreamGetDevice")
    def stream_device(self, stream: StreamHandle) -> int:
        return self._stream(stream).device

    @entry("cuStreamWaitEvent")
    def wait_event(
        self, stream: StreamHandle, event: EventHandle, *, external: bool = False
    ) -> None:
        found = self._machine.streams.events.find(event)
        self._machine.captures.wait(self._stream(stream), found, external=external)

    @entry("cuEventCreate")
    def create_event(self, *, timing: bool) -> EventHandle:
        return self._machine.streams.create_event(self.device, has_timing=timing).handle

    @entry("cuEventDestroy", when_closed=True)
    def destroy_event(self, event: EventHandle) -> None:
        self._machine.streams.events.remove(event)

    @entry("cuEventRecordWithFlags")
    def record_event(
        self, event: EventHandle, stream: StreamHandle, *, external: bool = False
    ) -> None:
        found = self._machine.streams.events.find(event)
        self._machine.captures.record(found, self._stream(stream), external=external)

    @entry("cuEventSynchronize")
    def synchronize_event(self, event: EventHandle) -> None:
        self._machine.captures.refuse_captured(self._machine.streams.events.find(event))

    @entry("cuEventQuery")
    def query_event(self, event: EventHandle) -> bool:
        self._machine.captures.refuse_captured(self._machine.streams.events.find(event))
        return True

    @entry("cuEventElapsedTime")
    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        found = [self._machine.streams.events.find(event) for event in (start, end)]
        for event in found:
            self._machine.captures.refuse_time_of(event)
        return elapsed_ms(*found)

    # ---- memory -------------------------------------------------------------------------------

    @entry("cuMemAlloc")
    def alloc(self, size: int) -> int:
        self._machine.captures.refuse_unsafe("an allocation")
        return self._machine.memory.allocate(self.device, size)

    @entry("cuMemFree", when_closed=True)
    def free(self, address: int) -> None:
        self._machine.captures.refuse_unsafe("a free")
        self._machine.memory.free(address, MemoryKind.DEVICE)

    @entry("cuMemHostAlloc")
    def alloc_pinned(self, size: int) -> int:
        self._machine.captures.refuse_unsafe("an allocation of pinned memory")
        return self._machine.memory.allocate_pinned(self.device, size)

    @entry("cuMemFreeHost", when_closed=True)
    def free_pinned(self, address: int) -> None:
        self._machine.captures.refuse_unsafe("a free of pinned memory")
        self._machine.memory.free(address, MemoryKind.HOST)

    @entry("cuMemcpyAsync")
    def copy(self, params: MemcpyParams, stream: StreamHandle) -> None:
        check_copy(params)
        if params.width and params.height:
            self._do(stream, Payload(params), lambda: run_copy(params))

    @entry("cuMemsetAsync")
    def fill(self, params: MemsetParams, stream: StreamHandle) -> None:
        check_fill(params)
        if params.width and params.height:
            self._do(stream, Payload(params), lambda: run_fill(params))

    @entry("cuMemcpyDtoH")
    def read(self, address: int, size: int) -> bytes:
        self._machine.captures.refuse_waiting_for_all(self.device)
        _check_span(address, size)
        return ctypes.string_at(address, size)

    @entry("cuMemcpyHtoD")
    def write(self, address: int, data: bytes) -> None:
        self._machine.captures.refuse_waiting_for_all(self.device)
        _check_span(address, len(data))
        ctypes.memmove(address, bytes(data), len(data))

    @entry("cuPointerGetAttributes")
    def allocation_of(self, address: int) -> Allocation | None:
        return self._machine.memory.find(address)

    # ---- kernels ------------------------------------------------------------------------------

    @entry("cuModuleLoadData")
    def function(self, kernel: Kernel) -> FunctionHandle:
        # no capture minds, in any mode
        functions = self._machine.functions
        function = functions.loaded(kernel, self.device) or functions.load(kernel, self.device)
        return function.handle

    @entry("cuTensorMapEncodeTiled")
    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return tensor_map.packed()

    @entry("cuFuncGetParamInfo")
    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        found = self._machine.functions.find(function)
        return found.info(self._machine.contexts[found.device])

    @entry("cuFuncGetParamInfo")
    def kernel_of(self, function: FunctionHandle) -> Kernel | None:
        operation = self._machine.functions.find(function).operation
        return operation.kernel if isinstance(operation, KernelOperation) else None

    @entry("cuLaunchKernelEx")
    def launch(
        self,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        stream: StreamHandle,
    ) -> None:
        self._launch(self._machine.functions.find(function), config, arguments, stream)

    def launch_operation(
        self, operation: Operation, arguments: Sequence[bytes], stream: StreamHandle
    ) -> None:
        """Runs ``operation`` on ``stream``, or captures it as a kernel node.

        The node, its clones and executables keep the operation alive; nothing else does.

        Raises:
            CudaError: As :meth:`launch`.
        """
        self.faults.raise_due("launch", "cuLaunchKernelEx")
        try:
            device = self._stream(stream).device
            function = self._machine.functions.wrap(operation, device)
            self._launch(function, _ONE_THREAD, arguments, stream)
        except Refused as refusal:
            raise refusal.as_error("cuLaunchKernelEx") from None

    def _launch(
        self,
        function: Function,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        stream: StreamHandle,
    ) -> None:
        check_launch(function, config, arguments)
        found = self._stream(stream)
        if function.device != found.device:
            raise Refused(
                "CUDA_ERROR_INVALID_HANDLE",
                f"the function is of device {function.device}, the stream of {found.device}",
            )
        packed = tuple(map(bytes, arguments))
        payload = Payload(KernelParams(function.handle, config, packed), function=function)
        self._do(stream, payload, lambda: function.operation.run(config, packed))

    @entry("cuLaunchHostFunc")
    def launch_host(self, callback: Callable[[], None], stream: StreamHandle) -> None:
        # unlike other work on the legacy stream, this one breaks no capture when it is refused
        self._machine.captures.refuse_implicit(self._stream(stream), invalidates=False)

        def call() -> None:
            with active.host_callback():
                callback()

        self._do(stream, Payload(HostParams(callback)), call)

    def _do(self, stream: StreamHandle, payload: Payload, run: Callable[[], None]) -> None:
        """Captures ``payload`` where the stream captures, runs it where it does not."""
        found = self._stream(stream)
        capture = self._machine.captures.target(found)
        if capture is None:
            run()
        else:
            self._machine.captures.add(capture, found, payload)

    # ---- capture ------------------------------------------------------------------------------

    @entry("cuStreamBeginCapture")
    def begin_capture(
        self, stream: StreamHandle, mode: CaptureMode, *, graph: GraphHandle | None = None
    ) -> None:
        into = None if graph is None else self._machine.graphs.find(graph)
        self._machine.captures.begin(self._stream(stream), mode, into)

    @entry("cuStreamEndCapture", when_closed=True)
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        return self._machine.captures.end(self._stream(stream)).handle

    @entry("cuStreamGetCaptureInfo")
    def capture_status(self, stream: StreamHandle) -> CaptureStatus:
        return self._machine.captures.status(self._stream(stream))

    @entry("cuStreamUpdateCaptureDependencies")
    def set_capture_frontier(self, stream: StreamHandle, nodes: Iterable[NodeHandle]) -> None:
        self._machine.captures.set_frontier(self._stream(stream), nodes)

    @entry("cuThreadExchangeStreamCaptureMode")
    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        return self._machine.captures.exchange_mode(mode)

    def recording(self, stream: StreamHandle) -> AbstractContextManager[None]:
        """Records torch's operations on CPU tensors as nodes of ``stream``'s capture."""
        if "torch" not in sys.modules:
            return nullcontext()
        from graphcore.driver.emulated.torch_recorder import Recorder

        recorder: AbstractContextManager[None] = Recorder(self, stream)
        return recorder

    def invalidate_capture(self, stream: StreamHandle) -> None:
        """Invalidates the capture ``stream`` belongs to, if any, as a forbidden call does."""
        self._machine.captures.invalidate(self._stream(stream))

    @staticmethod
    def set_conditional(handle: int, value: int) -> None:
        """As :func:`graphcore.driver.emulated.set_conditional`."""
        conditional.set_conditional(handle, value)

    def _stream(self, handle: int) -> StreamState:
        return self._machine.streams.find(handle, self.device)


def _check_span(address: int, size: int) -> None:
    if size < 0 or (size and not address):
        raise invalid(f"expected an address and a size, got {address:#x} and {size}")
