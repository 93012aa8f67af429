"""A kernel that keeps the device busy for a while, so that a launch is still running when asked."""

from __future__ import annotations

from graphcore.driver import Pointer, kernel
from graphcore.driver.records import LaunchConfig

MILLISECOND = 1_000_000


def _spin(_config: LaunchConfig, x: Pointer, value: float, _nanoseconds: int) -> None:
    x.array(1)[:] = value


spin = kernel(
    "spin",
    "f32* x, f32 value, u64 nanoseconds",
    """
    extern "C" __global__ void spin(float* x, float value, unsigned long long nanoseconds) {
        if (blockIdx.x + threadIdx.x) return;
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); }
        while (now - start < nanoseconds);
        *x = value;
    }
    """,
    _spin,
)
