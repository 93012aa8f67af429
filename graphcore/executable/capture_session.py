"""Capture: one stream capture from begin to end, and what must hold whatever happens in it.

However its block ends, the capture is ended exactly once, the stream is usable afterwards and a
failed one leaves no memory behind. It assumes that the block runs on the thread that entered it,
and is not locked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from graphcore.driver import LEGACY_STREAM, CaptureMode, Driver, Stream, active
from graphcore.driver.records import CaptureState, GraphHandle
from graphcore.errors import CaptureError, CudaError, LifecycleError
from graphcore.executable.capture_options import (
    LegacyWork,
    check_label,
    check_options,
    check_pool,
    fitting_stream,
    refuse_busy,
    refuse_second,
    stream_for_pool,
)
from graphcore.executable.explain import explain_end, explain_failure
from graphcore.executable.graph import Graph
from graphcore.executable.graph_exec import forget_bindings
from graphcore.executable.handles import GraphResource, NotCopied
from graphcore.executable.location import caller
from graphcore.executable.resting import resting_collector
from graphcore.interop import choose_driver, current_stream, use_stream
from graphcore.interop.torch import MemoryPool
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.lifetime import Owner, OwnerSet, collect

_log = logging.getLogger("graphcore")


class Capture(NotCopied):
    """One capture: made by :func:`capture`, used as a context manager, once.

    ``driver`` and ``stream`` are known from entering on; ``graph`` after the block.
    """

    def __init__(
        self,
        stream: Any,
        *,
        driver: Driver | None,
        mode: CaptureMode,
        on_legacy_work: LegacyWork,
        expect: int | None,
        pool: MemoryPool | None = None,
    ) -> None:
        check_options(mode, on_legacy_work, expect)
        check_pool(pool)
        self.mode = mode
        self.on_legacy_work = on_legacy_work
        self.expect = expect
        self._given = (stream, driver)
        self._driver: Driver | None = None
        self._stream: Stream | None = None
        self._shared_pool = pool
        self._pool: MemoryPool | None = None
        self._active: active.ActiveCapture | None = None
        self._blocks = ExitStack()
        self._annotations: list[tuple[int, int, str]] = []
        self._graph: Graph | None = None
        self._is_used = False
        self._thread = 0

    # ---- what users see ------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """The driver that captures."""
        self._prepare()
        assert self._driver is not None
        return self._driver

    @property
    def stream(self) -> Stream:
        """The capture stream."""
        self._prepare()
        assert self._stream is not None
        return self._stream

    @property
    def graph(self) -> Graph:
        """The graph; LifecycleError before the block has ended well."""
        if self._graph is None:
            raise LifecycleError("capture.graph: expected a capture that has ended without error")
        return self._graph

    def keep(self, obj: Any, label: str = "") -> None:
        """Lets the graph keep ``obj`` (a tensor, a module, a list of them) alive.

        Tensors are also recorded, so that ``GraphExec.check`` can say when one has moved.

        Raises:
            LifecycleError: Outside the block.
            ConfigurationError: ``label`` is no str.
        """
        check_label(label)
        self._under_way("keep").owners.append((obj, label))

    @contextmanager
    def annotate(self, label: str) -> Iterator[None]:
        """Names the nodes captured in the block; blocks nest into paths "outer/inner".

        Raises:
            LifecycleError: Outside the capture's block.
            ConfigurationError: ``label`` is no str.
        """
        check_label(label)
        self._under_way("annotate")
        start = self._node_count()
        try:
            yield
        finally:
            stop = self._node_count()
            if start is not None and stop is not None:
                self._annotations.append((start, stop, label))

    def warm_up(self, step: Callable[[], object], times: int) -> None:
        """Runs ``step`` where the capture will, for real, and waits for it.

        It runs after the work that the current stream has by now; work of other streams that it
        reads must be ordered before, as for any stream. The device is never waited for as a whole:
        that would break the captures of other threads.

        Raises:
            LifecycleError: The capture is under way or over.
            CaptureError: As on entering.
        """
        self._refuse_reuse()
        refuse_second()
        self._prepare()
        self._follow_current_stream()
        try:
            with self._surroundings():
                for _ in range(times):
                    step()
        except BaseException as error:
            try:  # what ran of it still writes memory
                self.stream.synchronize()
            except CudaError as second:
                error.add_note(f"waiting for the warm-up that failed: {second}")
            raise
        self.stream.synchronize()

    def __repr__(self) -> str:
        if self._graph is not None:
            state = f"ended with {self._graph!r}"
        else:
            state = "under way" if self._active else "over" if self._is_used else "not begun"
        return f"<Capture {self.mode} {state}>"

    # ---- begin and end -------------------------------------------------------------------------

    def __enter__(self) -> Capture:
        self._refuse_reuse()
        refuse_second()
        self._prepare()
        self._is_used = True
        refuse_busy(self.driver, self.stream)  # given streams may have become busy since
        try:
            self._begin(f"the capture begun at {caller()} on stream {self.stream.handle:#x}")
        except BaseException:
            self._abandon()
            raise
        return self

    def _begin(self, name: str) -> None:
        driver, stream = self.driver, self.stream.handle
        with ExitStack() as blocks:
            blocks.enter_context(resting_collector())
            blocks.enter_context(self._surroundings())
            forget_bindings(driver)
            capture = active.ActiveCapture(driver, stream, self.mode, name)
            active.push(capture)  # before it begins: what other threads drop waits from here on
            try:
                driver.begin_capture(stream, self.mode)
            except BaseException:
                active.pop()
                raise
            self._active = capture
            self._thread = threading.get_ident()
            blocks.push(self._end)
            blocks.enter_context(driver.recording(stream))
            self._blocks = blocks.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active is not None and self._thread != threading.get_ident():
            raise CaptureError(
                f"{self._active.name}: expected to be ended by the thread that began it, got "
                "another; it is still under way there",
                code="CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            )
        try:
            self._blocks.__exit__(kind, error, trace)
        except BaseException:
            self._abandon()
            raise
        if error is not None:
            self._abandon()

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the capture; raises what its failure, or the block's, means."""
        del kind, trace
        assert self._active is not None
        name, owners = self._active.name, self._active.owners
        self._active = None
        handle, failure = self._end_once()
        if error is not None:
            if handle is not None:
                GraphResource(self.driver, handle, owned=True)  # dropped, and so destroyed, here
            explained = explain_failure(error, name)
            if explained is not None:
                raise explained from error
            error.add_note(f"raised inside {name}: there is no graph; the stream is usable")
            return
        if failure is not None:
            raise explain_end(failure, name) from failure
        assert handle is not None
        self._finish(handle, name, owners)

    def _end_once(self) -> tuple[GraphHandle | None, CudaError | None]:
        driver, stream = self.driver, self.stream.handle
        handle, failure = None, None
        try:
            handle = driver.end_capture(stream)
        except CudaError as error:
            failure = error
            # after any of CUDA's own refusals it is over; only a call that did nothing is repeated
            if driver.capture_status(stream).state is not CaptureState.NONE:
                _end_quietly(driver, self.stream, error)
        finally:
            active.pop()
        return handle, failure

    def _finish(self, handle: GraphHandle, name: str, kept: list[tuple[object, str]]) -> None:
        try:
            owners = self._owners(kept)
        except BaseException:  # a user's container may raise when it is looked through
            GraphResource(self.driver, handle, owned=True)  # dropped, and so destroyed, here
            raise
        graph = Graph(self.driver, handle, owners=owners, annotations=tuple(self._annotations))
        count = len(self.driver.nodes(handle))
        if self.expect is not None and count < self.expect:
            graph.close()
            raise CaptureError(
                f"{name}: expect: expected at least {self.expect} nodes, got {count}; work went to "
                "another stream, or ran on the host. There is no graph; the stream is usable."
            )
        if count:
            _log.info("%s ended with %d nodes", name, count)
        else:
            _log.warning(
                "%s ended with an empty graph: its block launched nothing on the capture stream",
                name,
            )
        if self._pool is not None:
            self._pool.captures += 1
        self._graph = graph

    def _owners(self, kept: list[tuple[object, str]]) -> OwnerSet:
        owners = [Owner(self.stream, "capture stream")]
        if self._pool is not None:
            owners.append(Owner(self._pool, "torch memory pool"))
        for obj, label in kept:
            owners.extend(collect(obj, label))
        return OwnerSet(owners)

    def _abandon(self) -> None:
        """Drops everything a failed capture holds: pool, stream, owners."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._pool = None
        self._blocks = ExitStack()

    # ---- helpers -------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Chooses driver and stream, makes the pool; the first call decides."""
        if self._driver is not None:
            return
        stream, driver = self._given
        chosen = choose_driver(stream) if driver is None else checked_driver(driver)
        shared = self._shared_pool
        if shared is not None:
            stream = stream_for_pool(chosen, stream, shared, self.on_legacy_work)
        self._stream = fitting_stream(chosen, stream, self.on_legacy_work)
        if chosen.is_emulated:
            self._pool = None  # what it records keeps its memory by itself
        else:
            self._pool = MemoryPool(chosen.device) if shared is None else shared
        self._driver = chosen

    def _follow_current_stream(self) -> None:
        """Makes the capture stream wait for what the current stream has by now."""
        current = current_stream(self.driver)
        if current in (0, LEGACY_STREAM) and self.stream.is_blocking:
            return  # CUDA orders the two by itself
        event = self.driver.event()
        self.driver.record_event(event.handle, current)
        self.stream.wait(event)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with use_stream(self.driver, self.stream):
            if self._pool is None:
                yield
                return
            with self._pool.use():
                yield

    def _under_way(self, what: str) -> active.ActiveCapture:
        if self._active is None:
            raise LifecycleError(
                f"capture.{what}: expected a capture under way; use it in its block"
            )
        return self._active

    def _node_count(self) -> int | None:
        """How many nodes the graph has by now; None where the capture was invalidated."""
        try:
            graph = self.driver.capture_status(self.stream.handle).graph
            return None if graph is None else len(self.driver.nodes(graph))
        except CudaError:
            return None

    def _refuse_reuse(self) -> None:
        if self._is_used:
            raise LifecycleError("capture: expected a capture not used before; one captures once")


def _end_quietly(driver: Driver, stream: Stream, error: CudaError) -> None:
    try:
        driver.destroy_graph(driver.end_capture(stream.handle))
    except CudaError as second:
        error.add_note(f"ending the capture again: {second}")
