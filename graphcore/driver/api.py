"""The driver seam: everything graphcore asks of CUDA, as one abstract class with two drivers.

``cuda/`` talks to a device; ``emulated/`` does the same in plain Python and NumPy, with the same
rules and the same error codes. Nothing above this package imports ``cuda.bindings``.

Error contract of every method: a call that fails raises :class:`graphcore.errors.CudaError` with
the code CUDA gives (or would give) and has changed nothing, except where CUDA itself invalidates a
capture; it leaves no sticky "last error" behind. Handles are plain ints; a handle that was
destroyed, or belongs to another driver, is the caller's fault and answers INVALID_HANDLE or
INVALID_VALUE. Nothing here is locked: one thread at a time per graph hierarchy, as CUDA asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from graphcore.advice import advises
from graphcore.driver.kernel_attributes import walk_attributes
from graphcore.driver.kernel_update import KernelUpdate
from graphcore.driver.records import (
    Allocation,
    CaptureStatus,
    ConditionalHandle,
    DeviceInfo,
    Dim3,
    Edge,
    EventHandle,
    ExecHandle,
    FunctionHandle,
    FunctionInfo,
    GraphHandle,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    PlainEdge,
    RawUpdate,
    StreamHandle,
    UpdateResult,
)
from graphcore.errors import CacheTypeError, CudaError

if TYPE_CHECKING:
    from graphcore.driver.kernel import Kernel
    from graphcore.driver.lent_streams import StreamStore
    from graphcore.driver.streams import Event, Stream
    from graphcore.driver.tensor_map import TensorMap

CaptureMode = Literal["global", "thread_local", "relaxed"]

LEGACY_STREAM = StreamHandle(1)
"""CUDA's legacy default stream (``cudaStreamLegacy``), in both drivers; 0 means the same."""


