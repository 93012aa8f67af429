"""Injected faults: which call fails next, with what, and how often.

A fault is raised before the call does anything, so what the caller sees is exactly a driver call
that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from graphcore.driver.api import Driver
from graphcore.driver.codes import code_names, cuda_error
from graphcore.errors import ConfigurationError

# looks at a result only
_NEVER_CALLS = frozenset({"raise_launch"})


@dataclass(eq=False, slots=True)
class Fault:
    """One fault: ``good_calls`` go well first, then ``count`` fail with ``code``."""

    call: str
    code: str
    good_calls: int
    count: int
    fired: int = 0


def _meant(given: object, known: Sequence[str]) -> str:
    close = get_close_matches(given, known, 3) if isinstance(given, str) else []
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class Faults:
    """The faults waiting in one emulated driver. Not locked."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Fault]] = {}

    def inject(
        self, call: str, count: int = 1, after: int = 0, code: str = "CUDA_ERROR_UNKNOWN"
    ) -> Fault:
        """Makes ``call`` fail.

        Args:
            call: A method of :class:`graphcore.driver.Driver`, for example ``"alloc"``. A bound
                launch counts as ``"launch_graph"``, an operation of torch in a capture as
                ``"launch"``.
            count: How many calls fail, one after the other.
            after: How many calls go well first.
            code: Name of the CUDA error.

        Raises:
            ConfigurationError: ``call`` is no method that talks to a driver, ``code`` no error of
                CUDA, or a negative number.
        """
        calls = sorted(Driver.__abstractmethods__ - _NEVER_CALLS)
        for field, given, kind, known in (
            ("call", call, "a method of Driver", calls),
            ("code", code, "the name of a CUDA error", code_names()),
        ):
            if given not in known:
                raise ConfigurationError(
                    f"faults.inject: {field}: expected {kind}, got {given!r}{_meant(given, known)}"
                )
        if count < 1 or after < 0:
            raise ConfigurationError(
                f"faults.inject: expected count >= 1 and after >= 0, got {count} and {after}"
            )
        fault = Fault(call, code, after, count)
        self._waiting.setdefault(call, []).append(fault)
        return fault

    def cancel(self, fault: Fault) -> None:
        """Forgets what is left of ``fault``."""
        queue = self._waiting.get(fault.call, [])
        if fault in queue:
            queue.remove(fault)

    def clear(self) -> None:
        """Forgets every fault that has not fired."""
        self._waiting.clear()

    def raise_due(self, method: str, call: str) -> None:
        """Raises the fault that is due for ``method``, if one is; counts the call otherwise."""
        if not self._waiting or not (queue := self._waiting.get(method)):
            return
        fault = queue[0]
        if fault.good_calls:
            fault.good_calls -= 1
            return
        fault.fired += 1
        if fault.fired == fault.count:
            queue.pop(0)
        raise cuda_error(fault.code, call, hint="injected by faults.inject")
