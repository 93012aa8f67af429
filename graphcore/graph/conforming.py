"""What is read from a file must be: fields of their declared types, edges that order its nodes.

A file may be anybody's. What is not held to its type here would fail far away, in a picture or a
comparison.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from graphcore.errors import ConfigurationError

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # what a field of a driver's record holds


def check_record(record: Any) -> None:
    """Raises ConfigurationError where a field of a frozen record is not of its declared type."""
    for name, hint in _hints(record.__class__).items():
        value = getattr(record, name)
        if not _conforms(value, hint):
            raise ConfigurationError(
                f"{type(record).__name__}.{name}: expected {_words(hint)}, got {value!r:.80}"
            )


def check_text(field: str, value: Any) -> str:
    """``value``, if it is text."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{field}: expected text, got {value!r:.80}")
    return value


def check_number(field: str, value: Any, end: int = _MOST) -> int:
    """``value``, if it is a whole number of at least 0 and below ``end``."""
    if not _conforms(value, int) or not 0 <= value < end:
        raise ConfigurationError(f"{field}: expected a number below {end}, got {value!r:.80}")
    return int(value)


def check_order(edges: Sequence[tuple[int, int]], count: int) -> None:
    """Raises ConfigurationError where ``edges`` lead in a circle among ``count`` nodes."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for source, target in edges:
        after[source].append(target)
        waiting[target] += 1
    ready = [node for node in range(count) if not waiting[node]]
    for node in ready:  # grows meanwhile
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    if len(ready) < count:
        circle = next(node for node in range(count) if waiting[node])
        raise ConfigurationError(f"edges: expected an order, got a circle behind node {circle}")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    known = typing.get_type_hints(cls)
    return {field.name: known[field.name] for field in fields(cls)}


def _conforms(value: Any, hint: Any) -> bool:
    hint = getattr(hint, "__supertype__", hint)  # handles are new names of int
    if hint is None or hint is types.NoneType:
        return value is None
    if hint is int:
        return isinstance(value, int) and type(value) is not bool and _LEAST <= value <= _MOST
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_conforms(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[1:] == (...,):
            return all(_conforms(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(map(_conforms, value, parts))
    if origin is Callable:
        return callable(value)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    hint = getattr(hint, "__supertype__", hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(each.value for each in hint)}"
    if isinstance(hint, type) and not is_dataclass(hint) and not typing.get_args(hint):
        return {"int": "a whole number of 64 bits", "str": "text"}.get(hint.__name__, hint.__name__)
    return str(hint).replace("graphcore.driver.records.", "")
