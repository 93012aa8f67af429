"""A torch memory pool's segments, without the reference that torch loses on the way.

``torch.cuda.memory_snapshot(id)`` gives back a reference to each number of the id that it never
took (seen with torch 2.11). Numbers up to 256 live for ever and bear it; with the 257th pool of a
process the interpreter frees an int that is in use, and crashes at some later allocation. So the
references are counted around the call, and what is missing is put back.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def pool_snapshot(
    snapshot: Callable[[tuple[int, ...]], list[dict[str, Any]]], pool_id: tuple[int, int]
) -> list[dict[str, Any]]:
    """``snapshot(pool_id)``, after which each number of the id has the references it had."""
    numbers = list(pool_id)  # a second reference to each, which keeps it alive in the call
    given = tuple(numbers)
    before = [sys.getrefcount(number) for number in numbers]
    found = snapshot(given)
    for number, count in zip(numbers, before, strict=True):
        for _ in range(count - sys.getrefcount(number)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    return found
