"""CUDA's error codes as facts: number, one sentence of ours, and what to do about it.

Only codes that a caller of graphcore can meet are listed; the CUDA driver fills in its own name and
sentence for any other.
"""

from __future__ import annotations

from graphcore.driver.code_numbers import OTHER_NUMBERS
from graphcore.errors import CaptureError, CudaError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

# name -> (number, sentence, hint)
_CODES: dict[str, tuple[int, str, str | None]] = {
    "CUDA_ERROR_INVALID_VALUE": (1, "an argument is outside what the call accepts", None),
    "CUDA_ERROR_OUT_OF_MEMORY": (
        2,
        "the device has not enough free memory",
        "close graphs, executables and buffers that are not needed (memory_report() tells what "
        "takes it), give a GraphCache max_bytes=, or take smaller sizes; torch.cuda.empty_cache() "
        "gives back what torch keeps unused. Nothing was done: the call can be made again",
    ),
    "CUDA_ERROR_NOT_INITIALIZED": (3, "the driver was not initialised", None),
    "CUDA_ERROR_DEINITIALIZED": (4, "the driver is shutting down", None),
    "CUDA_ERROR_NO_DEVICE": (100, "no CUDA device was found", "run `graphcore doctor`"),
    "CUDA_ERROR_INVALID_DEVICE": (101, "no device has this number", None),
    "CUDA_ERROR_INVALID_CONTEXT": (201, "the context is not valid for this call", None),
    "CUDA_ERROR_INVALID_SOURCE": (300, "the kernel source is not valid", None),
    "CUDA_ERROR_INVALID_HANDLE": (
        400,
        "the handle is not valid (destroyed, or of another kind)",
        None,
    ),
    "CUDA_ERROR_ILLEGAL_STATE": (401, "the object is not in a state that allows the call", None),
    "CUDA_ERROR_NOT_FOUND": (500, "the named symbol was not found", None),
    "CUDA_ERROR_NOT_READY": (600, "the work has not finished", None),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (
        700,
        "a kernel touched memory it does not own",
        "the context is lost; a graph whose buffer was freed does this: see docs/errors.md",
    ),
    "CUDA_ERROR_ASSERT": (710, "a device-side assertion failed", "the context is lost"),
    "CUDA_ERROR_LAUNCH_FAILED": (719, "a kernel failed while running", "the context is lost"),
    "CUDA_ERROR_NOT_PERMITTED": (800, "the operation is not permitted", None),
    "CUDA_ERROR_NOT_SUPPORTED": (801, "the operation is not supported here", None),
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (
        900,
        "the operation is not permitted while a stream is capturing",
        "move host reads, synchronisation, allocation and first library calls before the capture; "
        "warm the step up on the capture stream",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": (
        901,
        "an earlier error invalidated the capture",
        "the first error says why; the capture ends without a graph",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": (
        902,
        "the operation would join two independent captures",
        "record and wait on events of one capture only",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": (
        903,
        "the capture was not begun on this stream",
        "end a capture on the stream that began it",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": (
        904,
        "a stream forked into the capture was not joined back",
        "make the capture's stream wait for an event recorded on the side stream",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": (
        905,
        "a dependency would cross the border of the capture",
        "record the event again inside the capture, on a capturing stream",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": (
        906,
        "work on the legacy stream would depend on the capture",
        "use the capture's stream, or capture with on_legacy_work='ignore'",
    ),
    "CUDA_ERROR_CAPTURED_EVENT": (
        907,
        "the event was last recorded in a capture",
        "query and synchronise only events recorded outside captures",
    ),
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": (
        908,
        "the capture was begun by another thread and its mode is not relaxed",
        "end the capture on the thread that began it",
    ),
    "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE": (
        910,
        "the executable cannot take this graph",
        "re-instantiate; the outcome names the node and the rule",
    ),
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": (
        912,
        "the cluster is too large or does not divide the grid",
        None,
    ),
    "CUDA_ERROR_UNKNOWN": (999, "an internal error of the driver", None),
}

