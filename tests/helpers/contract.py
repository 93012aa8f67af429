"""What the contract tests share: a bench that owns what a test makes, and words for checks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy
import pytest
from helpers.kernels import EVERY_KERNEL, ONE_BLOCK

from graphcore.driver import CaptureMode, Driver, Event, Kernel, Stream
from graphcore.driver.records import (
    ConditionalHandle,
    ConditionalParams,
    CopyOperand,
    ExecHandle,
    GraphHandle,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeHandle,
    NodeParams,
)
from graphcore.errors import CudaError

Function = TypeVar("Function", bound=Callable[..., object])


def covers(*methods: str) -> Callable[[Function], Function]:
    """Says which methods of ``Driver`` a test proves something of; read by the coverage test."""

    def mark(function: Function) -> Function:
        return function

    assert methods
    return mark


@contextmanager
def refused(code: str) -> Iterator[None]:
    """Expects a CudaError by the name of its code."""
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.code == f"CUDA_ERROR_{code}", caught.value
    assert f"CUDA_ERROR_{code}" in str(caught.value)
    assert caught.value.number > 0


def in_thread(action: Callable[[], Any]) -> Any:
    """Runs ``action`` on another thread; returns its result or raises its error here."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, action()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    succeeded, value = outcome[0]
    if succeeded:
        return value
    raise value


class Bench:
    """A driver, a stream, and everything a test makes, given back at its end."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        for kernel in EVERY_KERNEL:
            driver.function(kernel)
        self.stream = driver.stream()
        self.streams = [self.stream]
        self.events: list[Event] = []
        self._executables: list[ExecHandle] = []
        self._graphs: list[GraphHandle] = []
        self._allocations: list[int] = []
        self._pinned: list[int] = []

    def close(self) -> None:
        # a test that failed inside a capture must not take the next ones with it
        for stream in self.streams:
            with suppress(CudaError):
                self.driver.end_capture(stream.handle)
        self.driver.synchronize()
        for executable in self._executables:
            self.driver.destroy_exec(executable)
        for graph in self._graphs:
            self.driver.destroy_graph(graph)
        for event in self.events:
            event.close()
        for stream in self.streams:
            stream.close()
        for address in self._allocations:
            self.driver.free(address)
        for address in self._pinned:
            self.driver.free_pinned(address)

    # ---- things ------------------------------------------------------------------------------

    def new_stream(self, *, blocking: bool = False) -> Stream:
        self.streams.append(self.driver.stream(blocking=blocking))
        return self.streams[-1]

    def new_event(self, *, timing: bool = False) -> Event:
        self.events.append(self.driver.event(timing=timing))
        return self.events[-1]

    def new_graph(self) -> GraphHandle:
        return self.keep_graph(self.driver.create_graph())

    def keep_graph(self, graph: GraphHandle) -> GraphHandle:
        self._graphs.append(graph)
        return graph

    def instantiate(self, graph: GraphHandle, **options: bool) -> ExecHandle:
        self._executables.append(self.driver.instantiate(graph, **options))
        return self._executables[-1]

    def alloc(self, size: int) -> int:
        """Device memory of ``size`` bytes, all bits set: NaN in every float type."""
        address = self.driver.alloc(size)
        self._allocations.append(address)
        self.driver.write(address, b"\xff" * size)
        return address

    def pin(self, data: bytes) -> int:
        """Page-locked host memory holding ``data``."""
        address = self.driver.alloc_pinned(len(data))
        self._pinned.append(address)
        ctypes.memmove(address, data, len(data))
        return address

    def put(self, values: Any, dtype: str = "float32") -> int:
        """Device memory holding ``values``."""
        data = numpy.asarray(values, dtype).tobytes()
        address = self.alloc(len(data))
        self.driver.write(address, data)
        return address

    def get(self, address: int, count: int, dtype: str = "float32") -> list[Any]:
        """``count`` values of device memory, after all work."""
        data = self.driver.read(address, count * numpy.dtype(dtype).itemsize)
        values: list[Any] = numpy.frombuffer(data, dtype).tolist()
        return values

    def poison(self, address: int, size: int) -> None:
        self.driver.write(address, b"\xff" * size)

    # ---- work --------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        *arguments: object,
        stream: Stream | None = None,
        config: LaunchConfig = ONE_BLOCK,
    ) -> None:
        handle = (stream or self.stream).handle
        function = self.driver.function(kernel)
        self.driver.launch(function, config, kernel.pack(*arguments), handle)

    def kernel_params(
        self, kernel: Kernel, *arguments: object, config: LaunchConfig = ONE_BLOCK
    ) -> KernelParams:
        return KernelParams(self.driver.function(kernel), config, kernel.pack(*arguments))

    def add(
        self, graph: GraphHandle, params: NodeParams, after: Iterable[NodeHandle] = ()
    ) -> NodeHandle:
        return self.driver.add_node(graph, list(after), params)

    def add_kernel(
        self,
        graph: GraphHandle,
        kernel: Kernel,
        *arguments: object,
        after: Iterable[NodeHandle] = (),
        config: LaunchConfig = ONE_BLOCK,
    ) -> NodeHandle:
        return self.add(graph, self.kernel_params(kernel, *arguments, config=config), after)

    def add_conditional(
        self, graph: GraphHandle, form: str, size: int = 1, default: int = 0
    ) -> tuple[ConditionalHandle, NodeHandle, tuple[GraphHandle, ...]]:
        """A conditional node: its handle, its node, its bodies."""
        handle = self.driver.create_conditional(graph, default)
        node = self.add(graph, ConditionalParams(handle, form, size))
        params = self.driver.node_params(node)
        assert isinstance(params, ConditionalParams)
        return handle, node, params.bodies

    @contextmanager
    def capturing(
        self,
        stream: Stream | None = None,
        mode: CaptureMode = "thread_local",
        graph: GraphHandle | None = None,
    ) -> Iterator[list[GraphHandle]]:
        """Captures the block; the list holds the graph afterwards (the bench's, unless given)."""
        handle = (stream or self.stream).handle
        captured: list[GraphHandle] = []
        self.driver.begin_capture(handle, mode, graph=graph)
        yield captured
        captured.append(self.driver.end_capture(handle))
        if graph is None:
            self.keep_graph(captured[0])

    def run(self, graph: GraphHandle, times: int = 1) -> ExecHandle:
        """Instantiates ``graph``, launches it ``times`` times and waits."""
        executable = self.instantiate(graph)
        self.replay(executable, times)
        return executable

    def replay(self, executable: ExecHandle, times: int = 1) -> None:
        for _ in range(times):
            self.driver.launch_graph(executable, self.stream.handle)
        self.driver.synchronize_stream(self.stream.handle)


def copy_1d(
    dst: int,
    src: int,
    width: int,
    dst_memory: MemoryKind = MemoryKind.DEVICE,
    src_memory: MemoryKind = MemoryKind.DEVICE,
) -> MemcpyParams:
    return MemcpyParams(CopyOperand(dst, dst_memory), CopyOperand(src, src_memory), width)


def copy_2d(
    dst: int, src: int, width: int, height: int, dst_pitch: int, src_pitch: int
) -> MemcpyParams:
    return MemcpyParams(
        CopyOperand(dst, pitch=dst_pitch), CopyOperand(src, pitch=src_pitch), width, height
    )


def fill_1d(address: int, value: int, count: int, element_size: int = 4) -> MemsetParams:
    return MemsetParams(address, value, element_size, count)
