"""The end of a capture: asked for exactly once, and what its graph is measured against.

After :func:`end_once` the stream has left its capture, whatever went wrong, and a graph that nobody
takes is destroyed.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import ExitStack, suppress

from graphcore.driver import Driver, active
from graphcore.driver.active import ActiveCapture
from graphcore.driver.records import CaptureState, GraphHandle, StreamHandle
from graphcore.errors import CaptureError, CudaError
from graphcore.executable.expectation import WHERE_WORK_GOES, Expectation, unmet
from graphcore.executable.graph import Graph
from graphcore.executable.handles import GraphResource

_log = logging.getLogger("graphcore")


def end_once(
    driver: Driver, stream: StreamHandle, capture: ActiveCapture
) -> tuple[GraphHandle | None, CudaError | None]:
    """Ends the capture of ``stream`` and takes it off this thread's stack.

    Returns:
        The graph, or None and the driver's refusal.
    """
    handle = None
    try:
        try:
            handle = driver.end_capture(stream)
        except CudaError as error:
            # after any of CUDA's own refusals it is over; only a call that did nothing is repeated
            if driver.capture_status(stream).state is not CaptureState.NONE:
                _end_quietly(driver, stream, error)
            active.drop(capture)
            return None, error  # in no variable of this frame, which its traceback holds
        active.drop(capture)
    except BaseException:  # Ctrl-C, here or in what had waited for the end
        if handle is not None:
            destroy_graph(driver, handle)
        abandon(driver, stream, capture)
        raise
    return handle, None


def abandon(driver: Driver, stream: StreamHandle, capture: ActiveCapture) -> None:
    """Ends what an interruption left of a capture: begun or not, ended or not."""
    try:
        is_over = capture not in active.under_way()  # then the stream may be somebody else's
        if not is_over and driver.capture_status(stream).state is not CaptureState.NONE:
            driver.destroy_graph(driver.end_capture(stream))
    except CudaError as error:  # of a capture that was broken: it is over all the same
        _log.debug("%s was given up: %s", capture.name, error)
    finally:
        active.drop(capture)


def forget_in_stacks(error: BaseException) -> None:
    """Clears the frames of Python's own ExitStack that ``error`` was raised through.

    Each keeps it in a variable, and its traceback keeps the frame: a cycle that would hold all of a
    failed capture until Python's collector runs.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is ExitStack.__exit__.__code__:
            with suppress(RuntimeError):  # a stack of the user's that is being left just now
                frame.clear()


def destroy_graph(driver: Driver, handle: GraphHandle) -> None:
    """Destroys a graph that nobody takes, once no capture is under way."""
    GraphResource(driver, handle, owned=True)  # dropped, and so destroyed, here


def check_finished(graph: Graph, name: str, expect: Expectation | None) -> None:
    """Says in the log what was captured; CaptureError, and closes it, where that is too little."""
    count = len(graph.driver.nodes(graph.handle))
    missing = None if expect is None else unmet(expect, graph)
    if missing is not None:
        graph.close()
        raise CaptureError(
            f"{name}: expect: {missing}. {WHERE_WORK_GOES} There is no graph; the stream is usable."
        )
    if count:
        _log.info("%s ended with %d nodes", name, count)
    else:
        _log.warning(
            "%s ended with an empty graph: its block launched nothing on the capture stream. %s",
            name,
            WHERE_WORK_GOES,
        )


def _end_quietly(driver: Driver, stream: StreamHandle, error: BaseException) -> None:
    try:
        driver.destroy_graph(driver.end_capture(stream))
    except CudaError as second:
        error.add_note(f"ending the capture again: {second}")
