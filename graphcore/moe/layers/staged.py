"""StagedProducts: a layer's experts through scratch memory of a fixed size, in chunks.

For steps that the slots cannot serve: more experts than slots, experts in pageable memory, slots
that must not be touched. No slot and no table of the pool is read or written; any number of rows
and routes; the same kernels in the same forms as for the slots, so the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from graphcore_kernels import Operand, choose_place, moe_grouped_gemm

from graphcore.driver import Driver, active
from graphcore.driver.api import LEGACY_STREAM
from graphcore.driver.records import CaptureState, StreamHandle
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.moe.decisions.static_tensors import StaticTensors, carve
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.staged_copies import StagedBank, is_pageable
from graphcore.moe.layers.staged_pass import StagedPass, StagedPlanner
from graphcore.moe.layers.staged_sizes import StagedSizes
from graphcore.moe.layers.staging_memory import StagingMemory
from graphcore.moe.manifests.names import Location
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.slots.slot_state import SlotFault, SlotState
from graphcore.moe.slots.slot_tables import SlotTables
from graphcore.resources.buffer import Buffer
from graphcore.resources.overlap import overlap
from graphcore.resources.tensors import TensorRef, describe


class StagedTotals(NamedTuple):
    """What staged passes came to.

    Args:
        passes: That were not refused.
        routes: In them.
        experts: That were copied; once in each pass that has rows of them.
        nbytes: That these copies moved.
    """

    passes: int
    routes: int
    experts: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StagedStep:
    """The products of a step over tensors at fixed addresses, planned; launch it again and again.

    Args:
        operands: ``x``, ``ids``, ``weights`` and ``out``; the step keeps them alive.
        passes: Over parts of the rows, one after the other; one where the memory holds all rows.
        driver: Where.
        has_pageable: Whether the host copies experts.
    """

    operands: Mapping[str, Operand]
    passes: Sequence[StagedPass]
    driver: Driver
    has_pageable: bool

    def launch(self, stream: Any = None) -> None:
        """Computes on ``stream``, or adds its nodes where that captures.

        Experts in pinned memory: nothing is allocated and the host waits for nothing. Experts in
        pageable memory: the host waits for all work before each pass, to learn which to copy.

        Args:
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy one.

        Raises:
            CacheTypeError: ``stream`` is no stream.
            CaptureError: Experts in pageable memory, inside a capture; nothing was launched.
            ConfigurationError: The stream, or the capture under way, is another device's.
            CudaError: The driver refused a launch; ``out`` is undefined, the next launch is right.
        """
        place = choose_place(stream, tuple(self.operands.values()), self.driver)
        if self.has_pageable and _is_capturing(place.driver, place.stream):
            raise CaptureError(
                "staged experts: they lie in pageable memory, which the host must copy, and no "
                "replay would copy it again; use pinned memory, or launch outside of captures"
            )
        for each in self.passes:
            each.launch(place.driver, place.stream, reads_hits=self.has_pageable)
        if place.is_captured:
            for name, operand in self.operands.items():
                active.keep(operand.owner, f"staged experts {name}")


class StagedProducts:
    """The staged products of one group of experts. Not locked.

    Args:
        sources: Bank -> its experts, [experts, ...]: pinned, pageable or device memory. They must
            stay as they are while steps run.
        memory: What the experts pass through; shared by the layers of a model.
        options: Of the products; those of the slots' way.
        up_bank: Name of the first product's bank: gate and up, [E, 2 * inner, hidden] ("nk").
        down_bank: Name of the second product's bank, [E, hidden, inner] ("nk").
        location: Where the experts lie, if it is known; None: it is looked at. The emulated
            driver's device reads all memory that is not called pageable.

    Raises:
        CacheTypeError: A bank is no tensor.
        CapacityError: ``memory`` does not hold one expert.
        CaptureError: Inside a capture.
        ConfigurationError: A bank is missing, or banks do not fit each other.
        CudaError: Out of memory.
        LifecycleError: ``memory`` is closed.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        *,
        memory: StagingMemory,
        options: ProductOptions | None = None,
        up_bank: str = "gate_up",
        down_bank: str = "down",
        location: Location | None = None,
    ) -> None:
        if active.current() is not None:
            raise CaptureError("StagedProducts: not while a graph is captured; make it before")
        missing = sorted({up_bank, down_bank} - set(sources))
        if missing:
            raise ConfigurationError(f"sources: expected {missing[0]!r}, got {sorted(sources)}")
        self.memory, self.driver = memory, memory.driver
        self.options = options or ProductOptions()
        up, down = sources[up_bank], sources[down_bank]
        self.sizes = StagedSizes.of(up, down, self.options)
        self.chunk = self.sizes.most_experts(memory.expert_bytes)
        rows = carve(memory.experts, self.sizes.bank_shapes(self.chunk))
        self._banks = {
            name: StagedBank(source, rows[name], is_pageable(self.driver, source, location))
            for name, source in (("up", up), ("down", down))
        }
        experts = self.sizes.experts
        self._tables = SlotTables(self.driver, SlotState.empty(experts, experts))
        shapes = {"slots": ("int32", (self.chunk,)), "error": ("int32", (1,))}
        self._static = StaticTensors(self.driver, shapes)
        self._static.tensors["slots"].write(range(self.chunk))
        self._static.tensors["error"].write(0)

    @classmethod
    def of_pool(
        cls,
        pool: SlotPool,
        name: str,
        *,
        memory: StagingMemory,
        options: ProductOptions | None = None,
        up_bank: str = "gate_up",
        down_bank: str = "down",
    ) -> StagedProducts:
        """The same experts as a group of ``pool`` has slots for; arguments as for the class."""
        return cls(
            pool[name].sources,
            memory=memory,
            options=options,
            up_bank=up_bank,
            down_bank=down_bank,
        )

    @property
    def has_pageable(self) -> bool:
        """Whether the host copies experts: then no step can be captured."""
        return any(bank.is_pageable for bank in self._banks.values())

    def rows_at_once(self, rows: int, top_k: int) -> int:
        """How many of ``rows`` rows one pass takes.

        Raises:
            CapacityError: The memory does not hold one row.
        """
        most = self.sizes.most_rows(self.memory.row_bytes, rows, top_k, self.chunk)
        return -(-rows // -(-rows // most))

    def plan(self, x: Any, ids: Any, weights: Any, out: Any) -> StagedStep:
        """Checks and loads now, so that a capture only launches; nothing is allocated.

        Args:
            x: [rows, hidden] of the experts' type.
            ids: int32 or int64 [rows, top_k]: the expert of each route, duplicates allowed.
            weights: float32, float16 or bfloat16 [rows, top_k].
            out: [rows, hidden] of the experts' type: the weighted sum of each row's experts. All
                of it is written; where an id is no expert, that pass's rows are 0 and
                :meth:`fault` tells.

        Raises:
            CacheTypeError: An operand is no tensor.
            CapacityError: The memory does not hold one row.
            ConfigurationError: Shapes, types, strides or devices do not fit, or ``out`` shares
                memory with another operand.
            LifecycleError: The memory is closed.
        """
        given = {"x": x, "ids": ids, "weights": weights, "out": out}
        operands = {
            name: Operand(obj, describe(obj, writable=name == "out", name=name))
            for name, obj in given.items()
        }
        rows, top_k = _checked_shapes(operands)
        _check_apart(operands)
        if not rows:
            return StagedStep(operands, (), self.driver, self.has_pageable)
        each = self.rows_at_once(rows, top_k)
        planner = self._planner(rows * top_k)
        passes = []
        for begin in range(0, rows, each):
            count = min(each, rows - begin)
            parts = {
                name: _rows_of(operand, begin, count, self.driver)
                for name, operand in operands.items()
            }
            shapes = self.sizes.step_shapes(count, top_k, self.chunk)
            passes.append(planner.plan(parts, carve(self.memory.rows, shapes)))
        return StagedStep(operands, passes, self.driver, self.has_pageable)

    def launch(self, x: Any, ids: Any, weights: Any, out: Any, stream: Any = None) -> None:
        """Computes on ``stream``, or adds its nodes where that captures.

        Args and errors as for :meth:`plan` and :meth:`StagedStep.launch`; whoever launches over
        the same tensors again keeps what ``plan`` gives.
        """
        self.plan(x, ids, weights, out).launch(stream)

    def totals(self) -> StagedTotals:
        """What the passes came to since this was made, after all work."""
        found = self._tables.read().totals
        # in tables with a slot for every expert each expert of a pass is a hit or a miss
        experts = found.hits + found.misses
        nbytes = sum(each.rows.nbytes // self.chunk for each in self._banks.values())
        return StagedTotals(found.steps, found.routes, experts, experts * nbytes)

    def fault(self) -> SlotFault:
        """The first pass that was refused, and how many were, after all work."""
        return self._tables.read().fault

    def clear_fault(self) -> None:
        """Forgets the refused passes, after all work."""
        self._tables.write(self._tables.read().changed({"fault": [0, 0, 0]}))

    def close(self) -> None:
        """Lets go of its tables; steps that are planned and graphs keep them."""
        self._tables.close()
        self._static.close()

    def _planner(self, routes: int) -> StagedPlanner:
        sizes, options, static = self.sizes, self.options, self._static.tensors
        if static["error"].is_closed:
            raise LifecycleError("staged experts: expected them open, got them closed")
        form = moe_grouped_gemm.choose_form(
            routes,
            sizes.experts,
            sizes.dtype,
            capability=self.driver.device_info().capability,
            layout=options.layout,
            precision=options.precision,
        )
        return StagedPlanner(
            self._banks,
            self._tables.tensors,
            static["slots"],
            static["error"],
            options,
            form,
            self.driver,
        )


def _checked_shapes(operands: Mapping[str, Operand]) -> tuple[int, int]:
    """Rows and top_k; what the shapes say beyond them, the kernels check."""
    ids = operands["ids"].ref
    if len(ids.shape) != 2 or not ids.shape[1]:
        raise ConfigurationError(f"ids: expected [rows, top_k], got {ids.shape}")
    for name, operand in operands.items():
        shape = operand.ref.shape
        if len(shape) != 2 or shape[0] != ids.shape[0]:
            raise ConfigurationError(
                f"{name}: expected two axes and {ids.shape[0]} rows as ids, got {shape}"
            )
    return ids.shape


def _check_apart(operands: Mapping[str, Operand]) -> None:
    """Refuses an ``out`` that a later pass, or this one, would read."""
    out = operands["out"].ref
    for name, operand in operands.items():
        ref = operand.ref
        if name == "out" or not out.size or not ref.size:
            continue
        distance = ref.address - out.address
        if overlap(_sides(out), _sides(ref), distance, out.itemsize, ref.itemsize):
            raise ConfigurationError(
                f"out: expected memory apart from {name}, got memory that shares bytes with it"
            )


def _sides(ref: TensorRef) -> tuple[tuple[int, int], ...]:
    pairs = zip(ref.shape, ref.strides, strict=True)
    return tuple((size, step * ref.itemsize) for size, step in pairs)


def _rows_of(operand: Operand, begin: int, count: int, driver: Driver) -> Any:
    """Some rows of an operand; the operand itself where it is all of them."""
    ref = operand.ref
    if count == ref.shape[0]:
        return operand.obj
    address = ref.address + begin * ref.strides[0] * ref.itemsize
    return Buffer(replace(ref, address=address, shape=(count, *ref.shape[1:])), driver)


def _is_capturing(driver: Driver, stream: StreamHandle) -> bool:
    if active.current() is not None:
        return True
    # no capture takes the legacy stream, and asking about it may be an error in one
    if stream in (0, LEGACY_STREAM):
        return False
    return driver.capture_status(stream).state is CaptureState.ACTIVE
