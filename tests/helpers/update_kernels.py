"""Kernels of the update pairs: those of the driver tests, and two that share one module."""

from __future__ import annotations

from typing import Any

from helpers.kernels import (
    add_one,
    axpy,
    copy_bytes,
    fill_value,
    scale,
    set_value,
    write_cluster_size,
    write_shape,
)

from graphcore.driver import Driver, Kernel, kernel
from graphcore.driver.records import FunctionHandle

_TWO = """
extern "C" __global__ void first_of_two(float* x, int n)
{ for (int i = threadIdx.x; i < n && !blockIdx.x; i += blockDim.x) x[i] = 11.0f; }
extern "C" __global__ void second_of_two(float* x, int n)
{ for (int i = threadIdx.x; i < n && !blockIdx.x; i += blockDim.x) x[i] = 22.0f; }
"""
_modules: dict[int, Any] = {}


def _from_one_module(driver: Driver, wanted: Kernel) -> FunctionHandle:
    """Loads a function of the module that both kernels share, on a CUDA driver."""
    from cuda.bindings import driver as cuda

    from graphcore.driver.cuda.compiler import compile_kernel

    module = _modules.get(driver.context_id())
    if module is None:
        code, module = cuda.cuModuleLoadData(
            compile_kernel(wanted, driver.device_info().capability)
        )
        assert not code, code
        _modules[driver.context_id()] = module
    code, function = cuda.cuModuleGetFunction(module, wanted.name.encode())
    assert not code, code
    return FunctionHandle(int(function))


def _set(value: float) -> Any:
    def reference(_config: Any, x: Any, n: int) -> None:
        x.array(n)[:] = value

    return reference


first_of_two = kernel("first_of_two", "f32* x, i32 n", _TWO, _set(11), loader=_from_one_module)
second_of_two = kernel("second_of_two", "f32* x, i32 n", _TWO, _set(22), loader=_from_one_module)


def _nothing(_config: Any) -> None:
    return None


nothing = kernel("nothing", "", 'extern "C" __global__ void nothing() {}', _nothing)


def _take_block(_config: Any, block: bytes, out: Any) -> None:
    out.array(24)[:] = list(block)


take_block = kernel(
    "take_block",
    "bytes:24 block, u8* out",
    "struct Block { unsigned char bytes[24]; };"
    'extern "C" __global__ void take_block(Block block, unsigned char* out) '
    "{ if (threadIdx.x < 24 && !blockIdx.x) out[threadIdx.x] = block.bytes[threadIdx.x]; }",
    _take_block,
)

KERNELS: dict[str, Kernel] = {
    each.name: each
    for each in (
        add_one,
        axpy,
        copy_bytes,
        fill_value,
        first_of_two,
        nothing,
        scale,
        second_of_two,
        set_value,
        take_block,
        write_cluster_size,
        write_shape,
    )
}