_WAIT = (
    "a capture runs nothing, so there is nothing to wait for or to ask about: do it before or "
    "after the capture; where a library does, warm the step up on the capture stream"
)
_MEMORY = (
    "allocate and free before the capture; where a library does, warm the step up on the capture "
    "stream; mode='relaxed' allows it"
)
_COPY = (
    "a copy between host and device waits for the device: do it before or after the capture, or "
    "copy on the capture stream with Driver.copy"
)
_PINNED = (
    "page-locked memory is the host's, and cannot be swapped out: free what is pinned and not "
    "needed, or leave part of the data pageable"
)
_NO_STATE = (
    "an event that was last recorded inside a capture has neither a state nor a time: record it "
    "again outside, or record it with external=True, which every replay does anew"
)
# (name, call) -> what to do, where the call says more than the code
_HINTS: dict[tuple[str, str], str] = {
    **{
        ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", call): hint
        for hint, calls in (
            (_WAIT, "cuStreamSynchronize cuStreamQuery cuEventSynchronize cuEventQuery"),
            (_WAIT, "cuCtxSynchronize"),
            (_MEMORY, "cuMemAlloc cuMemFree cuMemHostAlloc cuMemFreeHost"),
            (_COPY, "cuMemcpyDtoH cuMemcpyHtoD"),
            (
                "launch it with GraphExec.launch, which makes it a child node (Graph.adopt takes "
                "another library's graph), or before or after the capture",
                "cuGraphLaunch",
            ),
            (
                "instantiate before or after the capture, or capture with mode='relaxed'",
                "cuGraphInstantiateWithParams",
            ),
            (
                "destroy it after the capture, as graphcore's own do; where the garbage collector "
                "did, collect before the capture",
                "cuGraphExecDestroy",
            ),
        )
        for call in calls.split()
    },
    (OUT_OF_MEMORY, "cuMemHostAlloc"): _PINNED,
    ("CUDA_ERROR_INVALID_VALUE", "cuStreamWaitEvent"): (
        "an event that was last recorded in another capture, which is over, cannot be waited for: "
        "record it again, inside this capture where one is under way"
    ),
    ("CUDA_ERROR_INVALID_VALUE", "cuEventQuery"): _NO_STATE,
    ("CUDA_ERROR_INVALID_VALUE", "cuEventSynchronize"): _NO_STATE,
    ("CUDA_ERROR_INVALID_VALUE", "cuEventElapsedTime"): _NO_STATE,
    ("CUDA_ERROR_CAPTURED_EVENT", "cuEventElapsedTime"): _NO_STATE,
}

# after these the context answers every later call with an error
_STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
    }
)

CAPTURE_CODES = frozenset(name for name, (number, _, _) in _CODES.items() if 900 <= number <= 908)


def cuda_error(
    code: str,
    call: str,
    *,
    number: int | None = None,
    description: str | None = None,
    node: int | None = None,
    hint: str | None = None,
) -> CudaError:
    """A :class:`CudaError` for ``code``, filled in from the table where the caller says nothing.

    ``number``, ``description`` and ``hint`` override the table (the CUDA driver passes its own
    sentence for codes that are not listed).
    """
    known_number, sentence, known_hint = _CODES.get(code, (_number_of(code), "", None))
    return CudaError(
        code,
        call,
        number=known_number if number is None else number,
        description=sentence if description is None else description,
        node=node,
        hint=hint or _HINTS.get((code, call), known_hint),
        is_sticky=code in _STICKY,
    )


def code_names() -> list[str]:
    """The names of all CUDA errors."""
    return [*_CODES, *(f"CUDA_ERROR_{name}" for name in OTHER_NUMBERS)]


def _number_of(code: str) -> int:
    return OTHER_NUMBERS.get(code.removeprefix("CUDA_ERROR_"), -1)


def memory_words(free: int, total: int, asked: int | None = None) -> str:
    """How much was asked for, where that is known, and how much there was, in bytes."""
    if asked is None:
        return f"{free} of {total} bytes are free"
    return f"asked for {asked} bytes, {free} of {total} are free"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception (ours, torch's, CuPy's or Python's) says that memory ran out."""
    if isinstance(error, (CudaError, CaptureError)):
        return error.code == OUT_OF_MEMORY
    if any(kind.__name__ in _MEMORY_KINDS for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and find_code(str(error)) == OUT_OF_MEMORY


def find_code(text: str) -> str | None:
    """The name of the CUDA error that another library's message speaks of, or None.

    Looks for ``CUDA_ERROR_...`` and ``cudaError...`` names and for the driver's own sentences
    about captures, so that an exception of torch or CuPy can be explained.
    """
    for name in _CODES:
        camel = "cudaError" + "".join(
            word.capitalize() for word in name.removeprefix("CUDA_ERROR_").split("_")
        )
        if name in text or camel in text:
            return name
    lowered = text.lower()
    return next((name for phrase, name in _PHRASES if phrase in lowered), None)


_MEMORY_KINDS = frozenset({"OutOfMemoryError", "MemoryError"})  # of torch and CuPy; of Python

# how torch and CuPy word the capture errors, most specific first
_PHRASES = (
    ("not permitted when stream is capturing", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    ("previous error during capture", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    ("implicit dependency on a current capture", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    ("dependency created on uncaptured work", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    ("merge of two independent capture", "CUDA_ERROR_STREAM_CAPTURE_MERGE"),
    ("not joined to primary stream", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    ("unjoined work", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    ("cuda error: invalid argument", "CUDA_ERROR_INVALID_VALUE"),
    ("cuda error: out of memory", OUT_OF_MEMORY),
)
