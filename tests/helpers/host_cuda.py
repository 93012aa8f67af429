"""Runs the real source of the strided_copy kernels on the host: compiled by the C++ compiler.

A few lines stand in for what CUDA C++ adds; threads run one after another, which these kernels,
without shared memory, cannot tell. So the index arithmetic of the very source is tested without
a device.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from graphcore_kernels._module import read_source
from graphcore_kernels.copy_plan import CopyForm, CopyLayout

THREADS = 256

_BEFORE = r"""
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __restrict__
struct Dim3 { unsigned x = 0, y = 0, z = 0; };
static Dim3 blockIdx, threadIdx, gridDim, blockDim;
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
"""

_AFTER = r"""
struct Blocks { u32 grid, first, last; };

template <typename Kernel, typename... Arguments>
static void run(Blocks blocks, Kernel kernel, const Arguments&... arguments) {
    gridDim.x = blocks.grid;
    blockDim.x = THREADS;
    for (blockIdx.x = blocks.first; blockIdx.x < blocks.last; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) kernel(arguments...);
}

extern "C" void run_contiguous(
    void* kernel, Blocks blocks, void* dst, const void* src, u64 head, u64 count, u64 tail) {
    using Kernel = void (*)(void*, const void*, u64, u64, u64);
    run(blocks, (Kernel)kernel, dst, src, head, count, tail);
}

#define RUN(BITS, INDEX, OFFSET)                                                              \
    extern "C" void run_shared_##BITS(                                                        \
        void* kernel, Blocks blocks, void* dst, const void* src, u64 count, const void* axes, \
        u32 rank) {                                                                           \
        using Axes = SharedAxes<INDEX, OFFSET>;                                               \
        using Kernel = void (*)(void*, const void*, u64, const Axes, u32);                    \
        run(blocks, (Kernel)kernel, dst, src, count, *(const Axes*)axes, rank);               \
    }                                                                                         \
    extern "C" void run_split_##BITS(                                                         \
        void* kernel, Blocks blocks, void* dst, const void* src, u64 count, const void* axes, \
        u32 dst_rank, u32 src_rank) {                                                         \
        using Axes = SplitAxes<INDEX, OFFSET>;                                                \
        using Kernel = void (*)(void*, const void*, u64, const Axes, u32, u32);               \
        run(blocks, (Kernel)kernel, dst, src, count, *(const Axes*)axes, dst_rank, src_rank); \
    }

RUN(32, u32, i32)
RUN(64, u64, i64)
"""


class _Blocks(ctypes.Structure):
    _fields_ = (("grid", ctypes.c_uint32), ("first", ctypes.c_uint32), ("last", ctypes.c_uint32))


class HostKernels:
    """The kernels, compiled for the host with ``compiler`` into ``folder``."""

    def __init__(self, compiler: str, folder: Path) -> None:
        source, library = folder / "strided_copy_host.cpp", folder / "strided_copy_host.so"
        source.write_text(_BEFORE + read_source("strided_copy.cu") + _AFTER)
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))

    def run(
        self,
        layout: CopyLayout,
        dst: int,
        src: int,
        *,
        grid: int = 1,
        blocks: range | None = None,
    ) -> None:
        """Launches what ``layout`` says on host addresses, or only some ``blocks`` of the grid."""
        kernel = ctypes.cast(getattr(self._library, layout.kernel_name), ctypes.c_void_p)
        chosen = blocks or range(grid)
        where = _Blocks(grid, chosen.start, chosen.stop)
        pointers, rest = layout.arguments(dst, src)[:2], layout.arguments(dst, src)[2:]
        addresses = [ctypes.c_void_p(pointer) for pointer in pointers]
        if layout.form is CopyForm.CONTIGUOUS:
            sizes = [ctypes.c_uint64(value) for value in rest]
            self._library.run_contiguous(kernel, where, *addresses, *sizes)
            return
        count, axes, *ranks = rest
        launch = getattr(self._library, f"run_{layout.form.value}_{layout.index_bits}")
        ranks = [ctypes.c_uint32(rank) for rank in ranks]
        launch(kernel, where, *addresses, ctypes.c_uint64(count), ctypes.c_char_p(axes), *ranks)
