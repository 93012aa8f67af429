"""The kernels around a decode step that runs in a WHILE node: the first test, and each step's end.

They are launched by a graph: :data:`begin_decode_loop` before the WHILE node, and
:data:`end_decode_step` behind the step in its body, each as one block of :func:`loop_config`.
``ring`` and ``control`` are addresses of pinned host memory, which no signature tells from device
memory; so they go as numbers.

* ``finished`` bool ``[rows]``, ``token`` int64 ``[rows]``, ``progress`` int64 ``[2]`` (tokens made,
  tokens allowed): device memory.
* ``ring`` int64 ``[tokens, rows]``: the token of step k goes to row k. It never wraps: it must hold
  as many tokens as are allowed.
* ``control`` int64 ``[CONTROL_WORDS]``: budget and stop flag, which the host writes before (the
  flag: at any time), then the number of tokens in the ring, and whether the loop is over.
"""

from __future__ import annotations

from graphcore.driver import kernel
from graphcore.driver.records import LaunchConfig
from graphcore_kernels._module import read_source
from graphcore_kernels.decode_loop_reference import (
    BUDGET,
    CONTROL_WORDS,
    OVER,
    PUBLISHED,
    STOP,
    run_begin,
    run_step_end,
)

__all__ = [
    "BUDGET",
    "CONTROL_WORDS",
    "OVER",
    "PUBLISHED",
    "STOP",
    "begin_decode_loop",
    "end_decode_step",
    "loop_config",
]

_MOST_THREADS = 256
_WARP = 32

# no loader through CuPy: it links nothing, and the driver's own route is the one that knows
# cudaGraphSetConditional
begin_decode_loop = kernel(
    "begin_decode_loop",
    "u64 handle, const bool* finished, i64* progress, u64 control, u32 rows",
    read_source("decode_loop.cu"),
    run_begin,
)
end_decode_step = kernel(
    "end_decode_step",
    "u64 handle, const i64* token, const bool* finished, i64* progress, u64 ring, u64 control, "
    "u32 rows",
    read_source("decode_loop.cu"),
    run_step_end,
)


def loop_config(rows: int) -> LaunchConfig:
    """The launch shape for ``rows`` rows: one block."""
    threads = min(-(-rows // _WARP) * _WARP, _MOST_THREADS)
    return LaunchConfig((1, 1, 1), (threads, 1, 1))
