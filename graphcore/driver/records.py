"""The records that pass through the driver seam: handles, parameters and answers; frozen values.

Handles are plain integers in both drivers (the address CUDA gave, or a number the emulated driver
drew). Addresses and sizes are in bytes everywhere in this file, never in elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NewType

StreamHandle = NewType("StreamHandle", int)
EventHandle = NewType("EventHandle", int)
FunctionHandle = NewType("FunctionHandle", int)
GraphHandle = NewType("GraphHandle", int)
NodeHandle = NewType("NodeHandle", int)
ExecHandle = NewType("ExecHandle", int)
ConditionalHandle = NewType("ConditionalHandle", int)

Dim3 = tuple[int, int, int]


class NodeKind(Enum):
    """What a graph node does; ``UNKNOWN`` is a kind newer than this library."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    HOST = "host"
    CHILD = "child"
    EMPTY = "empty"
    EVENT_WAIT = "event_wait"
    EVENT_RECORD = "event_record"
    SEMAPHORE_SIGNAL = "semaphore_signal"
    SEMAPHORE_WAIT = "semaphore_wait"
    ALLOC = "alloc"
    FREE = "free"
    BATCH_MEM_OP = "batch_mem_op"
    CONDITIONAL = "conditional"
    UNKNOWN = "unknown"


class MemoryKind(Enum):
    """Where an address lives, as far as a copy needs to know."""

    DEVICE = "device"
    HOST = "host"
    UNIFIED = "unified"


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Shape and attributes of one kernel launch.

    ``grid`` and ``block`` count blocks and threads; ``shared_bytes`` is dynamic shared memory.
    ``cluster`` is (1, 1, 1) where no cluster was asked for; ``priority`` is None where the launch
    takes its stream's; ``programmatic`` asks for programmatic dependent launch.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    cooperative: bool = False
    priority: int | None = None
    programmatic: bool = False


@dataclass(frozen=True, slots=True)
class KernelParams:
    """A kernel node: ``arguments`` holds the bytes of each parameter, in order."""

    function: FunctionHandle
    config: LaunchConfig
    arguments: tuple[bytes, ...]
    kind: NodeKind = NodeKind.KERNEL


class KernelFields:
    """What :class:`KernelParams` holds, while it is made: ``fields.__class__ = KernelParams``.

    A frozen record sets each field by a call of its own, which costs several times as much: only
    for where a thousand are made at once.
    """

    __slots__ = ("arguments", "config", "function", "kind")

    def __init__(
        self, function: FunctionHandle, config: LaunchConfig, arguments: tuple[bytes, ...]
    ) -> None:
        self.function = function
        self.config = config
        self.arguments = arguments
        self.kind = NodeKind.KERNEL


@dataclass(frozen=True, slots=True)
class CopyOperand:
    """One side of a copy: address of its first byte, bytes between rows, rows between slices.

    ``pitch`` and ``rows`` are 0 where the copy has one row (or one slice) and they do not matter.
    """

    address: int
    memory: MemoryKind = MemoryKind.DEVICE
    pitch: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class MemcpyParams:
    """A copy of ``width`` bytes x ``height`` rows x ``depth`` slices (1-D where both are 1)."""

    dst: CopyOperand
    src: CopyOperand
    width: int
    height: int = 1
    depth: int = 1
    kind: NodeKind = NodeKind.MEMCPY

    @property
    def is_1d(self) -> bool:
        return self.height == 1 and self.depth == 1


@dataclass(frozen=True, slots=True)
class MemsetParams:
    """A fill of ``width`` elements of ``element_size`` bytes (1, 2 or 4) x ``height`` rows."""

    address: int
    value: int
    element_size: int
    width: int
    height: int = 1
    pitch: int = 0
    kind: NodeKind = NodeKind.MEMSET


@dataclass(frozen=True, slots=True)
class HostParams:
    """A host callback. ``callback`` is None for nodes of other libraries (address only).

    A callback takes no argument, must not call CUDA, and fires on every replay.
    """

    callback: Callable[[], None] | None
    function: int = 0
    user_data: int = 0
    kind: NodeKind = NodeKind.HOST


@dataclass(frozen=True, slots=True)
class ChildParams:
    """A child graph. Adding one embeds a copy; reading one gives the embedded graph, borrowed."""

    graph: GraphHandle
    kind: NodeKind = NodeKind.CHILD


@dataclass(frozen=True, slots=True)
class EmptyParams:
    """A node that does nothing but join its dependencies."""

    kind: NodeKind = NodeKind.EMPTY


