"""ReadyProducts: a plan with a group's memory filled in, to be launched over tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphcore_kernels._module import load

from graphcore.driver import Driver
from graphcore.driver.records import FunctionHandle, StreamHandle
from graphcore.moe.layers.kernel_call import KernelCall
from graphcore.moe.layers.products_plan import (
    DOWN,
    ERROR,
    GATE_UP,
    ProductsPlan,
    ProductsSizes,
    table_places,
)
from graphcore.moe.slots.slot_group import SlotGroup
from graphcore.resources.buffer import Buffer
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides


@dataclass(frozen=True, slots=True)
class ProductsTensors:
    """Addresses of a step's tensors; see :class:`SlotProducts`.

    ``outputs``: those of the route plan, where they have a place of their own; 0: behind scratch.
    """

    x: int
    ids: int
    weights: int
    out: int
    scratch: int
    outputs: int = 0

    def addresses(self, plan: ProductsPlan) -> tuple[int, ...]:
        """In the order in which the kernels of ``plan`` take them."""
        outputs = self.outputs or self.scratch + plan.scratch_bytes
        return (self.x, self.ids, self.weights, self.out, self.scratch, outputs)

    def behind(self, sizes: ProductsSizes, rows: int) -> ProductsTensors:
        """Those of the part of a step that begins at row ``rows``."""
        row = sizes.hidden * DTYPES[sizes.dtype].itemsize
        routes = rows * sizes.top_k
        return replace(
            self,
            x=self.x + rows * row,
            ids=self.ids + routes * DTYPES[sizes.ids].itemsize,
            weights=self.weights + routes * DTYPES[sizes.weights].itemsize,
            out=self.out + rows * row,
        )

    def described(self, sizes: ProductsSizes, driver: Driver) -> tuple[TensorRef, ...]:
        """x, ids, weights and out as a staged step takes them; whose they are is not known."""
        row, routes = (sizes.rows, sizes.hidden), (sizes.rows, sizes.top_k)
        return tuple(
            TensorRef(
                address,
                shape,
                contiguous_strides(shape),
                dtype,
                DTYPES[dtype].itemsize,
                "cpu" if driver.is_emulated else "cuda",
                0 if driver.is_emulated else driver.device,
            )
            for address, shape, dtype in (
                (self.x, row, sizes.dtype),
                (self.ids, routes, sizes.ids),
                (self.weights, routes, sizes.weights),
                (self.out, row, sizes.dtype),
            )
        )


@dataclass(frozen=True, slots=True)
class ReadyProducts:
    """A plan with the memory of a group filled in, and its kernels loaded."""

    plan: ProductsPlan
    calls: Sequence[tuple[FunctionHandle, KernelCall]]

    @classmethod
    def make(
        cls, plan: ProductsPlan, group: SlotGroup, error: Buffer, driver: Driver
    ) -> ReadyProducts:
        addresses = {
            GATE_UP: group.rows["gate_up"].address,
            DOWN: group.rows["down"].address,
            ERROR: error.address,
        }
        tables = group.tables.tensors
        addresses |= {place: tables[name].address for name, place in table_places().items()}
        gather = group.gather
        calls = (
            plan.route.filled(addresses),
            KernelCall(gather.kernel, gather.config, gather.arguments),
            *(each.filled(addresses) for each in plan.products),
        )
        return cls(plan, [(load(driver, call.kernel), call) for call in calls])

    def launch(self, driver: Driver, stream: StreamHandle, where: ProductsTensors) -> None:
        """Launches every kernel of the step.

        Raises:
            CudaError: The driver refused one; those before it are launched.
        """
        addresses = where.addresses(self.plan)
        for function, call in self.calls:
            call.launch(driver, function, stream, addresses)
