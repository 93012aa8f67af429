"""Holders: where a tensor was found that a graph keeps, so that a later look finds its successor.

A graph goes on reading the tensor it captured after ``module.weight``, ``cache["keys"]`` or the
variable ``x`` of its function has been given another one. Keeping the old tensor prevents a crash;
only looking again where it was found tells that it is no longer the one that is meant.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from graphcore.resources.tensors import is_tensor

MISSING: Any = object()
"""What a slot holds that is no longer there."""

Kind = Literal["item", "attribute", "cell"]

# how far parts are followed: an engine's cache's list of layers' dictionaries of tensors, and more
_DEPTH = 8
_MOST_OBJECTS = 10_000
_LIBRARIES = ("torch", "numpy", "cupy", "cuda", "graphcore.driver", "graphcore.executable",
              "graphcore.interop", "graphcore.plan", "graphcore.reuse")  # fmt: skip
# without tensors, and there may be one for every step that somebody has taken
_RECORDS = ("graphcore.moe.steps.step_record", "graphcore.moe.decisions.certificate",
            "graphcore.moe.decisions.lookup_key")  # fmt: skip
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, Enum, ModuleType,
          BuiltinFunctionType)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """An item, an attribute or a variable that held a tensor; ``holder`` is kept alive."""

    holder: Any
    key: Any
    kind: Kind

    def current(self) -> Any:
        """What is there now, or MISSING."""
        try:
            if self.kind == "item":
                return self.holder[self.key]
            if self.kind == "cell":
                return self.holder.cell_contents
            return getattr(self.holder, self.key, MISSING)
        except (LookupError, TypeError, ValueError):  # gone, or a variable without a value
            return MISSING


def variables(function: Any) -> Iterator[tuple[str, Slot, Any]]:
    """(name, slot, value) of what a function works on beyond its arguments.

    Closure variables, the globals it names, and what a method or a partial is bound to.
    """
    if isinstance(function, partial):
        for name, value in function.keywords.items():
            yield name, Slot(function.keywords, name, "item"), value
        for index, value in enumerate(function.args):
            yield f"bound argument {index}", Slot(function.args, index, "item"), value
        yield from variables(function.func)
    elif isinstance(function, MethodType):
        yield "self", Slot(function, "__self__", "attribute"), function.__self__
        yield from variables(function.__func__)
    elif isinstance(function, FunctionType):
        code = function.__code__
        cells: tuple[CellType, ...] = function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            slot = Slot(cell, name, "cell")
            if (value := slot.current()) is not MISSING:
                yield name, slot, value
        for name in code.co_names:
            value = function.__globals__.get(name)
            # of a module's globals only data: its functions and objects lead everywhere
            if is_module(value) or isinstance(value, (Mapping, list, tuple)) or is_tensor(value):
                yield name, Slot(function.__globals__, name, "item"), value


class Walk:
    """One walk through objects: each is met once.

    ``is_inside`` says that it is among the variables of a function: there it ends somewhere. What
    was given to us is followed to its end.
    """

    def __init__(self) -> None:
        self._met: set[int] = set()
        self.depth = 0
        self.is_inside = False

    def enters(self, obj: Any) -> bool:
        """Whether ``obj`` is met for the first time, and the walk is not too long by now."""
        if id(obj) in self._met or (self.is_inside and len(self._met) >= _MOST_OBJECTS):
            return False
        self._met.add(id(obj))
        return True

    def parts(self, obj: Any, label: str) -> Iterator[tuple[str, Slot, Any]]:
        """(label, slot, value) of what ``obj`` holds directly, unless that is too deep inside."""
        if self.is_inside and self.depth > _DEPTH:
            return
        if isinstance(obj, Mapping):
            for key, value in list(obj.items()):  # another thread may write there meanwhile
                yield f"{label}[{key!r}]", Slot(obj, key, "item"), value
        elif isinstance(obj, (list, tuple)):
            for index, value in enumerate(obj):
                yield f"{label}[{index}]", Slot(obj, index, "item"), value
        else:
            for name, value in list(getattr(obj, "__dict__", {}).items()):
                yield f"{label}.{name}", Slot(obj, name, "attribute"), value


def is_plain(obj: Any) -> bool:
    """Whether nothing that a graph works on can be inside: numbers, texts, types, modules."""
    return isinstance(obj, _PLAIN)


def is_record(obj: Any) -> bool:
    """Whether ``obj`` says what came of a step, or what one was to be."""
    return type(obj).__module__ in _RECORDS


def is_opaque(obj: Any) -> bool:
    """Whether ``obj`` is a library's own: streams, drivers, graphs, dtypes."""
    if isinstance(obj, (Mapping, list, tuple, partial, MethodType, FunctionType)):
        return False
    return type(obj).__module__.startswith(_LIBRARIES) and not is_module(obj)


def is_module(obj: Any) -> bool:
    """Whether ``obj`` is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.nn.Module)
