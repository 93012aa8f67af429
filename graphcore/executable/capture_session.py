"""Capture: one stream capture from begin to end, and what must hold whatever happens in it.

However its block ends, the capture is ended exactly once, the stream is usable afterwards and a
failed one leaves no memory behind. It assumes that the block runs on the thread that entered it,
and is not locked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

from graphcore.advice import advises
from graphcore.driver import CaptureMode, Driver, Stream, active
from graphcore.driver.records import GraphHandle
from graphcore.errors import CaptureError, CudaError, LifecycleError
from graphcore.executable.branches import Fork, begin_fork, loose_ends
from graphcore.executable.capture_ending import (
    abandon,
    check_finished,
    destroy_graph,
    end_once,
    forget_in_stacks,
)
from graphcore.executable.capture_options import (
    LegacyWork,
    check_label,
    check_options,
    check_pool,
    refuse_busy,
    refuse_second,
)
from graphcore.executable.capture_place import CapturePlace
from graphcore.executable.explain import explain_end, explain_failure, note_for
from graphcore.executable.graph import Graph
from graphcore.executable.graph_exec import forget_bindings
from graphcore.executable.handles import NotCopied
from graphcore.executable.legacy_work import follow_current_stream
from graphcore.executable.location import caller
from graphcore.executable.resting import resting_collector
from graphcore.interop.torch import MemoryPool, annotate_modules
from graphcore.interop.torch_collectives import watching_collectives

_log = logging.getLogger("graphcore")


@advises
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
        expect: Any,
        pool: MemoryPool | None = None,
    ) -> None:
        check_options(mode, on_legacy_work, expect)
        check_pool(pool)
        self.mode = mode
        self.on_legacy_work = on_legacy_work
        self.expect = expect
        self._given = (stream, driver, pool)
        self._chosen: CapturePlace | None = None
        self._multiplies = False
        self._active: active.ActiveCapture | None = None
        self._blocks = ExitStack()
        self._annotations: list[tuple[int, int, str]] = []
        self._forks: list[Fork] = []
        self._graph: Graph | None = None
        self._is_used = False
        self._thread = 0

    # ---- what users see ------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """The driver that captures."""
        return self._place.driver

    @property
    def stream(self) -> Stream:
        """The capture stream."""
        return self._place.stream

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
        start = self._node_count(label)
        try:
            yield
        finally:
            stop = None if start is None else self._node_count(label)
            if start is not None and stop is not None:
                self._annotations.append((start, stop, label))

    def annotate_modules(
        self, module: Any, names: Iterable[str] | None = None
    ) -> AbstractContextManager[None]:
        """Names the nodes of each submodule's forward; as :func:`interop.torch.annotate_modules`.

        Raises:
            LifecycleError: Outside the capture's block.
            ConfigurationError: A name that the module does not have.
        """
        self._under_way("annotate_modules")
        return annotate_modules(self, module, names)

    def fork(self, stream: Any = None, *, join: bool = True) -> Fork:
        """Begins a branch: ``with capture.fork() as side:`` sends its work to a side stream.

        The branch comes after all that was captured before the call. What is captured after the
        block comes after the branch too, unless ``join=False``: then it runs beside the branch
        until ``side.join()``. Forks nest, and several may be open at once::

            left, right = capture.fork(), capture.fork()
            with left: ...
            with right: ...  # beside the first

        A torch tensor made in a branch and read in another must stay referenced until the branches
        are joined, as with torch's own streams: its memory would be given to the next tensor.

        Args:
            stream: The side stream; None makes one. It must not be capturing, other than as a
                branch of this capture.
            join: Whether the end of the block joins the branch.

        Raises:
            LifecycleError: Outside the capture's block, or on another thread.
            ConfigurationError: A default stream, the capture's own, or a blocking one with
                ``on_legacy_work="ignore"``.
            CacheTypeError: ``stream`` is no stream, or one of another driver or device.
            CaptureError: Somebody else captures on ``stream``.
            CudaError: The capture was invalidated before.
        """
        capture = self._under_way("fork")
        if self._thread != threading.get_ident():
            raise LifecycleError("capture.fork: expected the thread that captures, got another")
        fork = begin_fork(self.driver, capture, stream, self.stream, joins=join)
        self._forks.append(fork)
        return fork

    def expect_products(self) -> None:
        """Says that the step multiplies matrices through torch.

        The workspaces for it are then made in memory that belongs to the capture stream, before
        the warm-up. What is not said is found out: they are made where torch does, and kept.
        """
        self._multiplies = True

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
        place = self._place
        follow_current_stream(place.driver, place.stream)
        try:
            with place.surroundings(multiplies=self._multiplies):
                for _ in range(times):
                    step()
        except BaseException as error:
            try:  # what ran of it still writes memory
                place.stream.synchronize()
            except CudaError as second:
                place.give_up_stream()
                error.add_note(f"waiting for the warm-up that failed: {second}")
            place.keep_workspaces()
            raise
        place.stream.synchronize()
        place.keep_workspaces()

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
        place = self._place
        self._is_used = True
        refuse_busy(place.driver, place.stream)  # given streams may have become busy since
        try:
            self._begin(f"the capture begun at {caller()} on stream {self.stream.handle:#x}")
            return self
        except BaseException as error:
            self._blocks.__exit__(type(error), error, error.__traceback__)  # after Ctrl-C
            self._abandon()
            forget_in_stacks(error)
            raise

    def _begin(self, name: str) -> None:
        driver, stream = self.driver, self.stream.handle
        with ExitStack() as blocks:
            blocks.enter_context(resting_collector())
            blocks.enter_context(self._place.surroundings(multiplies=self._multiplies))
            capture = active.ActiveCapture(
                driver,
                stream,
                self.mode,
                name,
                breaks_on_legacy_work=self.on_legacy_work == "error",
            )
            self._active, self._thread = capture, threading.get_ident()
            active.push(capture)  # before it begins: what other threads drop waits from here on
            forget_bindings(driver)  # from here on none binds to what would break this
            try:
                driver.begin_capture(stream, self.mode)
            except CudaError:  # it has not begun: what the stream may be doing is somebody else's
                self._active = None
                active.drop(capture)
                self._place.leave_streams()
                raise
            blocks.push(self._end)
            blocks.enter_context(driver.recording(stream))
            blocks.enter_context(watching_collectives(driver))
            self._blocks = blocks.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._refuse_another_thread()
            self._leave_forks()
            self._blocks.__exit__(kind, error, trace)
        except BaseException as failure:
            if self._thread == threading.get_ident():
                # what Ctrl-C left of them; else there are none left
                self._leave_forks()
                self._blocks.__exit__(type(failure), failure, failure.__traceback__)
                self._abandon()
            forget_in_stacks(failure)
            raise
        if error is not None:
            self._abandon()

    def _leave_forks(self) -> None:
        """Leaves blocks of forks that nobody left: a side stream would stay the current one."""
        for fork in reversed(self._forks):
            fork.leave()

    def _refuse_another_thread(self) -> None:
        if self._active is not None and self._thread != threading.get_ident():
            raise CaptureError(
                f"{self._active.name}: expected to be ended by the thread that began it, got "
                "another; it is still under way there",
                code="CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            )

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the capture; raises what its failure, or the block's, means."""
        del kind, trace
        assert self._active is not None
        ended = self._active
        name, troubles = ended.name, ended.troubles
        driver, stream, loose = self.driver, self.stream.handle, None
        if error is None:
            loose = loose_ends(driver, stream, self._forks, self._annotations)
        handle, failure = end_once(driver, stream, ended)
        explained = None
        try:
            self._active = None
            if error is not None or failure is not None:
                self._place.leave_streams(self._forks)
            if error is not None:
                if handle is not None:
                    destroy_graph(self.driver, handle)
                explained = explain_failure(
                    error, name, troubles=troubles, is_emulated=self.driver.is_emulated
                )
                if explained is not None:
                    raise explained from error
                error.add_note(note_for(error, name))
                return
            if failure is not None:
                raise explain_end(failure, name, troubles=troubles, loose=loose) from failure
        finally:
            # their tracebacks hold this frame: a cycle that would hold the failed step
            del explained, failure
        assert handle is not None
        try:
            self._finish(handle, name, ended.owners)
        finally:  # also without a graph: the next capture on the stream works in them
            self._place.keep_workspaces(self._forks)
        self._forks = []

    def _finish(self, handle: GraphHandle, name: str, kept: list[tuple[object, str]]) -> None:
        try:
            owners = self._place.owners(kept)
        except BaseException:  # a user's container may raise when it is looked through
            destroy_graph(self.driver, handle)
            raise
        graph = Graph(self.driver, handle, owners=owners, annotations=tuple(self._annotations))
        check_finished(graph, name, self.expect)
        if self._place.pool is not None:
            self._place.pool.note_capture(graph.runs)
        self._graph = graph

    def _abandon(self) -> None:
        """Drops everything a failed capture holds: pool, stream, owners."""
        if self._active is not None:  # Ctrl-C came before its end
            abandon(self.driver, self.stream.handle, self._active)
            self._active = None
            self._place.leave_streams(self._forks)
        self._forks = []
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        if self._chosen is not None:
            self._chosen.pool = None
        self._blocks = ExitStack()

    # ---- helpers -------------------------------------------------------------------------------

    @property
    def _place(self) -> CapturePlace:
        """Where it captures; the first call decides."""
        if self._chosen is None:
            self._chosen = CapturePlace(*self._given, self.on_legacy_work)
        return self._chosen

    def _under_way(self, what: str) -> active.ActiveCapture:
        if self._active is None:
            raise LifecycleError(
                f"capture.{what}: expected a capture under way; use it in its block"
            )
        return self._active

    def _node_count(self, label: str) -> int | None:
        """How many nodes the graph has by now; None where the capture was invalidated."""
        try:
            graph = self.driver.capture_status(self.stream.handle).graph
            return None if graph is None else len(self.driver.nodes(graph))
        except CudaError as error:
            _log.warning(
                "annotate: the label %r is lost, no nodes could be counted: %s", label, error
            )
            return None

    def _refuse_reuse(self) -> None:
        if self._is_used:
            raise LifecycleError("capture: expected a capture not used before; one captures once")
