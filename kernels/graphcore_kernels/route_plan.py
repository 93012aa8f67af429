"""``route_plan``: the launcher of the kernel that gives the routes of a step their slots.

One block on the device reads the router's choice, keeps the experts that are resident, chooses
whose slot each missing one takes, and writes what the copy and the grouped product need. The host
takes no part in it: a captured plan follows whatever the tables then say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from graphcore.driver import Kernel, kernel
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import TensorRef, describe
from graphcore_kernels._drivers import Operand, choose_driver
from graphcore_kernels._module import load, load_through_cupy, read_source
from graphcore_kernels._planned import OneKernel
from graphcore_kernels.route_layout import (
    EPOCH_STEPS,
    RoutePolicy,
    Shapes,
    output_shapes,
    table_shapes,
)
from graphcore_kernels.route_plan_reference import run

THREADS = 256
_WARP = 32
# what a block has without asking for more
_SHARED_BYTES = 48 * 1024
_MOST_ROUTES = 2**24
_WEIGHT_TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
_READ_ONLY = ("pinned", "is_open")
_POINTEES = {"int32": "i32", "int64": "i64", "float32": "f32"}


def _kernel_of(bits: int) -> Kernel:
    pointers = [
        f"{'const ' if name in _READ_ONLY else ''}{_POINTEES[dtype]}* {name}"
        for shapes in (table_shapes(1, 1), output_shapes(1, 1, 1))
        for name, (dtype, _) in shapes.items()
    ]
    sizes = (
        "u32 routes, u32 top_k, u32 expert_count, u32 slot_count, u32 uses_frequency, "
        "u32 weight_type, i64 clock_bound, i64 step_bound"
    )
    return kernel(
        f"route_plan_i{bits}",
        f"const i{bits}* ids, const void* weights, {', '.join(pointers)}, {sizes}",
        read_source("route_state.cu") + read_source("route_plan.cu"),
        run,
        loader=load_through_cupy,
    )


route_plan_i32 = _kernel_of(32)
route_plan_i64 = _kernel_of(64)


@dataclass(frozen=True, slots=True)
class RoutePlan(OneKernel):
    """The plan of steps of one shape over one group's tables; launch it for each step.

    Its operands are named as the kernel's parameters are, ids first; its config is one block.
    """

    name: ClassVar[str] = "route_plan"


class RoutePlanner:
    """The callable behind :data:`route_plan`; it holds nothing."""

    def __call__(
        self,
        ids: Any,
        tables: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        weights: Any = None,
        policy: RoutePolicy | None = None,
        stream: Any = None,
    ) -> None:
        """Gives each route of a step the slot of its expert, in one kernel of one block.

        First what the step before decided is committed to the tables; then this step's experts are
        looked up, and each missing one takes the slot that is least in (frequency, last use, slot)
        among those that this step does not use and whose expert is not pinned. The copy of the
        misses (:data:`graphcore_kernels.expert_gather`) must follow on the same stream. A step
        that is refused changes no table but ``fault`` and ``miss_count``, and has no rows.

        Args:
            ids: int32 or int64 [rows, top_k]: the expert of each route, duplicates allowed.
            tables: The group's tables by name; see ``route_layout.table_shapes``.
            outputs: What is written for this step; see ``route_layout.output_shapes``.
            weights: float32, float16 or bfloat16 [rows, top_k], which go to ``outputs["scale"]``
                in the order of the product's rows; None: it is left as it is.
            policy: How victims are chosen; the same for all steps of a group.
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy one.

        Raises:
            CacheTypeError: An operand is no tensor, or ``stream`` no stream.
            ConfigurationError: A tensor is missing, or its type, shape, strides or device does not
                fit; two share memory; more routes or experts than a block holds.
            CudaError: The driver refused the launch.
        """
        _plan(ids, tables, outputs, weights, policy or RoutePolicy()).launch(stream)

    def plan(
        self,
        ids: Any,
        tables: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        weights: Any = None,
        policy: RoutePolicy | None = None,
    ) -> RoutePlan:
        """Checks now, and loads the kernel, so that a capture only launches.

        Args and errors as for the call itself.
        """
        plan = _plan(ids, tables, outputs, weights, policy or RoutePolicy())
        load(choose_driver(tuple(plan.operands.values())), plan.kernel)
        return plan

    def __repr__(self) -> str:
        return "route_plan(ids, tables, outputs, *, weights=None, policy=None, stream=None)"


route_plan = RoutePlanner()


def shared_bytes(experts: int, slots: int, threads: int = THREADS) -> int:
    """Shared memory of the block; struct Work in route_state.cu."""
    words = 7 * slots + 3 * experts + 1 + threads // _WARP * experts + _WARP + 4
    return 8 * slots + 4 * words


def _plan(
    ids: Any,
    tables: Mapping[str, Any],
    outputs: Mapping[str, Any],
    weights: Any,
    policy: RoutePolicy,
) -> RoutePlan:
    chosen = describe(ids, name="ids")
    if chosen.dtype not in ("int32", "int64") or len(chosen.shape) != 2 or not chosen.shape[1]:
        raise ConfigurationError(
            "ids: expected int32 or int64 [rows, top_k] with top_k of at least 1, got "
            f"{chosen.dtype} {chosen.shape}"
        )
    operands = {"ids": _operand("ids", ids, chosen.dtype, chosen.shape)}
    weight_type = 0
    if weights is not None:
        dtype = describe(weights, name="weights").dtype
        if dtype not in _WEIGHT_TYPES:
            raise ConfigurationError(
                f"weights.dtype: expected one of {', '.join(_WEIGHT_TYPES)}, got {dtype}"
            )
        operands["weights"] = _operand("weights", weights, dtype, chosen.shape)
        weight_type = _WEIGHT_TYPES[dtype]
    experts = _length(tables, "slot_for_expert")
    slots = _length(tables, "expert_for_slot")
    _check_sizes(chosen, experts, slots, policy)
    operands |= _operands(tables, table_shapes(experts, slots), "tables")
    operands |= _operands(outputs, output_shapes(experts, *chosen.shape), "outputs")
    _check_devices(operands)
    _check_apart(operands)
    function = route_plan_i32 if chosen.dtype == "int32" else route_plan_i64
    addresses = {name: operand.ref.address for name, operand in operands.items()}
    pointers = [addresses.get(each.name, 0) for each in function.parameters if each.is_pointer]
    arguments = function.pack(
        *pointers, chosen.size, chosen.shape[1], experts, slots, int(policy.uses_frequency),
        weight_type, policy.clock_bound, policy.step_bound,
    )  # fmt: skip
    config = LaunchConfig((1, 1, 1), (THREADS, 1, 1), shared_bytes(experts, slots))
    return RoutePlan(operands, function, config, arguments)


def _length(tables: Mapping[str, Any], name: str) -> int:
    if name not in tables:
        raise ConfigurationError(f"tables: expected {name!r}, got {sorted(tables)}")
    ref = describe(tables[name], name=f"tables[{name!r}]")
    if len(ref.shape) != 1 or not ref.size:
        raise ConfigurationError(f"tables[{name!r}]: expected one axis, not empty, got {ref.shape}")
    return ref.shape[0]


def _operands(given: Mapping[str, Any], shapes: Shapes, what: str) -> dict[str, Operand]:
    missing = sorted(set(shapes) - set(given))
    if missing:
        raise ConfigurationError(f"{what}: expected {', '.join(missing)} too, got {sorted(given)}")
    return {
        name: _operand(f"{what}[{name!r}]", given[name], *shapes[name], writable=True)
        for name in shapes
    }


def _operand(
    name: str, obj: Any, dtype: str, shape: tuple[int, ...], *, writable: bool = False
) -> Operand:
    ref = describe(obj, writable=writable, name=name)
    if (ref.dtype, ref.shape) != (dtype, shape):
        raise ConfigurationError(f"{name}: expected {dtype} {shape}, got {ref.dtype} {ref.shape}")
    if not ref.is_contiguous:
        raise ConfigurationError(
            f"{name}: expected contiguous memory, got strides {ref.strides} for shape {ref.shape}"
        )
    return Operand(obj, ref)


def _check_sizes(ids: TensorRef, experts: int, slots: int, policy: RoutePolicy) -> None:
    if ids.size > _MOST_ROUTES:
        raise ConfigurationError(f"ids: expected at most {_MOST_ROUTES} routes, got {ids.size}")
    if policy.clock_bound < 1 or policy.step_bound < EPOCH_STEPS:
        raise ConfigurationError(
            f"policy: expected a clock_bound of at least 1 and a step_bound of at least "
            f"{EPOCH_STEPS}, got {policy.clock_bound} and {policy.step_bound}"
        )
    needed = shared_bytes(experts, slots)
    if needed > _SHARED_BYTES:
        raise ConfigurationError(
            f"tables: expected experts and slots that fit {_SHARED_BYTES} bytes of shared memory, "
            f"got {experts} experts and {slots} slots, which need {needed}"
        )


def _check_devices(operands: Mapping[str, Operand]) -> None:
    home = operands["slot_for_expert"].ref
    for name, operand in operands.items():
        ref = operand.ref
        if (ref.device_kind, ref.device) != (home.device_kind, home.device):
            raise ConfigurationError(
                f"{name}.device: expected {home.device_kind}:{home.device} as the tables, got "
                f"{ref.device_kind}:{ref.device}"
            )


def _check_apart(operands: Mapping[str, Operand]) -> None:
    spans = sorted(
        (each.ref.address, each.ref.nbytes, name)
        for name, each in operands.items()
        if each.ref.size
    )
    for (start, size, name), (after, _, other) in pairwise(spans):
        # ids and weights are only read, but nothing useful is the same memory as both
        if start + size > after:
            raise ConfigurationError(
                f"{other}: expected memory of its own, got memory that shares bytes with {name}"
            )
