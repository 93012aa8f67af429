"""What a plan is made of: symbolic buffers, views of them, and one record per node. Pure data.

Nothing here has an address: a plan is written, checked, saved and drawn without a driver. Sizes and
offsets of views count elements, byte ranges count bytes. Records are frozen; :class:`GraphPlan`
makes them and is the only place where a plan grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from graphcore.driver.kernel import Kernel
from graphcore.driver.records import LaunchConfig
from graphcore.plan.operand import Operand

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan

Origin = Literal["argument", "allocated"]


@dataclass(frozen=True, slots=True)
class PlanBuffer(Operand):
    """A symbolic buffer: what a real tensor must look like to stand for it.

    Args:
        name: Unique in the plan, its bodies included.
        shape: Sizes.
        dtype: Element type, for example "float32".
        itemsize: Bytes of one element.
        strides: Steps in elements.
        origin: "argument": given when the plan is built, run or captured. "allocated": memory that
            the plan's own allocation node makes and its deallocation node ends.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    strides: tuple[int, ...]
    origin: Origin = "argument"

    @property
    def whole(self) -> View:
        """All of the buffer as a view."""
        return View(self, 0, self.shape, self.strides, self.dtype, self.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to past the last one (strides included)."""
        return self.whole.extent[1]


@dataclass(frozen=True, slots=True)
class View(Operand):
    """A part of a buffer: strides may be 0 or negative, the element type may be another one.

    Args:
        buffer: The buffer.
        offset: Of the first element, in bytes from the buffer's first element.
        shape: Sizes.
        strides: Steps in elements of ``dtype``.
        dtype: Element type.
        itemsize: Bytes of one element.
    """

    buffer: PlanBuffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def whole(self) -> View:
        """The view itself."""
        return self

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """(first byte, past the last byte) that the view touches, relative to its buffer."""
        if not self.size:
            return self.offset, self.offset
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = sum(min(0, step) for step in steps) * self.itemsize
        high = (sum(max(0, step) for step in steps) + 1) * self.itemsize
        return self.offset + low, self.offset + high

    def __repr__(self) -> str:
        return f"<View {self}>"

    def __str__(self) -> str:
        """``x`` for all of a buffer, else what part of it as which elements."""
        if self == self.buffer.whole:
            return self.buffer.name
        low, high = self.extent
        return f"{self.buffer.name}, bytes {low}:{high}, {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Condition:
    """The value that decides what a conditional node runs; kernels get its handle as a u64.

    ``default`` is what each launch begins with; None keeps the value from launch to launch.
    """

    name: str
    default: int | None = 0


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """An event of the plan by name; the real one is given, or made, when the plan is lowered.

    ``external`` ones are recorded outside the plan (on a stream, by another graph), so that the
    plan may wait for them without recording them.
    """

    name: str
    external: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch. ``arguments`` in order: views, conditions and Python scalars or bytes.

    A null pointer is 0.
    """

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Memcpy:
    """A copy between views of one shape and element type.

    The rows of both must be dense (1-D, or 2-D/3-D with pitches), as a memcpy node holds no other;
    the plan's ``copy_kernel`` does the others, and every copy inside a conditional body.
    """

    dst: View
    src: View


@dataclass(frozen=True, slots=True)
class Memset:
    """A fill of ``dst`` with ``value``, the bits of one element of 1, 2 or 4 bytes."""

    dst: View
    value: int


@dataclass(frozen=True, slots=True)
class Callback:
    """A host callback without arguments, run at every replay; it must not call CUDA."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Embed:
    """Another plan as a child graph: ``bindings`` gives each of its argument buffers a view."""

    plan: GraphPlan
    bindings: tuple[tuple[str, View], ...]


@dataclass(frozen=True, slots=True)
class EmbedGraph:
    """A graph that exists already (a :class:`graphcore.Graph`), as a child graph."""

    graph: Any


@dataclass(frozen=True, slots=True)
class Call:
    """A Python callable that launches work, captured as a child graph.

    ``arguments`` are given to it in order; views arrive as torch tensors or CuPy arrays where their
    buffer's memory is torch's or CuPy's, else as :class:`graphcore.Buffer`. What it returns is
    dropped. Before it is captured it runs ``warmup`` times on copies of its buffers: a library's
    first call cannot be captured, and the contents of the real ones stay as they are.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    warmup: int = 1


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """An event record node."""

    event: PlanEvent


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """An event wait node."""

    event: PlanEvent


@dataclass(frozen=True, slots=True)
class Allocate:
    """A graph-owned allocation of ``buffer``."""

    buffer: PlanBuffer


@dataclass(frozen=True, slots=True)
class Deallocate:
    """The end of a graph-owned allocation."""

    buffer: PlanBuffer


@dataclass(frozen=True, slots=True)
class Conditional:
    """A conditional node: ``form`` is "if" (one body, or two with else), "while" or "switch"."""

    form: Literal["if", "while", "switch"]
    condition: Condition
    bodies: tuple[GraphPlan, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """A node that only joins what it comes after."""


Work = (
    Launch
    | Memcpy
    | Memset
    | Callback
    | Embed
    | EmbedGraph
    | Call
    | RecordEvent
    | WaitEvent
    | Allocate
    | Deallocate
    | Conditional
    | Join
)


@dataclass(frozen=True, slots=True)
class PlanNode:
    """One node of a plan.

    Args:
        index: Position in its plan or body; program order.
        name: Unique in its plan or body; messages use it.
        work: What it does.
        reads: Views it reads.
        writes: Views it writes.
        after: Indices it comes after, where given; None: derived from reads and writes in program
            order (and events, allocations and conditions, which order what uses them).
        label: Annotation path, for example "layer 3/attention".
    """

    index: int
    name: str
    work: Work = field(compare=False)
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...] = ()
    after: tuple[int, ...] | None = None
    label: str = ""

    def __repr__(self) -> str:
        """Short: what a cell or a prompt shows after ``plan.memset(...)``."""
        label = f" in {self.label}" if self.label else ""
        return f"<PlanNode {self.index} {self.name!r} {type(self.work).__name__}{label}>"


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """Something that keeps a plan from being built.

    Args:
        kind: "cycle", "unknown buffer", "out of bounds", "dtype", "strides", "race", "body",
            "allocation", "event", "condition", "order", "name" or "argument".
        message: One sentence with names, what was expected and what came.
        nodes: Names of the nodes at fault ("loop/body 0/step" for inner ones).
        byte_range: Of a race: (buffer name, first byte, past the last byte).
    """

    kind: str
    message: str
    nodes: tuple[str, ...] = ()
    byte_range: tuple[str, int, int] | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"