@advises
class Driver(ABC):
    """What a driver offers. Open one with :func:`graphcore.open_driver`."""

    name: ClassVar[str]
    is_emulated: ClassVar[bool]

    device: int
    """Ordinal of the device this driver works on."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CacheTypeError(
            f"{type(self).__name__}: cannot be copied or pickled, its handles are of this process; "
            "open one in the other process (graphcore.open_driver)"
        )

    # ---- device -------------------------------------------------------------------------------

    @abstractmethod
    def device_info(self) -> DeviceInfo:
        """Facts about this driver's device."""

    @abstractmethod
    def context_id(self) -> int:
        """A number that identifies the context work goes to; part of keys and fingerprints."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work of the context. STREAM_CAPTURE_UNSUPPORTED while one captures."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the driver itself holds; handles made through it stay the caller's."""

    # ---- streams and events -------------------------------------------------------------------

    def stream(self, *, blocking: bool = False, priority: int = 0) -> Stream:
        """A new stream that this object owns; ``blocking`` ones order with the legacy stream."""
        from graphcore.driver.streams import Stream

        return Stream(self, self.create_stream(blocking=blocking, priority=priority), owned=True)

    def capture_stream(self, *, blocking: bool = False, products: bool = False) -> Stream:
        """A stream to capture on, which goes back when nobody holds it; graphs hold theirs.

        The next one gets it; where ``products`` are expected, one that torch keeps 32 MiB for.
        """
        return self.capture_streams.lend(self, blocking=blocking, products=products)

    @property
    def capture_streams(self) -> StreamStore:
        """The streams that :meth:`capture_stream` lends: how many are ``lent``, and ``idle``."""
        from graphcore.driver.lent_streams import StreamStore

        store: StreamStore = self.__dict__.get("_capture_streams") or self.__dict__.setdefault(
            "_capture_streams", StreamStore()
        )
        return store

    def _destroy_capture_streams(self) -> None:
        """Destroys those that nobody holds; a part of :meth:`close`."""
        store: StreamStore | None = self.__dict__.get("_capture_streams")
        if store is not None:
            store.close(self.destroy_stream)

    def event(self, *, timing: bool = False) -> Event:
        """A new event that the returned object owns."""
        from graphcore.driver.streams import Event

        return Event(self, self.create_event(timing=timing))

    @abstractmethod
    def create_stream(self, *, blocking: bool, priority: int = 0) -> StreamHandle: ...

    @abstractmethod
    def destroy_stream(self, stream: StreamHandle) -> None: ...

    def own_streams(self) -> tuple[StreamHandle, ...]:
        """The streams that this driver made and that live; those of other libraries are unknown."""
        return ()

    @abstractmethod
    def synchronize_stream(self, stream: StreamHandle) -> None:
        """Waits for the stream's work; UNSUPPORTED (and invalidates) while it captures.

        Unsafe during the capture of another stream, as :meth:`alloc` is.
        """

    @abstractmethod
    def query_stream(self, stream: StreamHandle) -> bool:
        """Whether the stream's work has finished; refused as :meth:`synchronize_stream` is."""

    @abstractmethod
    def stream_is_blocking(self, stream: StreamHandle) -> bool:
        """Whether the stream orders with the legacy stream (fixed when it was made).

        Always told of a stream that this driver made; UNSUPPORTED for another's that captures.
        """

    @abstractmethod
    def stream_device(self, stream: StreamHandle) -> int:
        """Ordinal of the device the stream belongs to."""

    @abstractmethod
    def wait_event(
        self, stream: StreamHandle, event: EventHandle, *, external: bool = False
    ) -> None:
        """Makes later work of ``stream`` wait for ``event``.

        Waiting for an event recorded in a capture joins ``stream`` to that capture (MERGE where it
        belongs to another one); inside a capture an event recorded outside answers ISOLATION,
        unless ``external``, which makes an event-wait node. An event of a capture that is over
        answers INVALID_VALUE, and breaks the capture of ``stream`` if it has one.
        """

    @abstractmethod
    def create_event(self, *, timing: bool) -> EventHandle: ...

    @abstractmethod
    def destroy_event(self, event: EventHandle) -> None: ...

    @abstractmethod
    def record_event(
        self, event: EventHandle, stream: StreamHandle, *, external: bool = False
    ) -> None:
        """Records ``event``; in a capture it marks the frontier, or, ``external``, makes a node."""

    @abstractmethod
    def synchronize_event(self, event: EventHandle) -> None:
        """Waits for ``event``; CAPTURED_EVENT where it was recorded in a capture under way.

        INVALID_VALUE where that capture is over; unsafe during captures, as :meth:`alloc` is.
        """

    @abstractmethod
    def query_event(self, event: EventHandle) -> bool:
        """Whether ``event`` has happened; refused as :meth:`synchronize_event` is."""

    @abstractmethod
    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        """Milliseconds between two timing events that have happened."""

    # ---- memory -------------------------------------------------------------------------------

    @abstractmethod
    def alloc(self, size: int) -> int:
        """Device memory of ``size`` bytes (at least 1); returns its address.

        UNSUPPORTED inside a capture whose mode forbids it (global: any thread's; thread_local: this
        thread's), which it invalidates.
        """

    @abstractmethod
    def free(self, address: int) -> None:
        """Gives back memory of :meth:`alloc`; INVALID_VALUE for any other address."""

    @abstractmethod
    def alloc_pinned(self, size: int) -> int:
        """Page-locked host memory of ``size`` bytes that the device can read; its address."""

    @abstractmethod
    def free_pinned(self, address: int) -> None: ...

    @abstractmethod
    def copy(self, params: MemcpyParams, stream: StreamHandle) -> None:
        """Copies on ``stream``; a memcpy node where it captures."""

    @abstractmethod
    def fill(self, params: MemsetParams, stream: StreamHandle) -> None:
        """Fills on ``stream``; a memset node where it captures."""

    @abstractmethod
    def read(self, address: int, size: int) -> bytes:
        """Bytes of device memory, after all work: for tests and small reads, not for hot paths."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Writes bytes to device memory, after all work."""

    @abstractmethod
    def allocation_of(self, address: int) -> Allocation | None:
        """The live allocation that ``address`` lies in, or None. About 1.5 us on a device."""

    # ---- kernels ------------------------------------------------------------------------------

    @abstractmethod
    def function(self, kernel: Kernel) -> FunctionHandle:
        """Loads ``kernel`` once and returns its function.

        Allowed inside a capture, in every mode.
        """

    @abstractmethod
    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        """Name, parameter layout and home of a function, of any library's."""

    @abstractmethod
    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The 128 bytes by which a kernel's copies of boxes know a tensor; CudaError: refused."""

    def kernel_of(self, function: FunctionHandle) -> Kernel | None:
        """The kernel that :meth:`function` loaded as ``function``; None for another's function."""
        return None

    @abstractmethod
    def launch(
        self,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        stream: StreamHandle,
    ) -> None:
        """Launches on ``stream``; a kernel node where it captures. ``arguments``: Kernel.pack."""

    def bind_kernel(
        self,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: Sequence[bytes],
        stream: StreamHandle,
    ) -> Callable[[], object]:
        """A :meth:`launch` that comes again: one call without arguments, which makes it.

        Its result is falsy where the driver took the launch; else nothing was launched, and
        :meth:`launch` tells why. It may raise CudaError as that does.
        """
        return partial(self.launch, function, config, arguments, stream)

    @abstractmethod
    def launch_host(self, callback: Callable[[], None], stream: StreamHandle) -> None:
        """Runs ``callback`` in stream order; in a capture a host node that fires on each replay.

        The driver keeps the callback alive as long as the graph, its clones and executables live.
        """

    # ---- capture ------------------------------------------------------------------------------

    @abstractmethod
    def begin_capture(
        self, stream: StreamHandle, mode: CaptureMode, *, graph: GraphHandle | None = None
    ) -> None:
        """Begins capturing ``stream``; into ``graph`` (a conditional body, say) where given.

        A body is filled when the capture ends: until then :meth:`capture_status` names a graph of
        the capture's own, and a body takes no captured conditional or host node (NOT_SUPPORTED at
        the end). Any other graph takes the nodes as they come.
        """

    @abstractmethod
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """Ends the capture and returns its graph (the given one where it had one).

        After UNJOINED, INVALIDATED or WRONG_THREAD the capture is over too, without a graph; the
        stream works. A body it was for is as before; another given graph is gone, as CUDA destroys
        it (:meth:`destroy_graph` of it answers INVALID_VALUE).
        """

    @abstractmethod
    def capture_status(self, stream: StreamHandle) -> CaptureStatus: ...

    @abstractmethod
    def set_capture_frontier(self, stream: StreamHandle, nodes: Iterable[NodeHandle]) -> None:
        """Replaces what the stream's next node depends on (nodes of the graph being captured)."""

    @abstractmethod
    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Sets this thread's mode for potentially unsafe calls and returns the one before."""

    def recording(self, stream: StreamHandle) -> AbstractContextManager[None]:
        """What else must be in force while Python runs a captured region; nothing on a device.

        The emulated driver records torch's operations on CPU tensors here.
        """
        return nullcontext()

    # ---- graphs -------------------------------------------------------------------------------

    @abstractmethod
    def create_graph(self) -> GraphHandle: ...

    @abstractmethod
    def destroy_graph(self, graph: GraphHandle) -> None:
        """Node handles of the graph die with it; executables made from it live on."""

    @abstractmethod
    def clone_graph(self, graph: GraphHandle) -> GraphHandle: ...

    @abstractmethod
    def add_node(
        self, graph: GraphHandle, dependencies: Iterable[NodeHandle], params: NodeParams
    ) -> NodeHandle: ...

    @abstractmethod
    def destroy_node(self, node: NodeHandle) -> None: ...

    @abstractmethod
    def add_edges(self, graph: GraphHandle, edges: Iterable[Edge]) -> None: ...

    @abstractmethod
    def remove_edges(self, graph: GraphHandle, edges: Iterable[Edge]) -> None: ...

    @abstractmethod
    def nodes(self, graph: GraphHandle) -> list[NodeHandle]:
        """All nodes of the graph, in the order the driver keeps (creation order)."""

    @abstractmethod
    def edges(self, graph: GraphHandle) -> list[Edge]:
        """All edges; those into one node in the order in which its dependencies were added."""

    def plain_edges(self, graph: GraphHandle) -> list[PlainEdge]:
        """What :meth:`edges` tells, as (source, target, data)."""
        return [(edge.source, edge.target, edge.data) for edge in self.edges(graph)]

    @abstractmethod
    def node_kind(self, node: NodeHandle) -> NodeKind: ...

    @abstractmethod
    def node_params(self, node: NodeHandle) -> NodeParams:
        """The node's parameters, copied; kernel attributes (cluster, cooperative, priority) too."""

    def all_params(self, graph: GraphHandle) -> list[tuple[NodeHandle, NodeParams]]:
        """All of :meth:`nodes` with their parameters; on a device faster than one by one."""
        return [(node, self.node_params(node)) for node in self.nodes(graph)]

    def kernel_attributes(self, graph: GraphHandle) -> list[tuple[Dim3, bool, int | None]]:
        """(cluster, cooperative, priority) of all kernel nodes, inner ones too: about 1 us each."""
        return list(walk_attributes(self, graph))

    @abstractmethod
    def set_node_params(self, node: NodeHandle, params: NodeParams) -> None:
        """Changes a node of a graph description (not of executables made from it)."""

    def set_arguments(self, changes: Iterable[tuple[NodeHandle, KernelParams]]) -> None:
        """Gives kernel nodes of a graph other arguments, and keeps their function and launch shape.

        Of ``KernelParams`` only the arguments may be others than the node has. An error may leave
        some nodes changed.
        """
        for node, params in changes:
            self.set_node_params(node, params)

    def private_memory(self, graph: GraphHandle) -> list[tuple[int, int]]:
        """(address, bytes) of the memory that the capture of ``graph`` made for its own nodes.

        In the order in which the nodes, inner graphs included, first write it. Empty where the
        driver makes none: on a device temporaries come from the allocator of another library.
        """
        return []

    @abstractmethod
    def create_conditional(
        self, graph: GraphHandle, default: int = 0, *, assign_at_launch: bool = True
    ) -> ConditionalHandle:
        """A handle for a conditional node of ``graph``; starts each launch at ``default``."""

    # ---- executables --------------------------------------------------------------------------

    @abstractmethod
    def instantiate(
        self, graph: GraphHandle, *, auto_free: bool = False, use_node_priority: bool = False
    ) -> ExecHandle:
        """An executable; a refusal's CudaError names the node and CUDA's instantiate result."""

    @abstractmethod
    def destroy_exec(self, executable: ExecHandle) -> None:
        """Destroys it, after its running launch; never call it while this thread captures."""

    @abstractmethod
    def launch_graph(self, executable: ExecHandle, stream: StreamHandle) -> None:
        """Launches; UNSUPPORTED into a capture: embed the graph as a child node there."""

    @abstractmethod
    def bind_launch(self, executable: ExecHandle, stream: StreamHandle) -> Callable[[], object]:
        """The hot path: one call without arguments that launches.

        Its result is falsy on success; otherwise give it to :meth:`raise_launch`. It may also raise
        what the library behind it raises, no GraphcoreError: give that exception there too.
        """

    @abstractmethod
    def raise_launch(self, result: object) -> None:
        """Raises the CudaError of a failed bound launch: of its result, or what it raised."""

    @abstractmethod
    def upload(self, executable: ExecHandle, stream: StreamHandle) -> None: ...

    def upload_aside(self, executable: ExecHandle) -> None:
        """Uploads on a non-blocking stream that nobody else uses; waits for nothing."""
        stream = self.create_stream(blocking=False)
        try:
            self.upload(executable, stream)
        finally:
            self.destroy_stream(stream)

    @abstractmethod
    def update_exec(self, executable: ExecHandle, graph: GraphHandle) -> RawUpdate:
        """Tries a whole-graph update. A refusal is a value, not an error; others raise."""

    def bind_update(self, executable: ExecHandle, graph: GraphHandle) -> Callable[[], object]:
        """An update that may come again: one call without arguments, which tries it.

        Its result is falsy where the driver took the update. Any other says that the executable is
        as before, and no more: :meth:`update_exec` tells why, or finds the right context first. It
        may raise CudaError as that does.
        """
        return partial(_is_refused, self, executable, graph)

    @abstractmethod
    def set_exec_node_params(
        self, executable: ExecHandle, node: NodeHandle, params: NodeParams
    ) -> None:
        """Changes one node of an executable; ``node`` is the source graph's handle."""

    def bind_exec_kernel_update(
        self, executable: ExecHandle, node: NodeHandle, params: KernelParams
    ) -> KernelUpdate:
        """Repeated updates of one kernel node; drivers may prepare what does not change."""
        hand_over = partial(self.set_exec_node_params, executable, node)
        return KernelUpdate(node, params, hand_over)

    @abstractmethod
    def set_node_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        """Switches a kernel, memcpy or memset node of an executable off and on."""

    @abstractmethod
    def node_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool: ...


def _is_refused(driver: Driver, executable: ExecHandle, graph: GraphHandle) -> bool:
    try:
        return driver.update_exec(executable, graph).result is not UpdateResult.SUCCESS
    except CudaError as error:
        if error.code == "CUDA_ERROR_NOT_SUPPORTED":  # a refusal, though CUDA does not call it one
            return True
        raise
