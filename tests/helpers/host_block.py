"""Runs the real source of kernels whose threads work together, on the host, without a device.

The C++ compiler compiles the source; a few lines stand in for what CUDA C++ adds. Each thread of a
block is a coroutine that runs up to its next barrier or warp operation, in one order or in the
other: a result that depends on the order shows as a difference. A block whose threads do not meet
at one barrier ends in an error.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from graphcore.driver import Kernel
from graphcore.driver.records import LaunchConfig

_BEFORE = r"""
#include <ucontext.h>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
struct Dim3 { unsigned x = 0, y = 0, z = 0; };
static Dim3 blockIdx, threadIdx, gridDim, blockDim;
enum Wait { RUNS, FOR_BLOCK, FOR_WARP, DONE };
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(65536);
    Wait wait = RUNS;
    int value[2] = {0, 0};
    unsigned turn = 0;
};
static ucontext_t scheduler;
static std::vector<Thread> threads;
static void (*body)(void*);
static void* body_argument;

static void wait_for(Wait wait) {
    Thread& mine = threads[threadIdx.x];
    mine.wait = wait;
    swapcontext(&mine.context, &scheduler);
}
// publishes a value to the warp or block; told by turns, so that the next one cannot overtake it
static unsigned publish(int value, Wait wait) {
    Thread& mine = threads[threadIdx.x];
    unsigned turn = mine.turn++ & 1;
    mine.value[turn] = value;
    wait_for(wait);
    return turn;
}
static void __syncthreads() { wait_for(FOR_BLOCK); }
static void __syncwarp() { wait_for(FOR_WARP); }
static int __syncthreads_or(int value) {
    unsigned turn = publish(value, FOR_BLOCK);
    int any = 0;
    for (Thread& each : threads) any |= each.value[turn] != 0;
    return any;
}
static Thread& lane(unsigned index) { return threads[threadIdx.x / 32 * 32 + index]; }
static int __shfl_up_sync(unsigned, int value, unsigned distance) {
    unsigned turn = publish(value, FOR_WARP), mine = threadIdx.x % 32;
    return mine >= distance ? lane(mine - distance).value[turn] : value;
}
static unsigned __match_any_sync(unsigned, int value) {
    unsigned turn = publish(value, FOR_WARP), peers = 0;
    for (unsigned each = 0; each < 32; ++each)
        peers |= unsigned(lane(each).value[turn] == value) << each;
    return peers;
}
static unsigned __ballot_sync(unsigned, int value) {
    unsigned turn = publish(value != 0, FOR_WARP), set = 0;
    for (unsigned each = 0; each < 32; ++each) set |= unsigned(lane(each).value[turn]) << each;
    return set;
}
static int __popc(unsigned value) { return __builtin_popcount(value); }
static int atomicAdd(int* place, int value) { int old = *place; *place += value; return old; }
static int atomicMin(int* place, int value) {
    int old = *place;
    if (value < old) *place = value;
    return old;
}
"""

_AFTER = r"""
static long long shared_memory[8192];
static void thread_body() {
    body(body_argument);
    threads[threadIdx.x].wait = DONE;
    swapcontext(&threads[threadIdx.x].context, &scheduler);
}
static bool all_wait(unsigned begin, unsigned end, Wait wait) {
    for (unsigned index = begin; index < end; ++index)
        if (threads[index].wait != wait) return false;
    return true;
}
static bool release(unsigned begin, unsigned end, Wait wait) {
    if (!all_wait(begin, end, wait)) return false;
    for (unsigned index = begin; index < end; ++index) threads[index].wait = RUNS;
    return true;
}
static bool run_block(unsigned count, bool backwards) {
    threads.resize(count);
    memset(shared_memory, 0xa5, sizeof shared_memory);
    for (Thread& each : threads) {
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.data();
        each.context.uc_stack.ss_size = each.stack.size();
        each.context.uc_link = nullptr;
        each.wait = RUNS;
        each.turn = 0;
        makecontext(&each.context, thread_body, 0);
    }
    for (;;) {
        bool progress = false;
        for (unsigned step = 0; step < count; ++step) {
            threadIdx.x = backwards ? count - 1 - step : step;
            if (threads[threadIdx.x].wait != RUNS) continue;
            progress = true;
            swapcontext(&scheduler, &threads[threadIdx.x].context);
        }
        if (all_wait(0, count, DONE)) return true;
        progress |= release(0, count, FOR_BLOCK);
        for (unsigned warp = 0; warp < count; warp += 32)
            progress |= release(warp, warp + 32, FOR_WARP);
        if (!progress) return false;
    }
}
template <typename... P, size_t... I>
static void call(void (*kernel)(P...), const char* const* arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<P>*)arguments[I]...);
}
template <typename... P>
static bool launch(void (*kernel)(P...), const char* const* arguments, unsigned blocks,
                   unsigned first, unsigned last, unsigned count, bool backwards) {
    auto run = [=] { call(kernel, arguments, std::index_sequence_for<P...>()); };
    body = [](void* argument) { (*(decltype(run)*)argument)(); };
    body_argument = &run;
    gridDim.x = blocks;
    blockDim.x = count;
    for (unsigned step = 0; step < last - first; ++step) {
        blockIdx.x = backwards ? last - 1 - step : first + step;
        if (!run_block(count, backwards)) return false;
    }
    return true;
}
"""

_SHARED = "extern __shared__ i64 shared_words[];"


class HostBlocks:
    """Kernels of one source, compiled into ``folder``; skips the test without a compiler.

    ``stand_ins`` is C++ for what only this source uses of CUDA.
    """

    def __init__(
        self, source: str, kernels: Sequence[Kernel], folder: Path, *, stand_ins: str = ""
    ) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
        entries = "".join(
            f'extern "C" bool run_{each.name}(const char* const* arguments, unsigned blocks, '
            "unsigned first, unsigned last, unsigned count, bool backwards) { "
            f"return launch({each.name}, arguments, blocks, first, last, count, backwards); }}\n"
            for each in kernels
        )
        text, library = folder / "host_block.cpp", folder / "host_block.so"
        body = source.replace(_SHARED, "extern i64 shared_words[];")
        after = _AFTER.replace("static long long shared_memory", "long long shared_words")
        after = after.replace("shared_memory", "shared_words")
        text.write_text(_BEFORE + stand_ins + body + after + entries, encoding="utf-8")
        flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(text), "-o", str(library)], check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        kernel: Kernel,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        *,
        threads: int | None = None,
        blocks: int | None = None,
        only: range | None = None,
        backwards: bool = False,
    ) -> None:
        """Runs a launch, or ``only`` some blocks of it.

        ``threads`` and ``blocks`` are in place of those of ``config``.
        """
        # aligned as the kernel's own parameters are
        held = [(ctypes.c_uint64 * (len(each) // 8 + 1))() for each in arguments]
        for place, data in zip(held, arguments, strict=True):
            ctypes.memmove(place, data, len(data))
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        run = getattr(self._library, f"run_{kernel.name}")
        run.restype = ctypes.c_bool
        grid, block = blocks or config.grid[0], threads or config.block[0]
        chosen = range(grid) if only is None else only
        ended = run(pointers, grid, chosen.start, chosen.stop, block, backwards)
        assert ended, "threads wait for each other"
