"""Kernels of the CUDA driver: loading, asking a function what it takes, launching.

Modules loaded here stay loaded for the life of the process: a graph may hold their functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.attributes import launch_attributes
from graphcore.driver.cuda.check import ask, check
from graphcore.driver.cuda.compiler import compile_kernel
from graphcore.driver.cuda.context import CudaCalls, in_context
from graphcore.driver.cuda.names import demangle
from graphcore.driver.cuda.versions import cuda
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import (
    CaptureState,
    FunctionHandle,
    FunctionInfo,
    HostParams,
    LaunchConfig,
    StreamHandle,
)

Layout = tuple[tuple[int, int], ...]

_SHARED_WITHOUT_ASKING = 48 * 1024
_MAX_SHARED = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ANY_CLUSTER = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8


class FunctionCalls(CudaCalls):
    """The part of the driver that loads, describes and launches kernels."""

    _functions: dict[Kernel, FunctionHandle]
    _layouts: dict[int, Layout]

    @in_context
    def function(self, kernel: Kernel) -> FunctionHandle:
        loaded = self._functions.get(kernel)
        if loaded is None:
            loaded = kernel.loader(self, kernel) if kernel.loader else self._load(kernel)
            self._functions[kernel] = loaded
        return loaded

    def _load(self, kernel: Kernel) -> FunctionHandle:
        image = compile_kernel(kernel, self.device_info().capability)
        module = ask(cuda.cuModuleLoadData, image)
        return FunctionHandle(int(ask(cuda.cuModuleGetFunction, module, kernel.name.encode())))

    @in_context
    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        code, name = cuda.cuFuncGetName(function)
        raw_name = name.decode(errors="replace") if not code and name else f"{function:#x}"
        code, module = cuda.cuFuncGetModule(function)
        return FunctionInfo(
            name=demangle(raw_name),
            raw_name=raw_name,
            layout=self._layout(function),
            module=0 if code else int(module),
            context=self._context.id,
        )

    def kernel_of(self, function: FunctionHandle) -> Kernel | None:
        return next((kernel for kernel, at in self._functions.items() if at == function), None)

    @in_context
    def launch(
        self,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        stream: StreamHandle,
    ) -> None:
        pointers = self._arguments(function, arguments)
        self._grant(function, config)
        launch = cuda.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = config.grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.block
        launch.sharedMemBytes = config.shared_bytes
        launch.hStream = cuda.CUstream(stream)
        attributes = launch_attributes(config)
        if attributes:
            launch.attrs, launch.numAttrs = attributes, len(attributes)
        ask(cuda.cuLaunchKernelEx, launch, function, ctypes.addressof(pointers), 0)

    @in_context
    def launch_host(self, callback: Callable[[], None], stream: StreamHandle) -> None:
        # a captured cuLaunchHostFunc would be ours to keep alive all the same, and its node could
        # not be tied to the graph before it exists: so the node is added by hand. (On the legacy
        # stream beside a blocking capture the question alone is refused, and breaks nothing.)
        status = self.capture_status(stream)
        if status.state is CaptureState.ACTIVE and status.graph is not None:
            node = self.add_node(status.graph, status.frontier, HostParams(callback))
            self.set_capture_frontier(stream, [node])
            return
        number = self._callbacks.register(callback, once=True)
        answer = cuda.cuLaunchHostFunc(stream, cuda.CUhostFn(self._callbacks.function), number)
        if answer[0]:
            self._callbacks.forget(number)
        check("cuLaunchHostFunc", answer)

    def _layout(self, function: int) -> Layout:
        """(offset, size) of each parameter; remembered, and checked at its end.

        A handle can be used again after another library unloaded its module, so the last parameter
        must still be where it was, and be the last.
        """
        known = self._layouts.get(function)
        if known is not None and self._still_ends(function, known):
            return known
        found: list[tuple[int, int]] = []
        while (parameter := _parameter(function, len(found))) is not None:
            found.append(parameter)
        self._layouts[function] = layout = tuple(found)
        return layout

    def _still_ends(self, function: int, layout: Layout) -> bool:
        count = len(layout)
        if count and _parameter(function, count - 1) != layout[-1]:
            return False
        return _parameter(function, count) is None

    def _arguments(self, function: int, arguments: Sequence[bytes]) -> Any:
        """An array of pointers into the argument bytes themselves, which it keeps alive.

        Raises:
            CudaError: INVALID_VALUE where count or sizes are not the function's; CUDA would read
                past the bytes.
        """
        expected = [size for _, size in self._layout(function)]
        listed = [bytes(data) for data in arguments]  # c_char_p takes nothing else
        sizes = [len(data) for data in listed]
        if sizes != expected:
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE",
                "cuLaunchKernelEx",
                description=f"arguments: expected sizes {expected}, got {sizes} bytes",
            )
        return (ctypes.c_char_p * len(listed))(*listed)

    def _grant(self, function: int, config: LaunchConfig) -> None:
        """Lets a function use the shared memory and cluster size it is launched with."""
        if config.shared_bytes > _SHARED_WITHOUT_ASKING:
            self._allow(function, _MAX_SHARED, config.shared_bytes)
        x, y, z = config.cluster
        if x * y * z > _PORTABLE_CLUSTER:
            self._allow(function, _ANY_CLUSTER, 1)

    def _allow(self, function: int, attribute: Any, value: int) -> None:
        # asked every time: another library may have lowered it, or reused the handle
        if ask(cuda.cuFuncGetAttribute, attribute, function) < value:
            ask(cuda.cuFuncSetAttribute, function, attribute, value)


def _parameter(function: int, index: int) -> tuple[int, int] | None:
    code, offset, size = cuda.cuFuncGetParamInfo(function, index)
    return None if code else (int(offset), int(size))
