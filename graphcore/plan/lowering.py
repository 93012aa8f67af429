"""Lowering: from a node of a plan to the parameters that a driver takes.

It launches and adds nothing. What makes other graphs (embedded plans, calls) is the builder's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graphcore.driver import Event
from graphcore.driver.records import (
    AllocParams,
    ConditionalHandle,
    ConditionalParams,
    CopyOperand,
    EmptyParams,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeKind,
    NodeParams,
)
from graphcore.errors import ConfigurationError, PlanError
from graphcore.plan.binding import Binding
from graphcore.plan.records import (
    Allocate,
    Callback,
    Condition,
    Conditional,
    Deallocate,
    Join,
    Launch,
    Memcpy,
    Memset,
    PlanNode,
    RecordEvent,
    View,
    WaitEvent,
)
from graphcore.plan.rows import dense_rows
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef, contiguous_strides

_WORD = 4  # bytes of the widest element that CUDA fills with


class Lowering:
    """Lowers the nodes of one plan, or of one body of it.

    Args:
        binding: Where the buffers lie.
        events: The events by name.
        conditions: The handles of conditions by name.
        copy_kernel: What does copies that no memcpy node does, or None.
        in_body: Whether the nodes go into a conditional body.
        owns_memory: Whether allocation nodes make memory; otherwise it is there already.
        rows_by_kernel: Whether the kernel does copies of float32 rows, too: an update cannot change
            how many rows a memcpy node has.
    """

    def __init__(
        self,
        binding: Binding,
        *,
        events: Mapping[str, Event],
        conditions: Mapping[str, ConditionalHandle],
        copy_kernel: Any = None,
        in_body: bool = False,
        owns_memory: bool = True,
        rows_by_kernel: bool = False,
    ) -> None:
        self.binding = binding
        self.events = events
        self.conditions = conditions
        self.copy_kernel = copy_kernel
        self.in_body = in_body
        self.owns_memory = owns_memory
        self.rows_by_kernel = rows_by_kernel

    def params(self, node: PlanNode) -> NodeParams:
        """The parameters of ``node``.

        Raises:
            PlanError: What the node says cannot be done as the buffers lie; names the node.
        """
        with named(node):
            return self._params(node)

    def _params(self, node: PlanNode) -> NodeParams:
        work = node.work
        match work:
            case Launch():
                return self._kernel(work)
            case Memcpy():
                return self._copy(work)
            case Memset():
                return self._fill(work)
            case Callback():
                return HostParams(work.function)
            case RecordEvent() | WaitEvent():
                is_record = isinstance(work, RecordEvent)
                kind = NodeKind.EVENT_RECORD if is_record else NodeKind.EVENT_WAIT
                return EventParams(self.events[work.event.name].handle, kind)
            case Conditional():
                handle = handle_of(work.condition, self.conditions)
                return ConditionalParams(handle, work.form, len(work.bodies))
            case Allocate() | Deallocate():
                return self._memory(work)
        assert isinstance(work, Join), work
        return EmptyParams()

    def _kernel(self, work: Launch) -> KernelParams:
        arguments = work.kernel.pack(*map(self._argument, work.arguments))
        return KernelParams(self.binding.driver.function(work.kernel), work.config, arguments)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, View):
            return self.binding.address(value)
        return handle_of(value, self.conditions) if isinstance(value, Condition) else value

    def _memory(self, work: Allocate | Deallocate) -> NodeParams:
        if not self.owns_memory:
            return EmptyParams()
        if isinstance(work, Allocate):
            return AllocParams(max(work.buffer.nbytes, 1))
        return FreeParams(self.binding.place(work.buffer).ref.address)

    # ---- copies and fills ----------------------------------------------------------------------

    def _copy(self, work: Memcpy) -> NodeParams:
        dst, src = self.binding.ref(work.dst), self.binding.ref(work.src)
        if (dst.shape, dst.dtype) != (src.shape, src.dtype):  # found before, unless unchecked
            raise PlanError(
                f"expected a copy of one shape and dtype, got {list(src.shape)} {src.dtype} for "
                f"{list(dst.shape)} {dst.dtype}"
            )
        if not dst.size:
            return EmptyParams()
        rows = dense_rows(dst.shape, (dst.strides, src.strides), dst.itemsize)
        kinds = [self.binding.place(view.buffer).memory for view in (work.dst, work.src)]
        wants_kernel = self.rows_by_kernel and MemoryKind.HOST not in kinds
        if rows is None or self.in_body or (wants_kernel and _is_of_rows(dst, src)):
            return self.copied_by_kernel(dst, src)
        to, source = (
            CopyOperand(
                ref.address + rows.starts[side], kind, rows.pitches[side], rows.slices[side]
            )
            for side, (ref, kind) in enumerate(zip((dst, src), kinds, strict=True))
        )
        return MemcpyParams(to, source, rows.width, rows.height, rows.depth)

    def copied_by_kernel(self, dst: TensorRef, src: TensorRef) -> NodeParams:
        """The kernel node that copies ``src`` to ``dst``; PlanError without a copy kernel."""
        if self.copy_kernel is None:
            why = (
                "a copy in a conditional body"
                if self.in_body
                else f"a copy of strides {src.strides} to {dst.strides} (shape {dst.shape})"
            )
            raise PlanError(
                f"copy_kernel: expected a kernel for {why}, which no memcpy node does, got None; "
                "pass copy_kernel=graphcore_kernels.strided_copy"
            )
        driver = self.binding.driver
        chosen = self.copy_kernel.plan(Buffer(dst, driver), Buffer(src, driver))
        if chosen.kernel is None:
            return EmptyParams()
        function = driver.function(chosen.kernel)
        return KernelParams(function, chosen.config(driver), tuple(chosen.arguments))

    def _fill(self, work: Memset) -> NodeParams:
        ref = self.binding.ref(work.dst)
        if not ref.size:
            return EmptyParams()
        rows = dense_rows(ref.shape, (ref.strides,), ref.itemsize, least=1)
        if rows is None or rows.depth > 1:
            raise PlanError(
                "memset: expected dense rows with one step between them, got shape "
                f"{ref.shape} with strides {ref.strides}; fill its parts, or use a kernel"
            )
        if ref.itemsize > _WORD:
            raise PlanError(
                f"memset: expected elements of at most {_WORD} bytes, got {ref.itemsize} "
                f"({ref.dtype})"
            )
        width = rows.width // ref.itemsize
        address, pitch = ref.address + rows.starts[0], rows.pitches[0]
        return MemsetParams(address, work.value, ref.itemsize, width, rows.height, pitch)


def _is_of_rows(dst: TensorRef, src: TensorRef) -> bool:
    """Whether a float32 copy has a step between rows, also where it has one row just now."""
    dense = contiguous_strides(dst.shape)
    return dst.dtype == "float32" and (dst.strides != dense or src.strides != dense)


@contextmanager
def named(node: PlanNode) -> Iterator[None]:
    """Puts the node's name before what is refused inside the block."""
    try:
        yield
    except ConfigurationError as error:
        raise PlanError(f"node {node.name!r}: {error}") from error


def handle_of(condition: Condition, handles: Mapping[str, ConditionalHandle]) -> ConditionalHandle:
    """The handle of ``condition``; PlanError where its graph has none."""
    handle = handles.get(condition.name)
    if handle is None:
        raise PlanError(
            f"condition {condition.name!r}: expected its conditional node in the same plan or "
            "body, or in one around it: CUDA makes a handle for the graph that holds the node"
        )
    return handle
