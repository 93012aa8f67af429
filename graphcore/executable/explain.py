"""Why a capture failed, in words: which call, which Python line, which rule, what to do.

Takes the exceptions of graphcore, torch and CuPy; anything that has nothing to do with CUDA is not
explained and stays the user's.
"""

from __future__ import annotations

from graphcore.driver.codes import cuda_error, find_code
from graphcore.errors import CaptureError, CudaError
from graphcore.executable.location import locate

_CUDA_LIBRARIES = ("torch", "cupy", "cupy_backends", "cuda")
_WARM_UP = "warm the step up on the capture stream (capture_function does)"

# what torch says in a capture without the name of a CUDA error: (phrase, rule, what to do)
_SENTENCES = (
    (
        "offset for a cuda generator",
        "torch's random operators need torch's own capture",
        "capture with torch.cuda.CUDAGraph(keep_graph=True) and give it to Graph.adopt, or draw "
        "the numbers before the capture",
    ),
    (
        "during cuda graph capture",
        "torch does not allow this call in a capture",
        "do it before the capture; host tensors that are copied must be pinned",
    ),
    ("cublas_status_not_initialized", "a library's first call cannot be captured", _WARM_UP),
    ("cudnn_status_not_initialized", "a library's first call cannot be captured", _WARM_UP),
)


def explain_failure(error: BaseException, name: str) -> CaptureError | None:
    """The CaptureError for an exception of a captured region, or None where it is not about CUDA.

    Args:
        error: What the region raised.
        name: What the capture is called, ``"the capture begun at file:line"``.
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
    where = f" at {location}" if location else ""
    if inner != location:
        where += f" (in {inner})"
    return CaptureError(
        f"{name} failed{where}: {_ending(rule, remedy)}", code=code, location=location
    )


def explain_end(failure: CudaError, name: str) -> CaptureError:
    """The CaptureError for a capture whose end failed although its region raised nothing."""
    code, rule, remedy = _rule_of_cuda_error(failure)
    return CaptureError(f"{name} could not be ended: {_ending(rule, remedy)}", code=code)


def _ending(rule: str, remedy: str | None) -> str:
    todo = f" What to do: {remedy}." if remedy else ""
    return f"{rule}.{todo} There is no graph; the stream is usable."


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
