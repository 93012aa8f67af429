"""ModelSettings: what of a model, beside its tensors, decides what a step of it computes.

Modules, their hooks and forwards, and the plain values that modules and their configurations have:
a scale, the switch of an adapter, an activation. A graph has them baked in, and no tensor tells
when one changes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from typing import Any

import torch
from torch.nn.modules import module as torch_module

_DEEPEST = 3  # of containers in containers: tables of adapters, rotary scales
_LONGEST = 256  # longer ones are labels and vocabularies

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_TABLES = frozenset({dict, OrderedDict})

# parameters, buffers and modules are compared as such; the rest of these no forward reads
_OTHERS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OTHER_PREFIXES = ("_backward", "_state_dict", "_load_state_dict", "_is_full_backward")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")

Name = tuple[str, str]
"""Path of a module or configuration, and what it is of it; ("model.lm_head", "forward")."""

_NONE: Any = object()


class ModelSettings:
    """The settings of a model at one time. They keep nothing of it alive.

    Args:
        model: A module; anything else has none.
    """

    __slots__ = ("_left_out", "_values")

    def __init__(self, model: object) -> None:
        self._values: dict[str, dict[str, Any]] = {}
        self._left_out: frozenset[Name] = frozenset()
        if isinstance(model, torch.nn.Module):
            self._values = _of_model(model)

    def leave_out(self, names: frozenset[Name]) -> None:
        """Compares these no more: a forward changes them itself."""
        self._left_out |= names

    def changes(self, now: ModelSettings) -> frozenset[Name]:
        """What is another one in ``now``."""
        return frozenset(name for name, _, _ in self._changes(now))

    def first_change(self, now: ModelSettings) -> str | None:
        """The first that is another one in ``now``, in words; None: none is."""
        for (path, name), old, new in self._changes(now):
            return f"{path}.{name}: expected {_words(old)}, got {_words(new)}"
        return None

    def _changes(self, now: ModelSettings) -> Iterator[tuple[Name, Any, Any]]:
        for path in {**self._values, **now._values}:
            before, after = self._values.get(path, {}), now._values.get(path, {})
            if before == after:
                continue
            for name in {**before, **after}:
                old, new = before.get(name, _NONE), after.get(name, _NONE)
                if old != new and (path, name) not in self._left_out:
                    yield (path, name), old, new


def _of_model(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    hooks = {name: _value(getattr(torch_module, name), 0) for name in _GLOBAL_HOOKS}
    found: dict[str, dict[str, Any]] = {"torch.nn.Module": hooks}
    configurations: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules(prefix="model"):
        kind = type(module)
        found[path] = values = {
            "module": weakref.ref(module), "class": kind, "class.forward": kind.forward,
        }  # fmt: skip
        for name, value in vars(module).items():
            if type(value) in _PLAIN:
                values[name] = value
            # an empty one is as if it were not there: so are most hooks
            elif (type(value) in _TABLES and not value) or name in _OTHERS:
                continue
            elif _is_configuration(value):
                configurations.setdefault(id(value), (f"{path}.{name}", value))
            elif not name.startswith(_OTHER_PREFIXES):
                values[name] = _value(value, 0)
    for path, configuration in configurations.values():
        _add_configuration(found, path, configuration)
    return found


def _is_configuration(value: Any) -> bool:
    """Whether it is a configuration as transformers has them."""
    return hasattr(type(value), "model_type") and hasattr(value, "__dict__")


def _add_configuration(found: dict[str, dict[str, Any]], path: str, configuration: Any) -> None:
    found[path] = values = {}
    for name, value in vars(configuration).items():
        if _is_configuration(value):
            _add_configuration(found, f"{path}.{name}", value)
        else:
            values[name] = _value(value, 0)


class _Same:
    """A tensor or function, which is equal to itself only; one that has gone equals none."""

    __slots__ = ("_name", "_reference")

    def __init__(self, subject: Any) -> None:
        self._name = getattr(subject, "__qualname__", type(subject).__qualname__)
        self._reference = weakref.ref(subject)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        found = self._reference()
        return found is not None and found is other._reference()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(self._name)


def _value(value: Any, depth: int) -> Any:
    """What tells ``value`` from another one; its type alone for what is not looked into."""
    if type(value) in _PLAIN or isinstance(value, Enum):
        return value
    if isinstance(value, (tuple, list, Set, Mapping)) and depth < _DEEPEST:
        if len(value) > _LONGEST:
            return len(value)
        if isinstance(value, Mapping):
            return [(_value(key, depth), _value(value[key], depth + 1)) for key in value]
        if isinstance(value, Set):
            return {each for each in value if type(each) in _PLAIN}
        return [_value(each, depth + 1) for each in value]
    if callable(value) or isinstance(value, torch.Tensor):
        try:
            return _Same(value)
        except TypeError:  # no weak references
            return type(value)
    return type(value)


def _words(value: Any) -> str:
    return "none" if value is _NONE else f"{value!r:.80}"
