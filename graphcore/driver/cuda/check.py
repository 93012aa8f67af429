"""The one check of driver calls: what every call's answer goes through.

The driver API keeps no "last error" of its own (the runtime's stays as it was), so there is nothing
to clear: a refusal is either raised here, or read as a value by who expects it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphcore.driver import active
from graphcore.driver.codes import OUT_OF_MEMORY, cuda_error, memory_words
from graphcore.driver.cuda.versions import cuda
from graphcore.errors import CudaError


def ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the driver and returns what follows the result code: nothing, a value, or a tuple.

    Raises:
        CudaError: The driver answered with an error code.
    """
    return check(call.__name__, call(*arguments))


def check(name: str, answer: Any) -> Any:
    """The values of a bindings answer ``(code, *values)``; CudaError where the code says so."""
    if answer[0]:
        raise error_of(answer[0], name)
    if len(answer) == 2:
        return answer[1]
    return answer[1:]


def error_of(
    code: Any,
    call: str,
    *,
    node: int | None = None,
    hint: str | None = None,
    asked: int | None = None,
) -> CudaError:
    """The exception of a result code (a ``CUresult``, or a number the bindings do not know).

    Where memory ran out it says how much of it the current context's device has, and how many bytes
    were ``asked`` for.
    """
    name = code_name(code)
    words = _memory_sentence(call, asked) if name == OUT_OF_MEMORY else None
    error = cuda_error(name, call, number=int(code), node=node, hint=hint, description=words)
    if not error.description:
        error = cuda_error(
            name, call, number=int(code), node=node, hint=hint, description=_sentence(code)
        )
    return active.note_error(error)


def code_name(code: Any) -> str:
    """``CUDA_ERROR_...`` of a result code."""
    return str(getattr(code, "name", f"CUDA_ERROR_{int(code)}"))


def _sentence(code: Any) -> str:
    try:
        _, text = cuda.cuGetErrorString(code)
    except (TypeError, RuntimeError):  # a bare number; no driver library
        return ""
    return text.decode(errors="replace") if text else ""


def _memory_sentence(call: str, asked: int | None) -> str | None:
    """What ran out, with bytes; None where the driver does not say how much there is."""
    if "Host" in call:
        return None if asked is None else f"the host has no {asked} bytes to page-lock"
    code, free, total = cuda.cuMemGetInfo()  # no capture minds
    if code:
        return None
    sentence = cuda_error(OUT_OF_MEMORY, call).description
    return f"{sentence}: {memory_words(int(free), int(total), asked)}"
