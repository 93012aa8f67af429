"""Floors in C: loops over driver calls, compiled on the spot with the machine's compiler.

No CUDA header is needed: the loop gets the entry point's address.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from graphcore.errors import DriverUnavailable

_COMPILERS = ("cc", "gcc", "clang", "nvcc")

_SOURCE = r"""
#include <time.h>

/* Seconds of `calls` launches; negative: minus the CUDA error code of the first that failed. */
double launch_loop(int (*launch)(void *, void *), void *exec, void *stream, long calls) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long i = 0; i < calls; i++) {
        int code = launch(exec, stream);
        if (code) return -code;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
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
        self._loop = _compile(_SOURCE).launch_loop
        self._loop.restype = ctypes.c_double
        self._loop.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_long)
        self._function = launch or _graph_launch()  # kept: C holds its address only
        self._launch = ctypes.cast(self._function, ctypes.c_void_p)

    def seconds(self, executable: int, stream: int, calls: int) -> float:
        """Seconds that ``calls`` launches took on the CPU."""
        seconds = float(self._loop(self._launch, executable, stream, calls))
        if seconds < 0:
            raise DriverUnavailable(f"C loop: cuGraphLaunch answered {int(-seconds)}")
        return seconds


def _graph_launch() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuGraphLaunch
    except (AttributeError, OSError) as error:
        raise DriverUnavailable(f"C loop: no cuGraphLaunch to call ({error})") from error


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
