"""capture() and capture_function(): turn what Python launches into a :class:`Graph`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from graphcore.advice import instead
from graphcore.driver import CaptureMode, Driver
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.executable.capture_options import LegacyWork
from graphcore.executable.capture_session import Capture
from graphcore.executable.expectation import Expectation
from graphcore.executable.graph import Graph
from graphcore.interop.torch import MemoryPool


def capture(
    stream: Any = None,
    *,
    driver: Driver | None = None,
    mode: CaptureMode = "thread_local",
    on_legacy_work: LegacyWork = "error",
    expect: Expectation | None = None,
    pool: MemoryPool | None = None,
) -> Capture:
    """Captures what a block launches, through torch, CuPy and our kernels alike.

    ``with graphcore.capture() as capture: step()``, then ``capture.graph``; in the block,
    ``capture.fork()`` branches, ``capture.annotate()`` names nodes, ``capture.keep()`` keeps.

    For the block, the capture stream is the current one of torch and CuPy, torch allocates from a
    pool that the graph owns, autocast keeps no casts of weights (the graph casts them anew), and
    Python's cyclic garbage collector rests (collecting another graph would break the capture). Warm
    the step up on the same stream before: a library's first call cannot be captured.

    Args:
        stream: Where to capture: a stream of graphcore, torch, CuPy or cuda.core, a handle, or
            None for one that is lent: no graph that lives was captured on it.
        driver: None is the driver of ``stream``, else what ``open_driver`` would open.
        mode: What other threads may do meanwhile. "thread_local": this thread must not make
            potentially unsafe calls (allocation, say); "global": no thread; "relaxed": all may.
        on_legacy_work: What becomes of work on the legacy default stream. "error": it makes the
            capture fail (needs a blocking stream). "ignore": it runs at once, is not in the graph,
            and nothing says so (needs a non-blocking stream; torch's own are).
        expect: What must be captured at least; less is a CaptureError that names what is missing.
            A number of nodes; or a GraphPlan, GraphSnapshot or Graph, whose kernels (by name),
            copies, fills, callbacks and conditionals count. None: an empty graph is only
            reported, as a warning in the log.
        pool: The torch memory pool to capture into, shared with other captures (see
            :class:`graphcore.interop.torch.MemoryPool` for what that asks of launches). None: a
            new one that the graph alone owns. A failed capture leaves what it allocated there free
            for the next one. Nothing is shared on the emulated driver.

    Raises:
        ConfigurationError: An option, or a stream that does not fit ``on_legacy_work``.
        CacheTypeError: ``stream`` is not a stream, or one of another driver; ``pool`` is no pool.
        CaptureError: On entering: a capture is under way on this thread (which is not harmed), or
            ``GRAPHCORE_DISABLE=1``. On leaving: a call in the block is not allowed in a capture;
            the error carries CUDA's code, the Python line, the rule and the remedy. Any other
            exception of the block passes unchanged, with a note.
    """
    if callable(stream) and not hasattr(stream, "__cuda_stream__"):
        raise CacheTypeError(
            f"stream: expected a stream or None, got {type(stream).__name__}, which can be called: "
            "capture_function(function, *arguments) captures a function; capture() is a block"
        )
    return Capture(
        stream,
        driver=driver,
        mode=mode,
        on_legacy_work=on_legacy_work,
        expect=expect,
        pool=pool,
    )


def capture_function(
    fn: Callable[..., Any], *args: Any, warmup: int = 3, **capture_options: Any
) -> Graph:
    """Warms ``fn(*args)`` up on the capture stream, then captures it.

    Warm-up and capture share one stream and one torch memory pool. What ``fn`` returns in the
    capture is ``graph.outputs``: static tensors that every launch writes again. ``fn`` itself,
    ``args`` and the tensors inside them are kept alive by the graph: for ``fn`` those in its
    variables and in what it is bound to. ``GraphExec.check`` says where another stands there now.

    Args:
        fn: What to capture; it runs ``warmup`` times for real and once for the capture.
        args: Its arguments, by position; a lambda or functools.partial gives others.
        warmup: Runs before the capture.
        capture_options: As of :func:`capture`.

    Raises:
        ConfigurationError: ``fn`` cannot be called, ``warmup`` is no int or negative, an
            unknown option, or as of :func:`capture`.
        CaptureError: As of :func:`capture`.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"fn: expected a callable, got {type(fn).__name__}{instead(fn, 'function')}"
        )
    if isinstance(warmup, bool) or not isinstance(warmup, int):
        raise ConfigurationError(f"warmup: expected an int, got {warmup!r}")
    if warmup < 0:
        raise ConfigurationError(f"warmup: expected at least 0, got {warmup}")
    unknown = capture_options.keys() - inspect.signature(capture).parameters.keys()
    if unknown:
        raise ConfigurationError(
            f"capture_function: expected options of capture, got {', '.join(sorted(unknown))}; "
            "arguments of the function are given by position: use a lambda for those by name"
        )
    capturing = capture(**capture_options)
    capturing.warm_up(lambda: fn(*args), warmup)
    with capturing:
        for index, value in enumerate(args):
            capturing.keep(value, f"argument {index}")
        capturing.keep(fn, "function")
        outputs = fn(*args)
        capturing.keep(outputs, "output")
    capturing.graph.outputs = outputs
    return capturing.graph
