"""SlotAdmission: gives the experts of a step their slots, and copies those that are missing.

Two kernels on one stream, for one tensor of expert ids; no host in between, so that a captured
admission follows the router and the tables at every replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphcore_kernels import RouteStatus, route_plan
from graphcore_kernels.route_layout import output_shapes

from graphcore.driver import active
from graphcore.errors import CapacityError, CaptureError, LifecycleError
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.decisions.static_tensors import StaticTensors
from graphcore.moe.slots.slot_group import SlotGroup
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import describe


@dataclass(frozen=True, slots=True)
class AdmissionOutcome:
    """What became of a step.

    Args:
        status: OK, or why the step was refused: then it has no rows, and the slots are as before.
        unique: Experts of the step.
        misses: Those that were copied.
        detail: The first bad route of INVALID_ROUTE, the slots needed of TOO_MANY_ROUTES, else -1.
    """

    status: RouteStatus
    unique: int
    misses: int
    detail: int

    @property
    def is_ok(self) -> bool:
        return self.status is RouteStatus.OK

    @property
    def reason(self) -> str:
        """In words, with what was wrong."""
        if self.status is RouteStatus.INVALID_ROUTE:
            return f"{self.status.reason} (route {self.detail})"
        if self.status is RouteStatus.TOO_MANY_ROUTES:
            return f"{self.status.reason} ({self.detail} needed)"
        return self.status.reason


class SlotAdmission:
    """The admission of steps of one shape to the slots of one group. Not locked.

    Args:
        pool: Whose slots.
        name: Of the group.
        ids: int32 or int64 [rows, top_k] on the device: the router's choice, at a fixed address.
        weights: float32, float16 or bfloat16 [rows, top_k]: what ``outputs["scale"]`` is made of.
        counts: ``totals`` and ``fault`` of its own; None: its steps count as the group's.

    Attributes:
        outputs: What the grouped product takes (``offsets``, ``slots``, ``gather``, ``scatter``,
            ``scale``), and ``route_slots`` and ``report``; see
            ``graphcore_kernels.route_layout.output_shapes``.
        serial: Of the pool's allocations that it works on.

    Raises:
        CacheTypeError: ``ids`` or ``weights`` is no tensor.
        CapacityError: The routes may name more experts than there are slots: such steps are
            staged (:class:`graphcore.moe.StagedProducts`).
        CaptureError: Inside a capture.
        ConfigurationError: Tensors that do not fit.
        CudaError: Out of memory.
    """

    def __init__(
        self,
        pool: SlotPool,
        name: str,
        ids: Any,
        *,
        weights: Any = None,
        counts: Mapping[str, Buffer] | None = None,
    ) -> None:
        if active.current() is not None:
            raise CaptureError("SlotAdmission: not while a graph is captured; make it before")
        group = pool[name]
        shape = describe(ids, name="ids").shape
        self._pool, self.name, self.serial = pool, name, pool.serial
        self.routes = _checked_routes(shape, group)
        self.rows, self.top_k = (*shape, 1)[:2]
        shapes = output_shapes(group.experts, self.rows, self.top_k)
        self._static = StaticTensors(pool.driver, shapes)
        self.outputs: Mapping[str, Buffer] = self._static.tensors
        self._gather = group.gather
        tables = {**group.tables.tensors, **(counts or {})}
        self._plan = route_plan.plan(ids, tables, self.outputs, weights=weights, policy=pool.policy)

    @property
    def plan_buffer(self) -> Buffer:
        """The memory that all outputs lie in."""
        return self._static.memory

    def launch(self, stream: Any = None) -> None:
        """Admits the experts that ``ids`` names, on ``stream``, or adds two nodes to its capture.

        Args:
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where ids are theirs, else the legacy one.

        Raises:
            CaptureError: A launch failed before, and the group must be settled outside of captures.
            ConfigurationError: The stream, or the capture under way, is another device's.
            CudaError: The driver refused a launch. The copy may not have run: the next launch first
                empties the slots that it was for, and waits for all work to do so.
            LifecycleError: The pool has grown or is closed.
        """
        if self._pool.is_closed or self._pool.serial != self.serial:
            raise LifecycleError(
                f"admission to group {self.name}: its slots are others now (serial {self.serial}, "
                f"pool {self._pool!r}); make another"
            )
        self._pool.settle(self.name)
        try:
            self._plan.launch(stream)
            self._gather.launch(stream)
        except BaseException:  # a plan may be there without its copy
            self._pool.doubt(self.name)
            raise

    def outcome(self) -> AdmissionOutcome:
        """What became of the newest step, after all work."""
        report = self.outputs["report"]
        assert report.driver is not None
        with active.outside_captures():
            data = memoryview(report.driver.read(report.address, report.nbytes)).cast("i")
        status, unique, misses, detail = data
        return AdmissionOutcome(RouteStatus(status), unique, misses, detail)

    def close(self) -> None:
        """Lets go of the outputs; graphs that use them keep them."""
        self._static.close()


def _checked_routes(shape: tuple[int, ...], group: SlotGroup) -> int:
    routes = 1
    for size in shape:
        routes *= size
    needed = slots_needed(routes, group.experts)
    if needed > group.slots:
        raise CapacityError(
            f"ids: expected at most {group.slots} routes, a slot of group {group.name} for each, "
            f"got {routes} (shape {shape})"
        )
    return routes
