"""Calls: Python callables of a plan that launch work: their arguments, warm-up and capture.

A view arrives in the library of its buffer's memory. The warm-up works on copies, so that the
contents of the real buffers stay what they are; what a callable reaches by other ways than its
arguments is really touched.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphcore.driver import Driver, Stream
from graphcore.driver.records import ConditionalHandle, CopyOperand, MemcpyParams
from graphcore.errors import PlanError
from graphcore.executable import Capture, Graph, capture
from graphcore.plan.binding import Binding, Place
from graphcore.plan.lowering import handle_of
from graphcore.plan.records import Call, Condition, PlanBuffer, View
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call with the buffers it works on.

    Args:
        call: What to call.
        binding: Where its views lie.
        conditions: The handles of conditions by name.
        arguments: What the function gets, where it was made ahead.
    """

    call: Call
    binding: Binding
    conditions: Mapping[str, ConditionalHandle]
    arguments: tuple[Any, ...] | None = None

    def run(self) -> None:
        """Calls on the real buffers; what it returns is dropped. Raises as with_arguments."""
        self.call.function(*(self.with_arguments().arguments or ()))

    def with_arguments(self) -> BoundCall:
        """The call with its arguments made.

        Raises:
            PlanError: A condition whose node lies elsewhere, or a view that its library cannot
                have (torch knows no negative strides).
        """
        if self.arguments is not None:
            return self
        made = tuple(self._argument(value, self.binding) for value in self.call.arguments)
        return replace(self, arguments=made)

    def warm_up(self, capturing: Capture) -> None:
        """Runs the function as often as the call says, where ``capturing`` will capture."""
        values = self.call.arguments
        # a kernel that sets a condition may only do so inside its graph
        if not self.call.warmup or any(isinstance(value, Condition) for value in values):
            return
        copies: list[Any] = []

        def step() -> None:
            if not copies:
                copied = self._copied(capturing.stream)
                copies.append([self._argument(value, copied) for value in values])
            self.call.function(*copies[0])

        capturing.warm_up(step, self.call.warmup)

    def capture(self) -> Graph:
        """The graph of one call, which owns what the call allocated through torch."""
        ready = self.with_arguments()
        capturing = capture(driver=self.binding.driver)
        self.warm_up(capturing)
        with capturing:
            ready.run()
        return capturing.graph

    def _argument(self, value: Any, binding: Binding) -> Any:
        if isinstance(value, Condition):
            return handle_of(value, self.conditions)
        if not isinstance(value, View):
            return value
        try:
            return _as_tensor(binding.ref(value), binding.place(value.buffer), binding.driver)
        except (RuntimeError, BufferError, ValueError) as error:
            raise PlanError(
                f"a view of buffer {value.buffer.name!r} (shape {value.shape}, strides "
                f"{value.strides}, {value.dtype}) cannot be passed as a tensor: {error}"
            ) from error

    def _copied(self, stream: Stream) -> Binding:
        """The binding with copies of the buffers that the call gets."""
        copied = self.binding.copy()
        views = (value for value in self.call.arguments if isinstance(value, View))
        for buffer in {view.buffer.name: view.buffer for view in views}.values():
            _copy(buffer, copied, stream)
        return copied


def _copy(buffer: PlanBuffer, binding: Binding, stream: Stream) -> None:
    """Puts ``buffer`` into memory of its own; with its contents where there are any yet."""
    low, high = buffer.whole.extent
    memory = Buffer.allocate(max(high - low, 1), "uint8", driver=stream.driver)
    place = binding.find(buffer)
    if place is None:
        binding.allocated(buffer, memory.address, memory)
        return
    if place.given is not None and high > low:
        source = CopyOperand(place.ref.address + low, place.memory)
        params = MemcpyParams(CopyOperand(memory.address), source, high - low)
        stream.driver.copy(params, stream.handle)
    ref = replace(place.ref, address=memory.address - low, owner=memory)
    binding.replace(buffer, Place(ref, library=place.library))


def _as_tensor(ref: TensorRef, place: Place, driver: Driver) -> Any:
    buffer = Buffer(ref, driver)
    if place.library == "cupy":
        return sys.modules["cupy"].asarray(buffer)
    if place.library != "torch":
        return buffer
    torch = sys.modules["torch"]
    if place.given is None:
        return torch.from_dlpack(buffer)
    # on the tensor's own storage, so that torch sees what shares memory
    storage = place.given.untyped_storage()
    start = ref.address - storage.data_ptr() if ref.size else 0
    empty = torch.empty(0, dtype=getattr(torch, ref.dtype), device=place.given.device)
    return empty.set_(storage, start // ref.itemsize, ref.shape, ref.strides)
