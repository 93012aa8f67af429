"""What a key of a cache may be: hashable and unchangeable through and through; and how to make one.

A key that can change, or that is new at each call, finds nothing again: the cache would capture for
ever and say nothing. Such keys are refused, with the path inside the key to what is wrong. Device
and context are not part of a key: the cache adds them.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from types import BuiltinFunctionType, MethodType
from typing import Any, NamedTuple

from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.resources.tensors import describe, is_tensor

# an integer below this is no address that a process hands out: programs that are not relocated
# begin here, with their heap, which is the emulated driver's memory, behind them
_LEAST_ADDRESS = 1 << 22

_CONTAINERS = (list, dict, set, bytearray, memoryview)


class TensorKey(NamedTuple):
    """What of a tensor a graph depends on, without its address.

    ``shape`` and ``strides`` count elements; ``device`` is "cuda:0", or "cpu:0" for memory of the
    emulated driver.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    device: str


def key_of(*tensors: Any) -> tuple[TensorKey, ...]:
    """A key of the shapes, dtypes, strides and devices of ``tensors``; never their addresses.

    Raises:
        CacheTypeError: Something is no tensor.
    """
    return tuple(_tensor_key(index, tensor) for index, tensor in enumerate(tensors))


def _tensor_key(index: int, tensor: Any) -> TensorKey:
    ref = describe(tensor, name=f"tensors[{index}]")
    return TensorKey(ref.shape, ref.dtype, ref.strides, f"{ref.device_kind}:{ref.device}")


def check_key(key: object) -> Hashable:
    """``key``, if it can be one.

    Numbers, text, bytes, None, enumerations, classes, element types, tuples, frozen sets, frozen
    dataclasses and other values that compare by content are fine.

    Raises:
        CacheTypeError: Part of it can change, or compares by identity (a tensor, a list, a
            function, an object): says where.
        ConfigurationError: A number in it that does not equal itself (NaN).
    """
    _check(key, "key")
    try:
        hash(key)
    except TypeError as error:
        raise CacheTypeError(f"key: expected a hashable value, got {key!r}: {error}") from None
    return key


def _check(value: Any, path: str) -> None:
    if value is None or isinstance(value, (str, bytes, Enum, type)):
        return
    if isinstance(value, (tuple, frozenset)):
        for name, part in _parts(value):
            _check(part, f"{path}{name}")
    elif is_tensor(value):
        raise CacheTypeError(
            f"{path}: expected no tensor, got {type(value).__name__}, which is another one at the "
            "next call; use graphcore.reuse.key_of(tensor): its shape, dtype, strides and device"
        )
    elif isinstance(value, _CONTAINERS):
        raise CacheTypeError(
            f"{path}: expected a value that cannot change, got {type(value).__name__} {value!r}; "
            "use a tuple or a frozenset"
        )
    elif dataclasses.is_dataclass(value):
        _check_dataclass(value, path)
    else:
        _check_other(value, path)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, frozenset):
        for part in value:
            yield "{...}", part
        return
    names = getattr(value, "_fields", None)
    for index, part in enumerate(value):
        yield (f".{names[index]}" if names else f"[{index}]"), part


def _check_dataclass(value: Any, path: str) -> None:
    kind = type(value)
    if not kind.__dataclass_params__.frozen:
        raise CacheTypeError(
            f"{path}: expected a value that cannot change, got the dataclass {kind.__name__}, "
            "which is not frozen"
        )
    _refuse_identity(value, path)
    for field in dataclasses.fields(value):
        _check(getattr(value, field.name), f"{path}.{field.name}")


def _check_other(value: Any, path: str) -> None:
    _refuse_identity(value, path)
    try:
        is_itself = bool(value == value)  # noqa: PLR0124 - NaN does not equal itself
    except Exception as error:
        raise CacheTypeError(
            f"{path}: expected a value that can be compared, got {type(value).__name__}: {error}"
        ) from error
    if not is_itself:
        raise ConfigurationError(
            f"{path}: expected a value that equals itself, got {value!r}: it is never found again"
        )
    for name, part in getattr(value, "__dict__", {}).items():
        if is_tensor(part):
            raise CacheTypeError(
                f"{path}.{name}: expected no tensor inside {type(value).__name__}, got "
                f"{type(part).__name__}"
            )


def _refuse_identity(value: Any, path: str) -> None:
    kind = type(value)
    # an element type of torch exists once, so that its identity is its value
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "layout", "memory_format"):
        return
    found: Any = kind.__hash__
    made_new = found is object.__hash__ or isinstance(value, (MethodType, BuiltinFunctionType))
    if found is None:
        raise CacheTypeError(
            f"{path}: expected a hashable value, got {kind.__name__} {value!r}, which has no hash"
        )
    if made_new:
        raise CacheTypeError(
            f"{path}: expected a value that compares by content, got {kind.__name__}, which "
            "compares by identity: another one at the next call; use its name"
        )


def refuse_addresses(key: object, is_memory: Callable[[int], bool]) -> None:
    """Raises ConfigurationError for an integer in ``key`` that is an address of live memory.

    An address is new for each tensor that is made: such a cache captures at every call, and where
    the memory is used again it launches the graph of another tensor.

    Args:
        key: A checked key.
        is_memory: Whether an integer lies in an allocation; asked only of large ones.
    """
    for path, number in _large_integers(key, "key"):
        if is_memory(number):
            raise ConfigurationError(
                f"{path}: expected no address, got {number:#x}, which lies in live memory and is "
                "another one for the next tensor; use graphcore.reuse.key_of(tensor)"
            )


def _large_integers(value: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, numbers.Integral):
        if int(value) >= _LEAST_ADDRESS:
            yield path, int(value)
    elif isinstance(value, (tuple, frozenset)):
        for name, part in _parts(value):
            yield from _large_integers(part, f"{path}{name}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _large_integers(getattr(value, field.name), f"{path}.{field.name}")


def same_kinds(one: Any, other: Any) -> bool:
    """Whether two equal keys are of equal kinds too: ``1``, ``1.0`` and ``True`` are equal.

    So are ``0.0`` and ``-0.0``, by which a graph may divide.
    """
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(same_kinds, one, other))
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        partners = {part: part for part in other}
        return all(same_kinds(part, partners[part]) for part in one)
    if dataclasses.is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        names = [field.name for field in dataclasses.fields(one) if field.compare]
        return all(same_kinds(getattr(one, name), getattr(other, name)) for name in names)
    kind = _kind(one)
    if kind is numbers.Real and one == 0 and _kind(other) is kind:
        return math.copysign(1.0, one) == math.copysign(1.0, other)
    return kind == _kind(other)


def _kind(value: Any) -> type:
    for kind in (bool, numbers.Integral, numbers.Real):
        if isinstance(value, kind):
            return kind
    return object


def size_of(key: object) -> float:
    """How large the bucket of ``key`` is: a number, or the product of the numbers in a tuple.

    Raises:
        ConfigurationError: The key has no number to go by.
    """
    sizes = [float(each) for each in _numbers(key)]
    if not sizes:
        raise ConfigurationError(
            f"key: expected a number, or a tuple with numbers, to order buckets by size, got "
            f"{key!r}; pass size=, a function of the key"
        )
    product = 1.0
    for size in sizes:
        product *= size
    return product


def _numbers(value: Any) -> Iterator[Any]:
    if _kind(value) in (numbers.Integral, numbers.Real):
        yield value
    elif isinstance(value, tuple):
        for part in value.shape if isinstance(value, TensorKey) else value:
            yield from _numbers(part)
