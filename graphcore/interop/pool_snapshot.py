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
    before = _counts(numbers)
    found = snapshot(given)
    for position, after in enumerate(_counts(numbers)):  # counted the same way both times
        for _ in range(before[position] - after):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(numbers[position]))
    return found


def _counts(numbers: list[int]) -> list[int]:
    return [sys.getrefcount(number) for number in numbers]
