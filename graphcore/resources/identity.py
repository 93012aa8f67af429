"""Which function a callback is, as plain data: by name and line, and by what is bound to it.

The same function made again at the same line (a lambda in a step that is captured twice) is the
same; values of its closure are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

from graphcore.resources.fields import Value

_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple)


def identity_of(callback: object, number: Callable[[object], int]) -> Value:
    """The identity of ``callback``.

    Args:
        callback: A function, bound method, partial or callable object.
        number: Gives an object that a method is bound to a number that is its alone.
    """
    if isinstance(callback, partial):
        bound = (*callback.args, *sorted(callback.keywords.items()))
        return ("partial", identity_of(callback.func, number), *map(_words, bound))
    kind = type(callback)
    named: tuple[Value, ...] = (
        getattr(callback, "__module__", None) or kind.__module__,
        getattr(callback, "__qualname__", kind.__qualname__),
    )
    code = getattr(callback, "__code__", None)
    if code is not None:
        named += (code.co_firstlineno,)
    owner = getattr(callback, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        named += (number(owner),)
    return named


def _words(value: object) -> str:
    """Plain values as they read; of other objects, whose text may hold an address, the kind."""
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
