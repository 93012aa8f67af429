"""GraphExec: an executable graph: launch, upload, update, check.

``launch`` is the hot path: one flag test and one bound driver call. Everything that can make it
slower (choosing a stream, looking for stale buffers, explaining) happens only when something
changed. Not locked: one thread at a time for a graph and its executables. CUDA runs one launch of
an executable at a time and orders them; concurrent runs need several executables.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphcore.advice import advises
from graphcore.driver import Driver, Stream, active, as_stream, stream_handle
from graphcore.driver.records import (
    CaptureState,
    StreamHandle,
)
from graphcore.errors import ConfigurationError, GraphcoreError
from graphcore.executable.changing import CLOSED
from graphcore.executable.current import CurrentParameters
from graphcore.executable.embedding import embed
from graphcore.executable.fence import Fence
from graphcore.executable.guarded import CHECK_FIRST
from graphcore.executable.handles import ExecResource
from graphcore.executable.handover import Handover
from graphcore.executable.legacy_work import (
    LEGACY,
    launching_beside_no_capture,
    launching_while_current,
    refuse_legacy_work,
)
from graphcore.executable.rebindable import RebindableExec
from graphcore.executable.runs import Runs, are_noted, bind_counted
from graphcore.executable.switches import KnownSwitches, Switch
from graphcore.executable.update_history import UpdateHistory
from graphcore.interop import current_stream, current_stream_holder
from graphcore.interop.drivers import same_driver
from graphcore.interop.streams import current_stream_reader
from graphcore.resources.lifetime import OwnerSet

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph, Guard
    from graphcore.executable.memory_report import MemoryReport

# all executables, so that a capture can make those bound to its stream look again
_live: weakref.WeakSet[GraphExec] = weakref.WeakSet()
_live_lock = threading.Lock()

_UNBOUND: Any = object()  # is no stream


@advises
class GraphExec(RebindableExec):
    """An executable. Made by :meth:`Graph.instantiate`; ``close()`` is final."""

    __slots__ = (
        "_bound_handle",
        "_bound_stream",
        "_call",
        "_earlier",
        "_is_fenced",
        "_last_handle",
        "_last_stream",
        "_launch_bound",
        "_raise_launch",
    )

    def __init__(
        self, graph: Graph, resource: ExecResource, *, guard: Guard | None, auto_free: bool
    ) -> None:
        self.driver = graph.driver
        self._raise_launch = graph.driver.raise_launch
        self._resource = resource
        self._graph = graph
        self._copy = None
        self._taken = taken = graph.hand_over()
        self._owners = graph.owners
        self._known_switches = KnownSwitches()
        self._switches = self._known_switches.after(taken.stamp) if graph.owned else {}
        self._current = CurrentParameters(resource.source, taken.version, graph.owners)
        self._guard = guard
        self._auto_free = auto_free
        self._history = UpdateHistory()
        self._marked = None
        # where it says why launch has to look closer, no stream counts as bound
        self._refusal = CHECK_FIRST if guard == "full" else None
        self._bound_stream: Any = _UNBOUND
        self._bound_handle: StreamHandle | None = None
        # outlives the binding: where the newest launch may still run. The object is held, because
        # a stream must be alive to be asked
        self._last_stream: Any = None
        self._last_handle: StreamHandle | None = None
        self._is_fenced = False
        self._launch_bound: Callable[[], Any] = _not_bound
        # the same, or what first looks whether the current stream is still the bound one
        self._call: Callable[[], Any] = _not_bound
        # those of graphs it ran before, while somebody guards their outputs
        self._earlier: weakref.WeakSet[Runs] = weakref.WeakSet()
        self._validity = None
        self._listen()
        with _live_lock:
            _live.add(self)

    # ---- running -------------------------------------------------------------------------------

    def launch(self, stream: Any = None) -> None:
        """Launches on ``stream``.

        The fast form gives the same stream object each time. CUDA refuses a launch inside a
        capture; where the stream belongs to a capture of ours, the graph becomes a child node
        there instead, and the graph being captured keeps the owners of this one.

        Args:
            stream: A stream of graphcore, torch, CuPy or cuda.core, or a handle. None is the
                current stream of torch, else of CuPy, else the legacy one (about 0.5 us to find).

        Raises:
            LifecycleError: Closed.
            StaleGraphError: Guarded, and a buffer is not what it was; names it. Nothing is
                launched.
            CudaError: The driver's refusal.
        """
        if stream is not self._bound_stream:  # also where the executable must not launch
            self._bind(stream)
        try:
            result = self._call()
        except _UnboundError:  # another stream is current, or a capture began in between
            self._unbind()
            self.launch(stream)
            return
        except GraphcoreError:  # says it already, and a frame that it was given to would hold it
            raise
        except Exception as error:
            # a driver may bind another library's call, whose own error it understands
            self._raise_launch(error)
            raise
        if result:
            self._raise_launch(result)

    def upload(self, stream: Any = None) -> None:
        """Moves the executable to the device ahead of its next launch, which it makes cheaper."""
        self._refuse_closed("upload")
        self.driver.upload(self._resource.handle, self._handle_of(stream))
        self._resource.is_on_device = True

    def _bind(self, stream: Any) -> None:
        if self._refusal is not None:
            self._look_closer()
        capture = active.current()
        if capture is not None and same_driver(self.driver, capture.driver):
            handle = current_stream(self.driver) if stream is None else stream_handle(stream)
            # no capture takes the legacy stream, and asking about it is an error in one
            if handle not in LEGACY and self._captures(handle):
                self._unbind()
                self._call = partial(self._embed, handle)
                return
        handle = self._handle_of(stream)
        refuse_legacy_work(self.driver, handle, "launch")
        holder = stream
        if stream is None:
            is_known = handle == self._last_handle
            holder = self._last_stream if is_known else current_stream_holder(self.driver)
        if handle != self._bound_handle:
            self._unbind()
            call = self.driver.bind_launch(self._resource.handle, handle)
            runs = {*self._taken.runs, *self._earlier}
            self._launch_bound = bind_counted(call, runs, handle, holder)
            self._bound_handle = handle
        self._last_stream, self._last_handle, self._is_fenced = holder, handle, False
        self._resource.launches_on(self._last_stream, handle)
        # where there is a flag, every launch looks; and without a stream where anything captures,
        # on whatever thread: that has rules that only the long way knows
        looks = self._refusal is not None or (stream is None and bool(active.UNDER_WAY))
        self._call = self._call_on(handle, follows=stream is None and not looks)
        if looks:
            self._bound_stream = _UNBOUND
            return
        if isinstance(stream, Stream):
            stream.when_closed(self)
        self._bound_stream = stream

    def _call_on(self, handle: StreamHandle, *, follows: bool) -> Callable[[], Any]:
        """The bound launch; ``follows``: for as long as the current stream is ``handle``."""
        launch = self._launch_bound
        if handle in LEGACY:
            if follows:
                read = current_stream_reader(self.driver)
                return launching_while_current(launch, read, otherwise=_not_bound)
            refuse = partial(refuse_legacy_work, self.driver, handle, "launch")
            return launching_beside_no_capture(launch, otherwise=refuse)
        return _while_current(self.driver, launch) if follows else launch

    def _captures(self, stream: StreamHandle) -> bool:
        return self.driver.capture_status(stream).state is not CaptureState.NONE

    def _embed(self, stream: StreamHandle) -> None:
        # not the source: updates in place brought other parameters
        graph = self._current_graph().handle
        embed(self.driver, graph, stream, self._owners, (*self._taken.runs, *self._earlier))

    def stream_closed(self) -> None:
        """The stream of the newest launch was closed: the next one looks, and says so."""
        self._unbind()

    def _handle_of(self, stream: Any) -> StreamHandle:
        if stream is None:
            return current_stream(self.driver)
        if not isinstance(stream, Stream) or stream.driver is self.driver:
            handle = stream_handle(stream)
            if handle == self._bound_handle:
                return handle
            if handle == self._last_handle and stream is self._last_stream:
                return handle  # of our device, as it was
        handle = as_stream(self.driver, stream).handle
        device = self.driver.stream_device(handle)
        if device != self.driver.device:
            raise ConfigurationError(
                f"stream: expected one of device {self.driver.device}, got one of device {device}"
            )
        return handle

    def _forget_stream(self) -> None:
        self._bound_stream = _UNBOUND

    def _unbind(self) -> None:
        self._bound_stream, self._bound_handle = _UNBOUND, None
        self._call = self._launch_bound = _not_bound

    # ---- what an update leaves -----------------------------------------------------------------

    def _follow(self, switch: Switch) -> None:
        if not are_noted(self._taken.runs, self._bound_handle):
            self._unbind()
        switch.bound = self._call
        self._listen()

    def _take(self, taken: Handover, graph: Graph, successor: CurrentParameters | None) -> None:
        runs, before = taken.runs, self._taken.runs
        self._graph = graph
        self._taken = taken
        self._owners = graph.owners
        self._moved(taken.version, successor)
        if runs != before:
            # it may write what it wrote before: guards of those outputs see its runs still
            if before[0] not in self._earlier:
                self._earlier.update(before)
            if not are_noted(runs, self._bound_handle):
                self._unbind()
        self._listen()
        self._forgive()

    # ---- the rest ------------------------------------------------------------------------------

    @property
    def runs(self) -> Runs:
        """The runs of its graph, for guards of its outputs; LifecycleError after :meth:`close`."""
        return self._version_graph("runs").runs

    def memory_report(self) -> MemoryReport:
        """What the executable, its graph's pool and allocations, and its owners take, in bytes."""
        from graphcore.executable.memory_report import memory_report

        return memory_report(self._version_graph("memory_report"))

    def fence(self) -> Fence | None:
        """An event behind the newest launch; None where nothing was launched.

        CUDA orders the launches of one executable, so that what comes behind the newest one comes
        behind them all. Costs the launches nothing; the next one binds its stream again.
        """
        if self._last_handle is None:
            return None
        self._unbind()
        self._is_fenced = True
        return Fence(self.driver, self._last_stream, self._last_handle)

    def settle(self, fence: Fence) -> bool:
        """Whether nothing launched before ``fence`` (of :meth:`fence`) or since runs any more.

        Where that is so, a close or an update gives the owners back at once.
        """
        if not (self.is_fenced and fence.has_passed()):
            return False
        self._resource.launches_have_run()
        return True

    @property
    def is_fenced(self) -> bool:
        """Whether nothing was launched since :meth:`fence`, or ever."""
        return self._is_fenced or self._last_handle is None

    def close(self) -> None:
        """Destroys the executable, or, while a capture is under way, once that is over.

        A launch that runs is finished first. A second call does nothing.
        """
        if self._refusal == CLOSED:
            return
        self._refusal = CLOSED
        self._unbind()
        self._current.close()
        self._stop_listening()
        self._known_switches.forget()
        self._switches = {}
        self._owners = OwnerSet()
        self._graph = self._copy = None
        self._resource.close()  # last: Ctrl-C in the destroy must leave nothing held

    def __enter__(self) -> GraphExec:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._refusal == CLOSED:
            return "<GraphExec closed>"
        guard = f" guard={self._guard}" if self._guard else ""
        return (
            f"<GraphExec {self._resource.handle:#x} {self.driver.name}:{self.driver.device}{guard}>"
        )


def forget_bindings(driver: Driver) -> None:
    """Makes every executable of ``driver`` look at its stream again at its next launch.

    A capture begins with this: the stream of a bound call, or one forked from it, may belong to the
    capture, where CUDA refuses the call and breaks the capture.
    """
    for executable in living():
        if same_driver(executable.driver, driver):
            executable._unbind()


def living() -> list[GraphExec]:
    """All executables that exist, closed ones among them."""
    with _live_lock:
        return list(_live)


class _UnboundError(Exception):
    """A call that is bound to no stream any more, or to another one; nothing was launched."""


def _while_current(driver: Driver, launch: Callable[[], Any]) -> Callable[[], Any]:
    """``launch``, which goes to the current stream of now, for as long as that is current."""
    captures, read = active.UNDER_WAY, current_stream_reader(driver)
    expected = read()

    def launch_there() -> Any:
        if captures or read() != expected:
            raise _UnboundError
        return launch()

    return launch_there


def _not_bound() -> None:
    raise _UnboundError
