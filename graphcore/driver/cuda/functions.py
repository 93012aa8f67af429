"""Kernels of the CUDA driver: loading, asking a function what it takes, launching.

Modules loaded here stay loaded for the life of the process: a graph may hold their functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from graphcore.driver.cuda.check import ask, check, error_of
from graphcore.driver.cuda.compiler import compile_kernel
from graphcore.driver.cuda.context import CudaCalls, in_context
from graphcore.driver.cuda.launching import CALL, LaunchMemory, Layout, Parameters
from graphcore.driver.cuda.names import demangle
from graphcore.driver.cuda.versions import cuda, result_of
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import (
    CaptureState,
    FunctionHandle,
    FunctionInfo,
    HostParams,
    LaunchConfig,
    StreamHandle,
)

_SHARED_WITHOUT_ASKING = 48 * 1024
_MAX_SHARED = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ANY_CLUSTER = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8


class FunctionCalls(CudaCalls):
    """The part of the driver that loads, describes and launches kernels."""

    _functions: dict[Kernel, FunctionHandle]
    _loaded: set[int]
    _known_parameters: dict[int, Parameters]

    @in_context
    def function(self, kernel: Kernel) -> FunctionHandle:
        loaded = self._functions.get(kernel)
        if loaded is None:
            loaded = kernel.loader(self, kernel) if kernel.loader else self._load(kernel)
            self._functions[kernel] = loaded
            # what is known may be of a function that had the handle before
            self._known_parameters.pop(loaded, None)
            self._loaded.add(loaded)
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
        parameters = self._parameters(function)
        parameters.check(arguments)
        memory = parameters.take()
        memory.fill(config, arguments, stream)
        self._grant(function, config)
        number = self._entry_points.kernel_launch(*memory.given_to(function))
        parameters.give_back(memory)
        if number:
            raise error_of(result_of(number), CALL)

    @in_context
    def bind_kernel(
        self,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        stream: StreamHandle,
    ) -> Callable[[], object]:
        """As the protocol says; the context of the function is made current where it is not."""
        parameters = self._parameters(function)
        parameters.check(arguments)
        memory = LaunchMemory(parameters.layout)
        memory.fill(config, arguments, stream)
        self._grant(function, config)
        launch = functools.partial(self._entry_points.kernel_launch, *memory.given_to(function))
        return self._context.called_in(launch)

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
        """(offset, size) of each parameter."""
        return self._parameters(function).layout

    def _parameters(self, function: int) -> Parameters:
        """The parameters of a function; remembered, and those of another's checked at their end.

        A handle can be used again after another library unloaded its module, so the last parameter
        must still be where it was, and be the last. What was loaded here stays loaded.
        """
        known = self._known_parameters.get(function)
        if known is not None and (
            function in self._loaded or self._still_ends(function, known.layout)
        ):
            return known
        found: list[tuple[int, int]] = []
        while (parameter := _parameter(function, len(found))) is not None:
            found.append(parameter)
        self._known_parameters[function] = parameters = Parameters(tuple(found))
        return parameters

    def _still_ends(self, function: int, layout: Layout) -> bool:
        count = len(layout)
        if count and _parameter(function, count - 1) != layout[-1]:
            return False
        return _parameter(function, count) is None

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
