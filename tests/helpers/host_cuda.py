"""Runs the real source of the strided_copy kernels on the host, without a device.

Threads are coroutines (host_block.py), since boxes are loaded by one thread and stored by another.
"""

from __future__ import annotations

from pathlib import Path

from graphcore_kernels._catalogue import copies
from graphcore_kernels._module import read_source
from graphcore_kernels.copy_plan import CopyLayout
from helpers.host_block import HostBlocks

from graphcore.driver.records import LaunchConfig

THREADS = 64

KERNELS = {entry.kernel.name: entry.kernel for entry in copies()}
"""Every kernel that a copy may take."""

_STAND_INS = r"""
#undef __shared__
#define __shared__ static
#define __launch_bounds__(...)
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return ((unsigned long long)high << 32 | low) >> (shift & 31);
}
static unsigned __shfl_down_sync(unsigned, unsigned value, unsigned distance) {
    unsigned turn = publish(int(value), FOR_WARP), mine = threadIdx.x % 32;
    return mine + distance < 32 ? lane(mine + distance).value[turn] : value;
}
template <typename Number>
static Number min(Number a, Number b) { return a < b ? a : b; }
template <typename Number>
static Number max(Number a, Number b) { return a > b ? a : b; }
"""


FILES = ("strided_copy.cu", "strided_copy_rows.cu", "strided_copy_boxes.cu")


def whole_source() -> str:
    """The source with every kernel that a copy may take, each of which is compiled alone in use."""
    made = (each.source.splitlines()[-1] for each in KERNELS.values())
    return "\n".join((*map(read_source, FILES), *made, ""))


class HostKernels:
    """The kernels, compiled for the host into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._blocks = HostBlocks(
            whole_source(), tuple(KERNELS.values()), folder, stand_ins=_STAND_INS
        )

    def run(
        self,
        layout: CopyLayout,
        dst: int,
        src: int,
        *,
        grid: int = 1,
        only: range | None = None,
        backwards: bool = False,
    ) -> None:
        """Launches what ``layout`` says on host addresses, or ``only`` some blocks of the grid."""
        kernel = KERNELS[layout.kernel_name]
        config = LaunchConfig((grid, 1, 1), (THREADS, 1, 1))
        arguments = kernel.pack(*layout.arguments(dst, src))
        self._blocks.launch(kernel, config, arguments, only=only, backwards=backwards)
