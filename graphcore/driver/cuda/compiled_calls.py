"""CuPy's calls of the driver for what a launch needs, where CuPy is installed.

They are compiled, take integers and give nothing back, and so cost Python less than ctypes or the
bindings do. CuPy itself is not imported: its low modules stand alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CompiledCalls:
    """What is called for every launch.

    Attributes:
        launch_graph: (executable, stream); raises CuPy's error, whose ``status`` is the code. Takes
            handles of default streams as of the current context.
        current_context: The handle of the context that is current on this thread, or 0.
    """

    launch_graph: Callable[[int, int], object]
    current_context: Callable[[], int]


@functools.cache
def compiled_calls() -> CompiledCalls | None:
    """The calls; None where CuPy is not installed."""
    try:
        from cupy_backends.cuda.api import driver, runtime
    except ImportError:
        return None
    return CompiledCalls(runtime.graphLaunch, driver.ctxGetCurrent)
