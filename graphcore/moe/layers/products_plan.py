"""ProductsPlan: the kernels that give one step of a group its experts, for a number of rows.

Router's choice -> slots, copies of the missing, up with SwiGLU, down with the weighted sum. A plan
is of sizes alone: any layer of these sizes fills its own memory in, and any step its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphcore_kernels import (
    GroupedGemmPlan,
    RoutePlan,
    RoutePolicy,
    moe_grouped_gemm,
    route_plan,
)
from graphcore_kernels.route_layout import output_shapes, table_shapes

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.decisions.static_tensors import Shapes, offsets_of
from graphcore.moe.layers.kernel_call import KernelCall, place_address
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.resources.buffer import Buffer
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides

X, IDS, WEIGHTS, OUT, SCRATCH, OUTPUTS = range(6)
"""Places that a step fills in, in the order in which a launch takes their addresses."""
GATE_UP, DOWN, ERROR = 6, 7, 8
"""Places of a layer; its tables follow."""
_FIRST_TABLE = 9
MOST_PLANS = 256


@dataclass(frozen=True, slots=True)
class ProductsSizes:
    """All that the kernels of a step depend on.

    Args:
        experts: Of the group.
        slots: Of the group.
        hidden: Columns of a row.
        inner: Columns between up and down.
        dtype: Of rows and experts: "bfloat16", "float16" or "float32".
        options: Of the products; the activation is SwiGLU.
        rows: Of the step.
        top_k: Experts of a row.
        ids: "int32" or "int64".
        weights: "float32", "float16" or "bfloat16".
        form: Of both products; None: what suits the rows.
    """

    experts: int
    slots: int
    hidden: int
    inner: int
    dtype: str
    options: ProductOptions
    rows: int = 1
    top_k: int = 1
    ids: str = "int64"
    weights: str = "float32"
    form: str | None = None

    @property
    def most_rows(self) -> int:
        """Rows of a step whose routes have a slot each, whoever they name; 0: not even one."""
        return self.slots // self.top_k

    @property
    def fits(self) -> bool:
        """Whether every route has a slot, whoever the routes name."""
        return slots_needed(self.rows * self.top_k, self.experts) <= self.slots

    def part(self, rows: int, capability: tuple[int, int]) -> ProductsSizes:
        """Those of ``rows`` of these rows, in the form of all, so that their bits are the same."""
        form = moe_grouped_gemm.choose_form(
            self.rows * self.top_k,
            self.experts,
            self.dtype,
            capability=capability,
            layout=self.options.layout,
            precision=self.options.precision,
        )
        return replace(self, rows=rows, form=form)


@dataclass(frozen=True, slots=True)
class ProductsPlan:
    """The kernels of a step, checked and chosen.

    Args:
        sizes: What for.
        route: The plan of slots; the copy of missing experts follows it.
        products: The kernels after that copy.
        form: Of the products.
        scratch_bytes: What lies at place SCRATCH: between the products.
        outputs_bytes: What lies at place OUTPUTS: those of the route plan, as ``SlotAdmission`` has
            them.
    """

    sizes: ProductsSizes
    route: KernelCall
    products: tuple[KernelCall, ...]
    form: str
    scratch_bytes: int
    outputs_bytes: int


def table_places() -> Mapping[str, int]:
    """Table of a group -> its place."""
    return {name: _FIRST_TABLE + index for index, name in enumerate(table_shapes(1, 1))}


class ProductsPlans:
    """Plans of one driver by their sizes; shared by layers, made at first sight, the oldest go.

    Args:
        driver: That will launch them.
        policy: How victims are chosen.
    """

    def __init__(self, driver: Driver, policy: RoutePolicy) -> None:
        self.driver = driver
        self.policy = policy
        self._plans: dict[ProductsSizes, ProductsPlan] = {}

    def find(self, sizes: ProductsSizes) -> ProductsPlan:
        """The plan for ``sizes``; also inside a capture, since nothing is allocated.

        Raises:
            ConfigurationError: Sizes or element types that the kernels cannot work with.
            CudaError: A kernel could not be loaded.
        """
        plan = self._plans.get(sizes)
        if plan is None:
            plan = make_plan(sizes, self.driver, self.policy)
            while len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[sizes] = plan
        return plan


def make_plan(sizes: ProductsSizes, driver: Driver, policy: RoutePolicy) -> ProductsPlan:
    """Checks, chooses and loads; errors as of :meth:`ProductsPlans.find`."""
    if sizes.options.activation != "swiglu":
        raise ConfigurationError(
            f"options.activation: expected 'swiglu', got {sizes.options.activation!r}"
        )
    tensors = _Tensors(sizes, driver)
    route, up, down = tensors.route(policy), tensors.up(), tensors.down()
    return ProductsPlan(
        sizes,
        KernelCall.over_places(route.kernel, route.config, route.arguments),
        tuple(
            KernelCall.over_places(each.kernel, each.config, each.arguments)
            for each in (*up.launches, *down.launches)
        ),
        up.form.name,
        tensors.scratch_bytes,
        tensors.outputs_bytes,
    )


class _Tensors:
    """What the kernels of a step work on, at places, for planning; nothing is there."""

    def __init__(self, sizes: ProductsSizes, driver: Driver) -> None:
        self._sizes, self._driver = sizes, driver
        rows, routes = sizes.rows, sizes.rows * sizes.top_k
        self._tables = {
            name: self._at(table_places()[name], dtype, shape)
            for name, (dtype, shape) in table_shapes(sizes.experts, sizes.slots).items()
        }
        self._outputs, self.outputs_bytes = self._together(
            OUTPUTS, output_shapes(sizes.experts, rows, sizes.top_k)
        )
        space = moe_grouped_gemm.workspace_bytes(routes, sizes.hidden)
        scratch, self.scratch_bytes = self._together(
            SCRATCH,
            {"inner": (sizes.dtype, (routes, sizes.inner)), "workspace": ("uint8", (space,))},
        )
        self._inner, self._workspace = scratch["inner"], scratch["workspace"]
        self._shared: dict[str, Any] = {
            "error": self._at(ERROR, "int32", (1,)),
            "form": sizes.form,
            "driver": driver,
        }

    def route(self, policy: RoutePolicy) -> RoutePlan:
        """The routes' slots."""
        sizes = self._sizes
        chosen = (sizes.rows, sizes.top_k)
        return route_plan.plan(
            self._at(IDS, sizes.ids, chosen),
            self._tables,
            self._outputs,
            weights=self._at(WEIGHTS, sizes.weights, chosen),
            policy=policy,
        )

    def up(self) -> GroupedGemmPlan:
        """Gate and up, with SwiGLU."""
        sizes, outputs = self._sizes, self._outputs
        return moe_grouped_gemm.plan(
            self._at(X, sizes.dtype, (sizes.rows, sizes.hidden)),
            self._bank(GATE_UP, 2 * sizes.inner, sizes.hidden),
            outputs["offsets"],
            outputs["slots"],
            self._inner,
            gather=outputs["gather"],
            **sizes.options.first,
            **self._shared,
        )

    def down(self) -> GroupedGemmPlan:
        """Down, and the weighted sum of each row's experts."""
        sizes, outputs = self._sizes, self._outputs
        return moe_grouped_gemm.plan(
            self._inner,
            self._bank(DOWN, sizes.hidden, sizes.inner),
            outputs["offsets"],
            outputs["slots"],
            self._at(OUT, sizes.dtype, (sizes.rows, sizes.hidden)),
            scale=outputs["scale"],
            scatter=outputs["scatter"],
            workspace=self._workspace,
            **sizes.options.second,
            **self._shared,
        )

    def _bank(self, place: int, columns: int, depth: int) -> Buffer:
        sizes = self._sizes
        pair = (columns, depth) if sizes.options.layout == "nk" else (depth, columns)
        return self._at(place, sizes.dtype, (sizes.slots, *pair))

    def _together(self, place: int, shapes: Shapes) -> tuple[dict[str, Buffer], int]:
        """Tensors one after another at a place, and all their bytes."""
        offsets, size = offsets_of(shapes)
        tensors = {
            name: self._at(place, dtype, shape, offsets[name])
            for name, (dtype, shape) in shapes.items()
        }
        return tensors, size

    def _at(self, place: int, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Buffer:
        driver = self._driver
        ref = TensorRef(
            address=place_address(place) + offset,
            shape=shape,
            strides=contiguous_strides(shape),
            dtype=dtype,
            itemsize=DTYPES[dtype].itemsize,
            device_kind="cpu" if driver.is_emulated else "cuda",
            device=0 if driver.is_emulated else driver.device,
        )
        return Buffer(ref, driver)
