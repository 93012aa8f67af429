"""Kernel names as people read them: C++ names demangled by libstdc++, others as they are."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.lru_cache(maxsize=4096)
def demangle(raw_name: str) -> str:
    """``_Z3addPfS_i`` -> ``add(float*, float*, int)``; the raw name where that cannot be done."""
    library = _libstdcxx()
    if library is None or not raw_name.startswith("_Z"):
        return raw_name
    status = ctypes.c_int(-1)
    text = library.__cxa_demangle(raw_name.encode(), None, None, ctypes.byref(status))
    if not text:
        return raw_name
    try:
        if status.value:
            return raw_name
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        library.free(text)


@functools.cache
def _libstdcxx() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        demangler = getattr(library, "__cxa_demangle")
        demangler.restype = ctypes.c_void_p
        demangler.argtypes = (ctypes.c_char_p, *(ctypes.c_void_p,) * 3)
        library.free.argtypes = (ctypes.c_void_p,)
    except (AttributeError, OSError):
        return None
    return library
