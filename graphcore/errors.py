"""The exceptions of graphcore, and what holds after each is raised.

The tree (builtin base in brackets, so that callers who expect the builtin catch it too)::

    GraphcoreError
    +-- CudaError                      a CUDA call answered with an error code
    +-- DriverUnavailable              no usable CUDA driver, device, or module of this name
    +-- ConfigurationError  [ValueError]    an argument or a setting that cannot work
    |   +-- CapacityError              a static buffer holds fewer elements than were asked for
    |   +-- PlanError                  a graph plan that cannot be built
    +-- CacheTypeError      [TypeError]     a cache, stream or tensor of a kind we cannot use
    +-- LifecycleError      [RuntimeError]  calls in the wrong order, or on something closed
    |   +-- CaptureError               a stream capture failed, or something is not allowed in one
    |   +-- StaleGraphError            a graph whose buffers changed since it was captured
    |   +-- OverwrittenOutputError     an output that a later run has overwritten
    +-- RankError           [RuntimeError]  another process of a group failed, or is missing
    +-- UpdateRefused       [RuntimeError]  an update the driver refuses, where that was an error

    GraphcoreWarning        [RuntimeWarning]  what a finalizer could not raise

After any of these: a call that creates something has created nothing; a call that changes something
has changed nothing, unless its docstring and the message say what is left. A second failure while
cleaning up is attached to the first as a note (``__notes__``). The CUDA context stays usable for
every error raised by a check of ours; after a :class:`CudaError` whose code is *sticky*
(``error.is_sticky``) CUDA has lost the context, and nothing in the process can bring it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CacheTypeError",
    "CapacityError",
    "CaptureError",
    "ConfigurationError",
    "CudaError",
    "DriverUnavailable",
    "GraphcoreError",
    "GraphcoreWarning",
    "LifecycleError",
    "OverwrittenOutputError",
    "PlanError",
    "RankError",
    "StaleGraphError",
    "UpdateRefused",
]


class GraphcoreError(Exception):
    """Root of everything graphcore raises on purpose."""


class CudaError(GraphcoreError):
    """A CUDA call answered with an error code.

    Args:
        code: The code's name as in ``cuda.h``, for example
            ``"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"``; searchable.
        call: The driver entry point, for example ``"cuStreamEndCapture"``.
        number: The code's number, for example 900.
        description: One sentence saying what the code means.
        node: Handle of the graph node the driver blames, or None.
        hint: What to do about it, or None.
        is_sticky: Whether the context is lost: every later call answers with an error.
    """

    def __init__(
        self,
        code: str,
        call: str,
        *,
        number: int,
        description: str = "",
        node: int | None = None,
        hint: str | None = None,
        is_sticky: bool = False,
    ) -> None:
        self.code = code
        self.call = call
        self.number = number
        self.description = description
        self.node = node
        self.hint = hint
        self.is_sticky = is_sticky
        text = f"{call}: {code} ({number})"
        if description:
            text += f": {description}"
        if node is not None:
            text += f" [node {node:#x}]"
        if hint:
            text += f" Hint: {hint}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        keywords = {
            "number": self.number,
            "description": self.description,
            "node": self.node,
            "hint": self.hint,
            "is_sticky": self.is_sticky,
        }
        return _rebuild_cuda_error, (type(self), self.code, self.call, keywords)


def _rebuild_cuda_error(
    cls: type[CudaError], code: str, call: str, keywords: dict[str, object]
) -> CudaError:
    return cls(code, call, **keywords)  # type: ignore[arg-type]


class DriverUnavailable(GraphcoreError):  # noqa: N818 -- the name users know
    """The named driver, a device, or a module it needs is not usable here; says what mends it."""


class ConfigurationError(GraphcoreError, ValueError):
    """An argument or a setting that cannot work; names the field, what was expected, what came."""


class CapacityError(ConfigurationError):
    """A static buffer holds fewer elements than were asked for; nothing was written."""


class PlanError(ConfigurationError):
    """A graph plan that cannot be built.

    Args:
        message: What is wrong.
        problems: All that is wrong, as :class:`graphcore.PlanProblem`, where the plan was checked.
    """

    def __init__(self, message: str, problems: Sequence[Any] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(message)


class CacheTypeError(GraphcoreError, TypeError):
    """A cache, stream or tensor of a kind that cannot be used here."""


class LifecycleError(GraphcoreError, RuntimeError):
    """Calls in the wrong order, or on something closed."""


class CaptureError(LifecycleError):
    """A stream capture failed, or something was asked for that a capture does not allow.

    Args:
        message: What failed and what to do about it.
        code: Name of the CUDA error behind it (searchable), or None where the rule is ours.
        location: ``"file:line"`` of the Python line inside the capture that failed, where known.
        may_pass: Whether it may be another thread's doing, so that a second try may succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        location: str | None = None,
        may_pass: bool = False,
    ) -> None:
        self.code = code
        self.location = location
        self.may_pass = may_pass
        super().__init__(message)


class StaleGraphError(LifecycleError):
    """A graph depends on a buffer that changed since it was captured; nothing was launched."""


class OverwrittenOutputError(LifecycleError):
    """An output was read after a later run of its graph had overwritten it."""


class RankError(GraphcoreError, RuntimeError):
    """Another process that works with this one failed, or did not answer in time.

    Args:
        message: What is known of it.
        failed: Ranks that said that they failed.
        missing: Ranks that did not answer.
    """

    def __init__(
        self, message: str, *, failed: Sequence[int] = (), missing: Sequence[int] = ()
    ) -> None:
        self.failed = tuple(failed)
        self.missing = tuple(missing)
        super().__init__(message)


class UpdateRefused(GraphcoreError, RuntimeError):  # noqa: N818 -- the name users know
    """An executable could not be updated in place, where the caller made that an error."""


class GraphcoreWarning(RuntimeWarning):
    """Something went wrong where nothing can be raised (a finalizer); the message says what."""
