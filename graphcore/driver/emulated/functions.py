"""The functions kernels run: operations with a handle, a device and a parameter layout."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.emulated.handles import draw_handle
from graphcore.driver.emulated.operation import Operation
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import Dim3, FunctionHandle, FunctionInfo, LaunchConfig

_MAX_THREADS = 1024
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_SHARED_BYTES = 227 * 1024
_MAX_CLUSTER = 8

_modules = itertools.count(1)


class KernelOperation:
    """A :class:`graphcore.driver.Kernel` as an operation: its Python reference over NumPy views."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.layout = layout_of([parameter.size for parameter in kernel.parameters])

    def run(self, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
        self.kernel.run_reference(config, arguments)


def layout_of(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(offset, size) of parameters of these sizes, each at a multiple of its own size up to 8."""
    layout = []
    end = 0
    for size in sizes:
        alignment = next(a for a in (8, 4, 2, 1) if size % a == 0)
        start = -(-end // alignment) * alignment
        layout.append((start, size))
        end = start + size
    return tuple(layout)


class Function:
    """An operation with a handle on a device; nodes hold it, and it holds the operation."""

    def __init__(self, operation: Operation, device: int, module: int) -> None:
        self.handle = FunctionHandle(draw_handle())
        self.operation = operation
        self.device = device
        self.module = module

    def info(self, context: int) -> FunctionInfo:
        name = self.operation.name
        return FunctionInfo(name, name, self.operation.layout, self.module, context)


class Functions:
    """The functions of a machine: loaded kernels for good, recorded operations while held."""

    def __init__(self) -> None:
        self._by_handle: weakref.WeakValueDictionary[int, Function] = weakref.WeakValueDictionary()
        self._loaded: dict[tuple[Kernel, int], Function] = {}

    def loaded(self, kernel: Kernel, device: int) -> Function | None:
        return self._loaded.get((kernel, device))

    def load(self, kernel: Kernel, device: int) -> Function:
        function = self.wrap(KernelOperation(kernel), device, next(_modules))
        self._loaded[kernel, device] = function
        return function

    def wrap(self, operation: Operation, device: int, module: int = 0) -> Function:
        """A function that lives as long as somebody holds it."""
        function = Function(operation, device, module)
        self._by_handle[function.handle] = function
        return function

    def find(self, handle: int) -> Function:
        function = self._by_handle.get(handle)
        if function is None:
            raise Refused("CUDA_ERROR_INVALID_HANDLE", f"no function has handle {handle:#x}")
        return function


def check_launch(function: Function, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
    """Refuses a launch shape the device could not run, or arguments that do not fit."""
    _check_shape("grid", config.grid, _MAX_GRID)
    _check_shape("block", config.block, _MAX_BLOCK)
    if _product(config.block) > _MAX_THREADS:
        raise invalid(f"block: expected at most {_MAX_THREADS} threads, got {config.block}")
    if not 0 <= config.shared_bytes <= _MAX_SHARED_BYTES:
        raise invalid(f"shared_bytes: expected 0 to {_MAX_SHARED_BYTES}, got {config.shared_bytes}")
    _check_cluster(config)
    sizes = [size for _, size in function.operation.layout]
    given = [len(argument) for argument in arguments]
    if sizes != given:
        raise invalid(
            f"arguments of {function.operation.name}: expected sizes {sizes}, got {given}"
        )


def _check_shape(name: str, shape: Dim3, limit: Dim3) -> None:
    if any(not 1 <= size <= most for size, most in zip(shape, limit, strict=True)):
        raise invalid(f"{name}: expected 1 to {limit} each, got {shape}")


def _check_cluster(config: LaunchConfig) -> None:
    divides = all(
        size >= 1 and blocks % size == 0
        for size, blocks in zip(config.cluster, config.grid, strict=True)
    )
    if not divides or _product(config.cluster) > _MAX_CLUSTER:
        raise Refused(
            "CUDA_ERROR_INVALID_CLUSTER_SIZE",
            f"cluster: expected at most {_MAX_CLUSTER} blocks that divide the grid "
            f"{config.grid}, got {config.cluster}",
        )


def _product(shape: Dim3) -> int:
    return shape[0] * shape[1] * shape[2]
