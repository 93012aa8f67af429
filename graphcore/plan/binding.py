"""Binding: where the buffers of a plan lie, as real memory.

It keeps the tensors alive, and assumes that they stay where they are. :mod:`graphcore.plan.fitting`
makes one of tensors that it has checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphcore.driver import Driver
from graphcore.driver.records import MemoryKind
from graphcore.errors import PlanError
from graphcore.plan.records import PlanBuffer, View
from graphcore.resources.lifetime import Owner
from graphcore.resources.tensors import TensorRef


@dataclass(frozen=True, slots=True)
class Place:
    """Where one buffer lies.

    Args:
        ref: Its memory, laid out as the plan says.
        given: The tensor as it was given; None for memory that the plan allocates.
        memory: HOST for host memory that only copies touch.
        library: "torch" or "cupy" where calls get views of it as theirs, else "".
    """

    ref: TensorRef
    given: Any = None
    memory: MemoryKind = MemoryKind.DEVICE
    library: str = ""


class Binding:
    """The places of a plan's buffers by name."""

    def __init__(self, driver: Driver, places: Mapping[str, Place]) -> None:
        self.driver = driver
        self._places = dict(places)
        # what the plan allocates is handed to calls as the given buffers are
        self._library = next((p.library for p in self._places.values() if p.library), "")

    def find(self, buffer: PlanBuffer) -> Place | None:
        """Where ``buffer`` lies; None for memory that the plan has yet to allocate."""
        return self._places.get(buffer.name)

    def place(self, buffer: PlanBuffer) -> Place:
        """Where ``buffer`` lies; PlanError where nothing has given or allocated it by now."""
        place = self.find(buffer)
        if place is None:
            raise PlanError(
                f"buffer {buffer.name!r}: expected its allocation before its use, got none"
            )
        return place

    def ref(self, view: View) -> TensorRef:
        """The memory of ``view``.

        Raises:
            PlanError: The address is no multiple of the element size.
        """
        ref = self.place(view.buffer).ref
        address = ref.address + view.offset
        if view.size and address % view.itemsize:
            raise PlanError(
                f"buffer {view.buffer.name!r}: expected an address that is a multiple of "
                f"{view.itemsize} for a view of {view.dtype} at byte {view.offset}, "
                f"got {address:#x}"
            )
        return replace(
            ref,
            address=address,
            shape=view.shape,
            strides=view.strides,
            dtype=view.dtype,
            itemsize=view.itemsize,
        )

    def address(self, view: View) -> int:
        """The address of the first element of ``view``; raises as :meth:`ref`."""
        return self.ref(view).address

    def allocated(self, buffer: PlanBuffer, address: int, owner: object = None) -> None:
        """Notes where memory that the plan allocates lies."""
        is_host = self.driver.is_emulated
        ref = TensorRef(
            address=address,
            shape=buffer.shape,
            strides=buffer.strides,
            dtype=buffer.dtype,
            itemsize=buffer.itemsize,
            device_kind="cpu" if is_host else "cuda",
            device=0 if is_host else self.driver.device,
            owner=owner,
        )
        self.replace(buffer, Place(ref, library=self._library))

    def replace(self, buffer: PlanBuffer, place: Place) -> None:
        """Puts ``buffer`` elsewhere."""
        self._places[buffer.name] = place

    def inner(self, bindings: tuple[tuple[str, View], ...]) -> Binding:
        """The binding of an embedded plan, whose buffers are views of this one's."""
        places = {
            name: replace(self.place(view.buffer), ref=self.ref(view)) for name, view in bindings
        }
        return Binding(self.driver, places)

    def copy(self) -> Binding:
        """A binding that takes other allocations than this one."""
        return Binding(self.driver, self._places)

    def owners(self) -> Iterator[Owner]:
        """The tensors that were given, under the names of their buffers."""
        for name, place in self._places.items():
            if place.given is not None:
                yield Owner(place.given, name)
