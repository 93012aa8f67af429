"""The floor of whatever must read memory: a kernel that reads it once and keeps nothing but a sum.

The sum (exclusive or of all words) can be checked, so that no compiler and no mistake leaves reads
out. How many blocks read fastest is tried out in the run that uses it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import torch

from graphcore.bench.replays import Replayed, replayed, torch_device
from graphcore.driver import Driver, Pointer, Stream, kernel
from graphcore.driver.records import LaunchConfig
from graphcore.errors import GraphcoreError

_BYTES = 1 << 31
_SMALL_BYTES = 1 << 14
_CHUNK = 16
_LAUNCHES = ((2, 1024), (4, 512), (8, 256), (16, 256), (32, 256))
"""(blocks a multiprocessor, threads a block)."""
_TRIES = 4
_BITS = 1 << 31


def _sum_words(config: LaunchConfig, data: Pointer, chunks: int, out: Pointer) -> None:
    out.array(1)[0] ^= numpy.bitwise_xor.reduce(data.array(chunks * 4))


_SOURCE = """
struct alignas(16) Chunk { unsigned int a, b, c, d; };

__device__ Chunk read_once(const Chunk* at) {
    Chunk found;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.a), "=r"(found.b), "=r"(found.c), "=r"(found.d) : "l"(at));
    return found;
}

extern "C" __global__ void graphcore_bench_read(
    const unsigned int* data, unsigned long long chunks, unsigned int* out) {
    const Chunk* from = reinterpret_cast<const Chunk*>(data);
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int sum = 0;
    for (; at + 7 * step < chunks; at += 8 * step) {
        Chunk found[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) found[i] = read_once(from + at + i * step);
        #pragma unroll
        for (int i = 0; i < 8; ++i) sum ^= found[i].a ^ found[i].b ^ found[i].c ^ found[i].d;
    }
    for (; at < chunks; at += step) {
        Chunk found = read_once(from + at);
        sum ^= found.a ^ found.b ^ found.c ^ found.d;
    }
    for (int lane = 16; lane; lane /= 2) sum ^= __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
    __shared__ unsigned int sums[32];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned int warp = 1; warp < blockDim.x / 32; ++warp) sum ^= sums[warp];
        atomicXor(out, sum);
    }
}
"""

READ = kernel("graphcore_bench_read", "const u32* data, u64 chunks, u32* out", _SOURCE, _sum_words)


class StreamingRead:
    """Reads of random data far larger than any cache, by the fastest launch of a few.

    Args:
        driver: Where.
        stream: A blocking stream of ours.

    Raises:
        GraphcoreError: The kernel did not read every word.
    """

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self.nbytes = _SMALL_BYTES if driver.is_emulated else _BYTES
        device = torch_device(driver)
        words = torch.randint(-_BITS, _BITS, (self.nbytes // 4,), dtype=torch.int32, device=device)
        self._data, self._sum = words, torch.zeros(1, dtype=torch.int32, device=device)
        self._driver = driver
        self._function = driver.function(READ)
        self._check(stream)
        tried = [self._replayed(stream, *launch) for launch in _LAUNCHES]
        seconds = [min(each.arm().burst(_TRIES) for _ in range(2)) / _TRIES for each in tried]
        self.bytes_a_second = self.nbytes / min(seconds)
        self.replayed = tried[seconds.index(min(seconds))]

    def _replayed(self, stream: Stream, blocks: int, threads: int) -> Replayed:
        call = partial(self._launch, blocks, threads)
        return replayed("streaming read", self._driver, stream, [call])

    def _launch(self, blocks: int, threads: int, stream: Stream) -> None:
        grid = blocks * self._driver.device_info().multiprocessors
        config = LaunchConfig((grid, 1, 1), (threads, 1, 1))
        arguments = READ.pack(self._data.data_ptr(), self.nbytes // _CHUNK, self._sum.data_ptr())
        self._driver.launch(self._function, config, arguments, stream.handle)

    def _check(self, stream: Stream) -> None:
        self._driver.synchronize()
        self._launch(*_LAUNCHES[0], stream)
        self._driver.synchronize()
        expected, found = _xor(self._data), int(self._sum)
        if found != expected:
            raise GraphcoreError(
                f"bench: streaming read: expected the sum {expected:#x} of all words, "
                f"got {found:#x}"
            )


def _xor(words: torch.Tensor) -> int:
    """Exclusive or of all words, a power of two of them, by halves."""
    rest: Any = words
    while len(rest) > 1:
        half = len(rest) // 2
        rest = rest[:half] ^ rest[half:]
    return int(rest)
