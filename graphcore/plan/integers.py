"""Integers that callers give: sizes, strides, counts, positions; Python's, NumPy's and torch's.

A bool is none, and bytes are no sequence of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from graphcore.errors import ConfigurationError


def check_sizes(values: Any, name: str, *, least: int | None = 0) -> tuple[int, ...]:
    """Ints as a tuple; one int is a tuple of one.

    Raises:
        ConfigurationError: Not ints, or below ``least`` (None: any).
    """
    if isinstance(values, (str, bytes, bytearray, memoryview)):
        raise ConfigurationError(f"{name}: expected ints, got {values!r:.60}")
    return tuple(check_size(item, name, least=least) for item in _items(values, name))


def check_size(value: Any, name: str, *, least: int | None = 0) -> int:
    """One int.

    Raises:
        ConfigurationError: Something else, or below ``least`` (None: any).
    """
    size = as_int(value)
    if size is None:
        raise ConfigurationError(f"{name}: expected ints, got {value!r:.60}")
    if least is not None and size < least:
        raise ConfigurationError(f"{name}: expected at least {least}, got {size}")
    return size


def as_int(value: Any) -> int | None:
    """What counts as an int: anything that Python takes for an index, but no bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _items(values: Any, name: str) -> Iterable[Any]:
    if isinstance(values, bool) or as_int(values) is not None:
        return [values]
    items = items_of(values)
    if items is None:
        raise ConfigurationError(f"{name}: expected ints, got {values!r:.60}")
    return items


def items_of(values: Any) -> Iterator[Any] | None:
    """What ``values`` holds; None where it holds nothing (an array without axes, say)."""
    try:
        items: Iterator[Any] = iter(values)
    except TypeError:
        return None
    return items
