"""Small kernels of the driver tests: CUDA C++ without headers, and the same in NumPy.

Every kernel strides over its data, so that any grid and block give the same result.
"""

from __future__ import annotations

import numpy

from graphcore.driver import Pointer, kernel
from graphcore.driver.records import LaunchConfig

ONE_BLOCK = LaunchConfig((1, 1, 1), (32, 1, 1))

_STRIDE = "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)"


def _add_one(_config: LaunchConfig, x: Pointer, n: int) -> None:
    x.array(n)[:] += numpy.float32(1)


add_one = kernel(
    "add_one",
    "f32* x, i32 n",
    f'extern "C" __global__ void add_one(float* x, int n) {{ {_STRIDE} x[i] += 1.0f; }}',
    _add_one,
)


def _scale(_config: LaunchConfig, x: Pointer, factor: float, n: int) -> None:
    x.array(n)[:] *= numpy.float32(factor)


scale = kernel(
    "scale",
    "f32* x, f32 factor, i32 n",
    'extern "C" __global__ void scale(float* x, float factor, int n) '
    f"{{ {_STRIDE} x[i] *= factor; }}",
    _scale,
)


def _axpy(_config: LaunchConfig, a: float, x: Pointer, y: Pointer, n: int) -> None:
    y.array(n)[:] += numpy.float32(a) * x.array(n)


axpy = kernel(
    "axpy",
    "f32 a, const f32* x, f32* y, i32 n",
    'extern "C" __global__ void axpy(float a, const float* x, float* y, int n) '
    f"{{ {_STRIDE} y[i] += a * x[i]; }}",
    _axpy,
)


def _fill_value(_config: LaunchConfig, x: Pointer, value: float, n: int) -> None:
    x.array(n)[:] = value


fill_value = kernel(
    "fill_value",
    "f32* x, f32 value, i32 n",
    'extern "C" __global__ void fill_value(float* x, float value, int n) '
    f"{{ {_STRIDE} x[i] = value; }}",
    _fill_value,
)


def _copy_bytes(_config: LaunchConfig, dst: Pointer, src: Pointer, n: int) -> None:
    dst.array(n)[:] = src.array(n)


copy_bytes = kernel(
    "copy_bytes",
    "u8* dst, const u8* src, i32 n",
    'extern "C" __global__ void copy_bytes(unsigned char* dst, const unsigned char* src, int n) '
    f"{{ {_STRIDE} dst[i] = src[i]; }}",
    _copy_bytes,
)


def _write_shape(config: LaunchConfig, out: Pointer) -> None:
    out.array(7)[:] = (*config.grid, *config.block, config.shared_bytes)


write_shape = kernel(
    "write_shape",
    "i32* out",
    """
    extern "C" __global__ void write_shape(int* out) {
        if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x + threadIdx.y + threadIdx.z) return;
        unsigned shared;
        asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared));
        out[0] = gridDim.x; out[1] = gridDim.y; out[2] = gridDim.z;
        out[3] = blockDim.x; out[4] = blockDim.y; out[5] = blockDim.z;
        out[6] = shared;
    }
    """,
    _write_shape,
)


def _write_cluster_size(config: LaunchConfig, out: Pointer) -> None:
    out.array(1)[0] = config.cluster[0]


write_cluster_size = kernel(
    "write_cluster_size",
    "i32* out",
    """
    extern "C" __global__ void write_cluster_size(int* out) {
        unsigned size;
        asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
        if (blockIdx.x == 0 && threadIdx.x == 0) *out = size;
    }
    """,
    _write_cluster_size,
)


def _set_from(handle: int, value: int) -> None:
    from graphcore.driver.emulated import set_conditional

    set_conditional(handle, value)


def _set_value(_config: LaunchConfig, handle: int, value: int) -> None:
    _set_from(handle, value)


_SETTER = (
    'extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);'
)

set_value = kernel(
    "set_value",
    "u64 handle, u32 value",
    _SETTER + 'extern "C" __global__ void set_value(unsigned long long handle, unsigned value) '
    "{ cudaGraphSetConditional(handle, value); }",
    _set_value,
)


def _count_down(_config: LaunchConfig, handle: int, counter: Pointer) -> None:
    left = counter.array(1)
    left[0] -= 1
    _set_from(handle, int(left[0] > 0))


count_down = kernel(
    "count_down",
    "u64 handle, i32* counter",
    _SETTER + 'extern "C" __global__ void count_down(unsigned long long handle, int* counter) '
    "{ if (threadIdx.x + blockIdx.x == 0) { *counter -= 1; "
    "cudaGraphSetConditional(handle, *counter > 0); } }",
    _count_down,
)

EVERY_KERNEL = (
    add_one,
    scale,
    axpy,
    fill_value,
    copy_bytes,
    write_shape,
    write_cluster_size,
    set_value,
    count_down,
)
