"""Floors in C: loops over driver calls, compiled on the spot with the machine's compiler.

No CUDA header is needed: the loop gets the entry point's address.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphcore.driver.records import KernelParams
from graphcore.errors import DriverUnavailable

_COMPILERS = ("cc", "gcc", "clang", "nvcc")

_SOURCE = r"""
#include <time.h>

typedef int (*launch_call)(void *, void *);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Each loop: seconds of `calls` rounds; negative: minus the CUDA error code that ended it. */

double launch_loop(launch_call launch, void *exec, void *stream, long calls) {
    double start = now();
    for (long i = 0; i < calls; i++) {
        int code = launch(exec, stream);
        if (code) return -code;
    }
    return now() - start;
}

/* An update to each of `count` graphs in turn, and a launch after it. */
double update_loop(int (*update)(void *, void *, void *), launch_call launch, void *exec,
                   void **graphs, long count, void *stream, long calls) {
    struct { int result; void *node, *from; } answer;
    double start = now();
    for (long i = 0; i < calls; i++) {
        int code = update(exec, graphs[i % count], &answer);
        if (!code) code = launch(exec, stream);
        if (code) return -code;
    }
    return now() - start;
}

/* Each of `count` nodes set to one of two parameter sets in turn, and a launch after them. */
double node_loop(int (*set)(void *, void *, void *), launch_call launch, void *exec, void **nodes,
                 long count, void **params, void *stream, long calls) {
    double start = now();
    for (long i = 0; i < calls; i++) {
        int code = 0;
        for (long k = 0; k < count && !code; k++) code = set(exec, nodes[k], params[i % 2]);
        if (!code) code = launch(exec, stream);
        if (code) return -code;
    }
    return now() - start;
}
"""


class LaunchLoop:
    """A C loop over a launch call.

    Args:
        launch: The C function ``int launch(void *executable, void *stream)``; None takes
            ``cuGraphLaunch`` of the driver library.

    Raises:
        DriverUnavailable: No C compiler, or no driver library.
    """

    def __init__(self, launch: Any = None) -> None:
        library = _compile(_SOURCE)
        self._loop = _declared(library.launch_loop, *(ctypes.c_void_p,) * 3)
        self._launch = _Call(launch, "cuGraphLaunch")

    def seconds(self, executable: int, stream: int, calls: int) -> float:
        """Seconds that ``calls`` launches took on the CPU."""
        return _checked(self._loop(self._launch.address, executable, stream, calls))


class UpdateLoop:
    """A C loop over a whole-graph update and the launch after it.

    Args:
        update: ``int update(void *executable, void *graph, void *answer)``; None takes
            ``cuGraphExecUpdate_v2`` of the driver library.
        launch: As of :class:`LaunchLoop`.

    Raises:
        DriverUnavailable: No C compiler, or no driver library.
    """

    def __init__(self, update: Any = None, launch: Any = None) -> None:
        library = _compile(_SOURCE)
        pointers = (ctypes.c_void_p,) * 4
        self._loop = _declared(library.update_loop, *pointers, ctypes.c_long, ctypes.c_void_p)
        self._update = _Call(update, "cuGraphExecUpdate_v2")
        self._launch = _Call(launch, "cuGraphLaunch")

    def seconds(self, executable: int, graphs: Sequence[int], stream: int, calls: int) -> float:
        """Seconds of ``calls`` times an update to the next of ``graphs``, then a launch."""
        listed = _pointers(graphs)
        return _checked(
            self._loop(
                self._update.address,
                self._launch.address,
                executable,
                listed,
                len(graphs),
                stream,
                calls,
            )
        )


class NodeLoop:
    """A C loop over changes of kernel nodes of an executable and the launch after them.

    Args:
        set_params: ``int set(void *executable, void *node, void *params)``; None takes
            ``cuGraphExecKernelNodeSetParams_v2`` of the driver library.
        launch: As of :class:`LaunchLoop`.

    Raises:
        DriverUnavailable: No C compiler, or no driver library.
    """

    def __init__(self, set_params: Any = None, launch: Any = None) -> None:
        library = _compile(_SOURCE)
        pointers = (ctypes.c_void_p,) * 4
        tail = (ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._loop = _declared(library.node_loop, *pointers, *tail)
        self._set = _Call(set_params, "cuGraphExecKernelNodeSetParams_v2")
        self._launch = _Call(launch, "cuGraphLaunch")

    def seconds(
        self,
        executable: int,
        nodes: Sequence[int],
        params: tuple[KernelNode, KernelNode],
        stream: int,
        calls: int,
    ) -> float:
        """Seconds of ``calls`` times: every node to the other of ``params``, then a launch."""
        return _checked(
            self._loop(
                self._set.address,
                self._launch.address,
                executable,
                _pointers(nodes),
                len(nodes),
                _pointers([each.address for each in params]),
                stream,
                calls,
            )
        )


class KernelNode:
    """``CUDA_KERNEL_NODE_PARAMS_v2`` in memory of its own, for C.

    Fields: function, grid, block, shared bytes, arguments, extra, library kernel, context.
    """

    def __init__(self, params: KernelParams) -> None:
        config = params.config
        self._arguments = [
            ctypes.create_string_buffer(data, len(data)) for data in params.arguments
        ]
        self._pointers = _pointers([ctypes.addressof(each) for each in self._arguments])
        packed = struct.pack(
            "=Q7I4x4Q",
            params.function,
            *config.grid,
            *config.block,
            config.shared_bytes,
            ctypes.addressof(self._pointers),
            *(0, 0, 0),
        )
        self._packed = ctypes.create_string_buffer(packed, len(packed))
        self.address = ctypes.addressof(self._packed)


class _Call:
    """A C function by address: one given, or an entry point of the driver library."""

    def __init__(self, function: Any, name: str) -> None:
        self._function = function or _entry_point(name)  # kept: C holds its address only
        self.address = ctypes.cast(self._function, ctypes.c_void_p)


def _entry_point(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (AttributeError, OSError) as error:
        raise DriverUnavailable(f"C loop: no {name} to call ({error})") from error


def _declared(loop: Any, *arguments: Any) -> Any:
    """A loop of the source with its types: ``arguments``, then the number of rounds."""
    loop.restype = ctypes.c_double
    loop.argtypes = (*arguments, ctypes.c_long)
    return loop


def _checked(seconds: float) -> float:
    if seconds < 0:
        raise DriverUnavailable(f"C loop: a driver call answered {int(-seconds)}")
    return seconds


def _pointers(values: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


def _compile(source: str) -> Any:
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise DriverUnavailable(f"C loop: none of {', '.join(_COMPILERS)} is installed")
    shared = ["-Xcompiler", "-fPIC"] if Path(compiler).name == "nvcc" else ["-fPIC"]
    # loaded libraries outlive their file
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
        code.write_text(source, encoding="ascii")
        command = [compiler, "-O2", "-shared", *shared, "-o", str(library), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DriverUnavailable(f"C loop: {compiler} failed: {done.stderr.strip()}")
        return ctypes.CDLL(str(library))
