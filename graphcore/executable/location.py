"""The user's line: which of the frames of a stack or a traceback a message should name.

Frames of graphcore never count. The user's own line is the innermost outside installed packages and
the standard library; the innermost line outside the CUDA libraries may lie deeper (in a model's
code) and says more.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from types import FrameType, TracebackType

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_KERNELS = f"{os.sep}graphcore_kernels{os.sep}"
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
# the scripts that start installed commands (bin/pytest): somebody else's first line
_SCRIPTS = sysconfig.get_paths()["scripts"] + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CUDA_LIBRARIES = frozenset({"torch", "cupy", "cupy_backends", "cuda"})


def locate(trace: TracebackType | None) -> tuple[str | None, str | None]:
    """(the user's innermost line, the innermost line outside CUDA libraries) as "file:line".

    Where everything is installed code, both are the second.
    """
    user = inner = None
    for frame, line in traceback.walk_tb(trace):
        path = frame.f_code.co_filename
        library = _library(path)
        if library is None:
            user = inner = f"{path}:{line}"
        elif library and library not in _CUDA_LIBRARIES:
            inner = f"{path}:{line}"
    return user or inner, inner


def caller() -> str:
    """The innermost line that is the user's (or else a package's), as "file:line"."""
    frame: FrameType | None = sys._getframe(1)
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return innermost(lines)


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """The first of (file, line), innermost first, that is the user's (or else a package's)."""
    fallback = "a line of graphcore's own"
    for path, line in frames:
        library = _library(path)
        if library is None:
            return f"{path}:{line}"
        if library and fallback == "a line of graphcore's own":
            fallback = f"{path}:{line}"
    return fallback


def _library(path: str) -> str | None:
    """The installed package a file belongs to; "" for graphcore and Python's own; None: a user's.

    What has no file (a notebook's cell, the prompt) is the user's.
    """
    if path.startswith((_PACKAGE, "<frozen ")) or _KERNELS in path:
        return ""
    for folder in _INSTALLED:
        if folder in path:
            return path.rpartition(folder)[2].partition(os.sep)[0]
    return "" if path.startswith((_STANDARD, _SCRIPTS)) else None
