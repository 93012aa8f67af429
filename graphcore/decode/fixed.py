"""Fixed: an attribute that its object gave itself, and that nobody exchanges by assigning.

A runner's cache or model that was assigned would reach a part of the runner only: the step, and the
graphs, work on with the one before.
"""

from __future__ import annotations

from typing import Any

from graphcore.errors import ConfigurationError


class Fixed:
    """A descriptor: the first assignment stands, a later one raises.

    The object itself exchanges it in its ``__dict__``.

    Args:
        remedy: What to do instead.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in instance.__dict__:
            raise ConfigurationError(
                f"{self._name}: expected no assignment, got {type(value).__name__}: {self._remedy}"
            )
        instance.__dict__[self._name] = value


def fixed(remedy: str) -> Any:
    """A :class:`Fixed` under the type that the attribute is annotated with."""
    return Fixed(remedy)
