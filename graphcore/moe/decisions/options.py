"""MoEOptions: what a user may switch on, from where it was said, and until when it may be.

A keyword beats the command line, which beats the environment. Only 0 and 1 are values; off is the
default, and off means that boundaries behave as they do without the option.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum

from graphcore.errors import ConfigurationError, LifecycleError

GROUPED_DRIVERS = ("cuda", "emulated")
"""Drivers with which expert products are captured; with others the options do nothing."""


class OptionSource(Enum):
    """Where the value of an option was said."""

    DEFAULT = "default"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"
    KEYWORD = "keyword"


@dataclass(frozen=True, slots=True)
class MoEOptions:
    """What is switched on.

    Args:
        decode_boundary_overlap: A changed decode graph may update the captured executable.
        decode_overlap: The host prepares the next step while one runs.
    """

    decode_boundary_overlap: bool = False
    decode_overlap: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _switch(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def effective(self, driver: str) -> tuple[MoEOptions, str]:
        """What holds with ``driver``, and the reason where that is less than was asked for.

        The reason is "" or begins with "backend".
        """
        if driver in GROUPED_DRIVERS or self == MoEOptions():
            return self, ""
        known = " or ".join(GROUPED_DRIVERS)
        return MoEOptions(), f"backend: expected driver {known}, got {driver!r}"


NAMES = tuple(field.name for field in fields(MoEOptions))


def environment_name(option: str) -> str:
    """The environment variable of an option: ``GRAPHCORE_DECODE_OVERLAP``."""
    return f"GRAPHCORE_{option.upper()}"


def command_line_name(option: str) -> str:
    """The command's option: ``--decode-overlap``."""
    return f"--{option.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """The options, and where each was said."""

    options: MoEOptions
    sources: tuple[tuple[str, OptionSource], ...]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {'on' if getattr(self.options, name) else 'off'} ({source.value})"
            for name, source in self.sources
        )


def resolve_options(
    keywords: Mapping[str, object] | None = None,
    command_line: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ResolvedOptions:
    """The options from the three places they may be said in; a value of None was not said.

    A value that is beaten must be a value all the same: what is wrong anywhere is refused.

    Args:
        keywords: 0, 1, False or True for each.
        command_line: Also "0" and "1".
        environment: None: the process's own. An empty value is one that was not said.

    Raises:
        ConfigurationError: An unknown option, or a value other than 0 and 1; names the place.
    """
    for where, given in (("keyword", keywords), ("command line", command_line)):
        unknown = sorted(set(given or {}) - set(NAMES))
        if unknown:
            raise ConfigurationError(f"{where}: expected options {list(NAMES)}, got {unknown}")
    variables = os.environ if environment is None else environment
    values: dict[str, bool] = {}
    sources: list[tuple[str, OptionSource]] = []
    for name in NAMES:
        said = (
            (OptionSource.KEYWORD, name, (keywords or {}).get(name)),
            (OptionSource.COMMAND_LINE, command_line_name(name), (command_line or {}).get(name)),
            (
                OptionSource.ENVIRONMENT,
                environment_name(name),
                variables.get(environment_name(name)) or None,
            ),
        )
        found = [
            (source, _value(source, label, value))
            for source, label, value in said
            if value is not None
        ]
        source, values[name] = found[0] if found else (OptionSource.DEFAULT, False)
        sources.append((name, source))
    return ResolvedOptions(MoEOptions(**values), tuple(sources))


def _value(source: OptionSource, label: str, value: object) -> bool:
    if source is not OptionSource.KEYWORD and value in ("0", "1"):
        return value == "1"
    return _switch(label, value)


def _switch(label: str, value: object) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigurationError(f"{label}: expected 0 or 1, got {value!r}")
    return bool(value)


class OptionSetting:
    """Options that hold from the first step on.

    Args:
        options: At first.
    """

    def __init__(self, options: MoEOptions) -> None:
        self._options = options
        self._is_fixed = False

    @property
    def options(self) -> MoEOptions:
        """As they are set."""
        return self._options

    @property
    def is_fixed(self) -> bool:
        """Whether a step was submitted, so that they cannot be set any more."""
        return self._is_fixed

    def fix(self) -> None:
        """Says that a step is submitted; a second time changes nothing."""
        self._is_fixed = True

    def set(self, **changes: object) -> None:
        """Sets some of them.

        Raises:
            LifecycleError: A step was submitted already; nothing changed.
            ConfigurationError: An unknown option, or a value other than 0 and 1; nothing changed.
        """
        unknown = sorted(set(changes) - set(NAMES))
        if unknown:
            raise ConfigurationError(f"options: expected {list(NAMES)}, got {unknown}")
        values = {name: _switch(name, value) for name, value in changes.items()}
        if self._is_fixed:
            raise LifecycleError(
                f"options: {sorted(changes)} set after the first step; graphs were captured with "
                "the old ones. Set options before the first step."
            )
        self._options = replace(self._options, **values)
