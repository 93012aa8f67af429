"""How a call of the emulated driver fails: injected faults first, then refusals with CUDA's names.

The parts of this package raise :class:`Refused`; :func:`entry` marks a public method, knows the
driver entry point it stands for, and turns a refusal into the CudaError a device would have given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from graphcore.driver import active
from graphcore.driver.codes import cuda_error
from graphcore.driver.emulated.faults import Faults
from graphcore.errors import CudaError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


_NOT_IN_CALLBACKS = (
    "a host callback must not call CUDA, which may wait for ever there; let another thread do it"
)


class Refused(Exception):  # noqa: N818 - a refusal, turned into an error at the border
    """A call that the driver's rules refuse.

    Args:
        code: The CUDA error's name.
        reason: What exactly was wrong, in words; added to the code's own sentence.
        node: Handle of the node to blame, where there is one.
        hint: What to do about it; None takes the code's own hint.
    """

    def __init__(
        self, code: str, reason: str = "", *, node: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason
        self.node = node
        self.hint = hint

    def as_error(self, call: str) -> CudaError:
        """The CudaError of entry point ``call``."""
        sentence = cuda_error(self.code, call).description
        if self.reason:
            sentence = f"{sentence}: {self.reason}" if sentence else self.reason
        return active.note_error(
            cuda_error(self.code, call, description=sentence, node=self.node, hint=self.hint)
        )


def invalid(reason: str, *, node: int | None = None) -> Refused:
    """The commonest refusal: INVALID_VALUE with its reason."""
    return Refused("CUDA_ERROR_INVALID_VALUE", reason, node=node)


class Callee(Protocol):
    """What :func:`entry` asks of the object whose methods it marks."""

    @property
    def faults(self) -> Faults: ...

    @property
    def is_closed(self) -> bool: ...


CalleeType = TypeVar("CalleeType", bound=Callee)


def entry(
    call: str, *, when_closed: bool = False
) -> Callable[
    [Callable[Concatenate[CalleeType, Parameters], Result]],
    Callable[Concatenate[CalleeType, Parameters], Result],
]:
    """Marks a public method as the driver entry point ``call``.

    ``when_closed`` methods still work on a closed driver: those that give something back, because
    handles stay their owner's.
    """

    def mark(
        method: Callable[Concatenate[CalleeType, Parameters], Result],
    ) -> Callable[Concatenate[CalleeType, Parameters], Result]:
        name = method.__name__

        @functools.wraps(method)
        def checked(
            self: CalleeType, *arguments: Parameters.args, **keywords: Parameters.kwargs
        ) -> Result:
            if self.is_closed and not when_closed:
                raise cuda_error("CUDA_ERROR_INVALID_CONTEXT", call, hint="the driver is closed")
            if active.in_callback():
                raise cuda_error("CUDA_ERROR_NOT_PERMITTED", call, hint=_NOT_IN_CALLBACKS)
            self.faults.raise_due(name, call)
            try:
                return method(self, *arguments, **keywords)
            except Refused as refusal:
                raise refusal.as_error(call) from None

        return cast("Callable[Concatenate[CalleeType, Parameters], Result]", checked)

    return mark
