"""Why a capture failed, in words: which call, which Python line, which rule, what to do.

Takes the exceptions of graphcore, torch and CuPy; anything that has nothing to do with CUDA is not
explained and stays the user's. Where CUDA only says that the capture was invalidated, what was seen
to go wrong meanwhile (driver/active.py) is named.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from graphcore.driver.active import Trouble
from graphcore.driver.codes import cuda_error, find_code
from graphcore.errors import CaptureError, CudaError
from graphcore.executable.branches import LooseEnds
from graphcore.executable.location import innermost, locate

_CUDA_LIBRARIES = ("torch", "cupy", "cupy_backends", "cuda")
_INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
_WARM_UP = "warm the step up on the capture stream (capture_function does)"
_DRAW_BEFORE = "draw the numbers before the capture, into a tensor that the graph reads"
# launched by us, a graph of torch's would draw the same numbers again: only torch's own replay
# moves its generator
_ADOPT_TORCHS = (
    "capture with torch.cuda.CUDAGraph(keep_graph=True), replay that (its replay() moves the "
    f"generator) and read it through Graph.adopt, or {_DRAW_BEFORE}"
)
_UNSEEN = (
    " graphcore saw no refused call meanwhile, so another library made it: one whose error was "
    "caught, a library's first call (warm the step up on the capture stream), a graph of another "
    "library destroyed inside the capture, or, in mode 'global', another thread (a data loader "
    "that pins memory)."
)

# what torch says in a capture without the name of a CUDA error: (phrase, rule, what to do)
_SENTENCES = (
    (
        "offset for a cuda generator",
        "torch's random operators need torch's own capture",
        _ADOPT_TORCHS,
    ),
    (
        "during cuda graph capture",
        "torch does not allow this call in a capture",
        "do it before the capture; host tensors that are copied must be pinned",
    ),
    ("cublas_status_not_initialized", "a library's first call cannot be captured", _WARM_UP),
    ("cublas_status_alloc_failed", "a library's first call cannot be captured", _WARM_UP),
    ("cudnn_status_not_initialized", "a library's first call cannot be captured", _WARM_UP),
)


def note_for(error: BaseException, name: str) -> str:
    """The note that an exception gets which passes through a capture unchanged."""
    note = f"raised inside {name}: there is no graph; the stream is usable"
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        note += (
            "; inside a capture torch cannot give back the blocks it keeps: free them before it "
            "(torch.cuda.empty_cache()), or share one pool between captures, the largest first"
        )
    return note


def explain_failure(
    error: BaseException,
    name: str,
    *,
    troubles: Sequence[Trouble] = (),
    is_emulated: bool = False,
) -> CaptureError | None:
    """The CaptureError for an exception of a captured region, or None where it is not about CUDA.

    Args:
        error: What the region raised.
        name: What the capture is called, ``"the capture begun at file:line"``.
        troubles: What else was seen to go wrong during the capture.
        is_emulated: Whether there is no torch.cuda to advise.
    """
    if not isinstance(error, Exception):
        return None
    location, inner = locate(error.__traceback__)
    if isinstance(error, CaptureError):
        error.location = error.location or location
        return None
    found = _rule_of(error)
    if found is None:
        return None
    code, rule, remedy = found
    if is_emulated and remedy == _ADOPT_TORCHS:
        remedy = _DRAW_BEFORE
    where = f" at {location}" if location else ""
    if inner != location:
        where += f" (in {inner})"
    found_cause = _cause(troubles) if code == _INVALIDATED else _Cause()
    return CaptureError(
        f"{name} failed{where}: {_ending(rule, remedy, found_cause.words)}",
        code=code,
        location=location,
        may_pass=found_cause.may_pass,
    )


def explain_end(
    failure: CudaError,
    name: str,
    *,
    troubles: Sequence[Trouble] = (),
    loose: LooseEnds | None = None,
) -> CaptureError:
    """The CaptureError for a capture whose end failed although its region raised nothing.

    Args:
        failure: What the driver answered.
        name: What the capture is called.
        troubles: What was seen to go wrong during the capture.
        loose: What was not joined, where that was read before the end.
    """
    code, rule, remedy = _rule_of_cuda_error(failure)
    cause = _Cause()
    if code == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED" and loose is not None:
        cause = _Cause(f" Not joined: {loose.words}.", loose.location)
    elif code == _INVALIDATED:
        cause = _cause(troubles)
    return CaptureError(
        f"{name} could not be ended: {_ending(rule, remedy, cause.words)}",
        code=code,
        location=cause.location,
        may_pass=cause.may_pass,
    )


class _Cause(NamedTuple):
    words: str = ""
    location: str | None = None
    may_pass: bool = False


def _cause(troubles: Sequence[Trouble]) -> _Cause:
    """What broke a capture, as far as it was seen, and where."""
    causes = [trouble for trouble in troubles if trouble.code != _INVALIDATED]
    if not causes:
        return _Cause(_UNSEEN, may_pass=True)
    # a refusal is certain, other notes (the garbage collector) are only suspects
    first = next((trouble for trouble in causes if trouble.code), causes[0])
    place = innermost(first.frames)
    return _Cause(
        f" The first thing that was seen to go wrong: {first.what}, at {place}, on thread "
        f"{first.thread!r}.",
        place,
        may_pass=first.number != threading.get_ident(),
    )


def _ending(rule: str, remedy: str | None, more: str = "") -> str:
    todo = f" What to do: {remedy}." if remedy else ""
    return f"{rule}.{more}{todo} There is no graph; the stream is usable."


def _rule_of(error: Exception) -> tuple[str | None, str, str | None] | None:
    """(code, rule, what to do) of an exception that is about CUDA."""
    if isinstance(error, CudaError):
        return _rule_of_cuda_error(error)
    library = type(error).__module__.partition(".")[0]
    if not isinstance(error, RuntimeError) and library not in _CUDA_LIBRARIES:
        return None
    text = str(error)
    first = text.strip().partition("\n")[0]
    code = find_code(text)
    if code is not None:
        known = cuda_error(code, "")
        return code, f"{code} ({first}): {known.description}", known.hint
    lowered = text.lower()
    for phrase, rule, remedy in _SENTENCES:
        if phrase in lowered:
            return None, f"{rule} ({first})", remedy
    return None


def _rule_of_cuda_error(error: CudaError) -> tuple[str, str, str | None]:
    rule = f"{error.code} ({error.call})"
    if error.description:
        rule += f": {error.description}"
    return error.code, rule, error.hint