@dataclass(frozen=True, slots=True)
class EventParams:
    """An event record or an event wait node; ``kind`` says which."""

    event: EventHandle
    kind: NodeKind


@dataclass(frozen=True, slots=True)
class AllocParams:
    """A graph-owned allocation of ``size`` bytes; ``address`` is the driver's choice, 0 to ask."""

    size: int
    address: int = 0
    kind: NodeKind = NodeKind.ALLOC


@dataclass(frozen=True, slots=True)
class FreeParams:
    """The end of a graph-owned allocation."""

    address: int
    kind: NodeKind = NodeKind.FREE


@dataclass(frozen=True, slots=True)
class ConditionalParams:
    """A conditional node: ``form`` is "if", "while" or "switch".

    ``size`` is the number of bodies (2 for if/else). ``bodies`` is the driver's answer, borrowed
    graphs to be filled; empty when adding. ``handle`` comes from ``create_conditional``.
    """

    handle: ConditionalHandle
    form: str
    size: int = 1
    bodies: tuple[GraphHandle, ...] = ()
    kind: NodeKind = NodeKind.CONDITIONAL


@dataclass(frozen=True, slots=True)
class OpaqueParams:
    """A node of a kind whose parameters are not decoded (semaphores, batch memory operations)."""

    kind: NodeKind


NodeParams = (
    KernelParams
    | MemcpyParams
    | MemsetParams
    | HostParams
    | ChildParams
    | EmptyParams
    | EventParams
    | AllocParams
    | FreeParams
    | ConditionalParams
    | OpaqueParams
)


@dataclass(frozen=True, slots=True)
class Edge:
    """A dependency: ``target`` runs after ``source``. ``data`` is (from_port, to_port, type)."""

    source: NodeHandle
    target: NodeHandle
    data: tuple[int, int, int] = (0, 0, 0)


PlainEdge = tuple[NodeHandle, NodeHandle, tuple[int, int, int]]
"""What an :class:`Edge` holds, for where a thousand are read at once."""


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """A kernel function: demangled ``name`` where possible, ``raw_name`` as the module has it.

    ``layout`` holds (offset, size) in bytes of every parameter. ``module`` and ``context`` identify
    where it was loaded (0 where the driver does not say); an update may not change the context.
    """

    name: str
    raw_name: str
    layout: tuple[tuple[int, int], ...]
    module: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation an address lies in.

    ``buffer_id`` is new for each allocation, also at an address used before; it is what tells
    freed-and-reused memory from the old one.
    """

    base: int
    size: int
    buffer_id: int
    memory: MemoryKind
    device: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: ``index`` as CUDA counts, ``capability`` (major, minor), memory in bytes.

    ``shared_bytes`` is what a block may have of shared memory, where a kernel opts in.
    """

    index: int
    name: str
    capability: tuple[int, int]
    total_memory: int
    multiprocessors: int
    driver_version: tuple[int, int]
    shared_bytes: int = 0


class CaptureState(Enum):
    """What a stream is doing about captures."""

    NONE = "none"
    ACTIVE = "active"
    INVALIDATED = "invalidated"


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """Capture state of a stream; ``graph`` and ``frontier`` only while ACTIVE.

    ``frontier`` are the nodes that the stream's next node will depend on; ``sequence`` is the same
    for all streams of one capture and never used twice.
    """

    state: CaptureState
    sequence: int = 0
    graph: GraphHandle | None = None
    frontier: tuple[NodeHandle, ...] = ()


class UpdateResult(Enum):
    """What the driver says to a whole-graph update (names as in cuda.h, shortened)."""

    SUCCESS = "success"
    ERROR = "error"
    TOPOLOGY_CHANGED = "topology_changed"
    NODE_TYPE_CHANGED = "node_type_changed"
    FUNCTION_CHANGED = "function_changed"
    PARAMETERS_CHANGED = "parameters_changed"
    NOT_SUPPORTED = "not_supported"
    UNSUPPORTED_FUNCTION_CHANGE = "unsupported_function_change"
    ATTRIBUTES_CHANGED = "attributes_changed"


@dataclass(frozen=True, slots=True)
class RawUpdate:
    """The driver's answer to ``update_exec``, unexplained.

    ``node`` lies in the new graph, ``from_node`` is its dependency in the new graph, where the
    driver names them. ``result`` SUCCESS is the driver's word only: see the cluster trap in
    docs/driver-notes.md.
    """

    result: UpdateResult
    node: NodeHandle | None = None
    from_node: NodeHandle | None = None
