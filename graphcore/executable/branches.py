"""The branches of a capture: forks that are joined again, and what was left unjoined.

A :class:`Fork` sends the work of its block to a side stream, and lets the capture go on behind it.
What has no path to the capture's end is found before that end is asked for: afterwards CUDA has
destroyed the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from graphcore.driver import Driver, Stream, active, as_stream
from graphcore.driver.active import ActiveCapture
from graphcore.driver.records import CaptureState, GraphHandle, NodeHandle, StreamHandle
from graphcore.errors import (
    CacheTypeError,
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
)
from graphcore.executable.handles import NotCopied
from graphcore.executable.location import caller
from graphcore.graph.reading import Annotation, read
from graphcore.interop import use_stream
from graphcore.interop.torch_workspaces import expects_products

_MOST_LEAVES = 8


@dataclass(frozen=True)
class LooseEnds:
    """What a capture leaves unjoined: streams and leaf nodes in words, and the fork's line."""

    words: str
    location: str | None = None


class Fork(NotCopied):
    """A branch of a capture on a stream of its own. Made by :meth:`Capture.fork`.

    It begins where the capture is when it is made: work of its blocks comes after all that was
    captured before, and runs beside what is captured after. ``with fork:`` sends the work of the
    block to ``stream`` (the current one of torch and CuPy meanwhile). Use it on the capture's
    thread.
    """

    def __init__(
        self, driver: Driver, capture: ActiveCapture, stream: Stream, *, joins: bool, place: str
    ) -> None:
        self.driver = driver
        self.stream = stream
        self.place = place
        self._capture = capture
        self._joins = joins
        self._thread = threading.get_ident()
        self._block: ExitStack | None = None
        self._came_from = capture.stream
        self._is_joined = False
        self._order(capture.stream, stream.handle)

    @property
    def is_joined(self) -> bool:
        """Whether the capture comes after the branch again."""
        return self._is_joined

    def join(self) -> None:
        """Makes what is captured from here on come after the branch; a second call does nothing.

        Raises:
            LifecycleError: Inside the fork's own block, on another thread, or after the capture.
        """
        self._check("join")
        if self._block is not None:
            raise LifecycleError("fork.join: expected to be called outside the fork's own block")
        if not self._is_joined:
            self._order(self.stream.handle, self._capture.stream)
            self._is_joined = True

    def __enter__(self) -> Fork:
        self._check("with fork")
        if self._block is not None or self._is_joined:
            state = "joined" if self._is_joined else "entered already"
            raise LifecycleError(
                f"fork: expected one whose branch is open, got one that is {state}; a branch that "
                "continues later is a fork of its own, capture.fork(side.stream)"
            )
        self._came_from = self._capture.stream
        try:
            with ExitStack() as blocks:
                blocks.enter_context(use_stream(self.driver, self.stream))
                blocks.enter_context(self.driver.recording(self.stream.handle))
                self._block = blocks.pop_all()
            self._capture.stream = self.stream.handle
            return self
        except BaseException as error:  # Ctrl-C
            self.leave(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.leave(kind, error, trace)
        except BaseException as failure:  # Ctrl-C
            self.leave(type(failure), failure, failure.__traceback__)
            raise
        if not self._joins or self._is_over:
            return
        try:
            self.join()
        except CudaError as second:  # of a capture that the block broke: the first error counts
            if error is None:
                raise
            error.add_note(f"joining the fork: {second}")

    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Sends work where it went before the block; nothing outside it."""
        if self._block is not None:
            self._capture.stream = self._came_from
            self._block.__exit__(kind, error, trace)  # a second time only what is left of it
            self._block = None

    @property
    def _is_over(self) -> bool:
        return self._capture not in active.under_way()

    def _check(self, what: str) -> None:
        if self._is_over:
            raise LifecycleError(f"{what}: expected a capture under way, got one that is over")
        if self._thread != threading.get_ident():
            raise LifecycleError(f"{what}: expected the thread that captures, got another")

    def _order(self, before: StreamHandle, after: StreamHandle) -> None:
        """Makes what comes on ``after`` come behind what ``before`` has by now."""
        event = self.driver.event()
        self.driver.record_event(event.handle, before)
        self.driver.wait_event(after, event.handle)

    def __repr__(self) -> str:
        state = "joined" if self._is_joined else "open"
        return f"<Fork {state} on stream {self.stream.handle:#x}, begun at {self.place}>"


def fork_stream(driver: Driver, capture: ActiveCapture, given: Any, origin: Stream) -> Stream:
    """The side stream of a fork: a lent one as the capture stream is, or the given one.

    Raises:
        ConfigurationError: A default stream, the branch's own, or a blocking one where legacy work
            is to be ignored.
        CacheTypeError: No stream, or one of another driver or device.
        CaptureError: Somebody else captures on it.
    """
    if given is None:
        before = driver.exchange_capture_mode("relaxed")  # making a stream may be unsafe to CUDA
        try:
            return driver.capture_stream(
                blocking=capture.breaks_on_legacy_work, products=expects_products(driver)
            )
        finally:
            driver.exchange_capture_mode(before)
    stream = as_stream(driver, given)
    if stream.handle in (0, 1, 2):
        raise ConfigurationError(
            f"stream: expected a stream that can capture, got default stream {stream.handle}"
        )
    if stream.handle in (capture.stream, origin.handle):
        raise ConfigurationError(
            f"stream: expected a side stream, got {stream.handle:#x}, which captures already"
        )
    status = driver.capture_status(stream.handle)
    if status.state is not CaptureState.NONE:
        if status.sequence != driver.capture_status(origin.handle).sequence:
            raise CaptureError(
                f"stream: expected one that is not capturing, got {stream.handle:#x}, on which "
                "somebody else captures; it was not harmed"
            )
        return stream  # a branch of before, which continues
    device = driver.stream_device(stream.handle)
    if device != driver.device:
        raise CacheTypeError(
            f"stream: expected one of device {driver.device}, got one of device {device}"
        )
    if stream.is_blocking and not capture.breaks_on_legacy_work:
        raise ConfigurationError(
            "stream: expected a non-blocking one, as the capture's is (on_legacy_work='ignore'), "
            "got a blocking one, which legacy work would break"
        )
    return stream


def begin_fork(
    driver: Driver, capture: ActiveCapture, given: Any, origin: Stream, *, joins: bool
) -> Fork:
    """Begins a branch at the capture's present place; raises as :func:`fork_stream`."""
    stream = fork_stream(driver, capture, given, origin)
    fork = Fork(driver, capture, stream, joins=joins, place=caller())
    capture.owners.append((stream, "fork stream"))
    return fork


def loose_ends(
    driver: Driver,
    origin: StreamHandle,
    forks: Sequence[Fork],
    annotations: Sequence[Annotation],
) -> LooseEnds | None:
    """What has no path to the end of the capture of ``origin``; None where all is joined.

    Costs a reading of the edges (about 1 us each); names are read only where something is loose.
    """
    try:
        status = driver.capture_status(origin)
        if status.graph is None:
            return None
        sources = {edge.source for edge in driver.edges(status.graph)}
        leaves = [node for node in driver.nodes(status.graph) if node not in sources]
        loose = set(leaves) - set(status.frontier)
        if not loose:
            return None
        return _named(driver, status.graph, status.sequence, loose, forks, annotations)
    except CudaError:
        return None  # the end of the capture will say what is wrong


def _named(
    driver: Driver,
    graph: GraphHandle,
    sequence: int,
    loose: set[NodeHandle],
    forks: Sequence[Fork],
    annotations: Sequence[Annotation],
) -> LooseEnds:
    names = {
        node.handle: f"node {node.index} {node.short_name}"
        + (f" ({node.label})" * bool(node.label))
        for node in read(driver, graph, annotations=annotations).nodes
        if node.handle in loose
    }
    words, location, left = [], None, dict(names)
    own = {fork.stream.handle: fork for fork in forks}
    for stream in [*own, *(each for each in driver.own_streams() if each not in own)]:
        status = driver.capture_status(stream)
        found = [left.pop(node) for node in status.frontier if node in left]
        if not found or status.sequence != sequence:
            continue
        fork = own.get(stream)
        begun = f"the fork begun at {fork.place} on " if fork else ""
        words.append(f"{begun}stream {stream:#x}, which ends in {_some(found)}")
        if fork and location is None:
            location = fork.place
    if left:
        words.append(f"what no stream that graphcore knows ends in, {_some(left.values())}")
    return LooseEnds("; ".join(words), location)


def _some(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_LEAVES} more" if len(names) > _MOST_LEAVES else ""
    return ", ".join(names[:_MOST_LEAVES]) + more
