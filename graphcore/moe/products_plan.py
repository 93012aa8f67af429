"""ProductsPlan: the kernels that give one step of a group its experts, for a number of rows.

Router's choice -> slots, copies of the missing, up with SwiGLU, down with the weighted sum. A plan
is of sizes alone: any layer of these sizes fills its own memory in, and any step its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphcore_kernels import RoutePolicy, moe_grouped_gemm, route_plan
from graphcore_kernels.route_layout import output_shapes, table_shapes

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.moe.kernel_call import KernelCall, place_address
from graphcore.moe.product_options import ProductOptions
from graphcore.moe.slots_needed import slots_needed
from graphcore.moe.static_tensors import offsets_of
from graphcore.resources.buffer import Buffer
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides

X, IDS, WEIGHTS, OUT, SCRATCH, OUTPUTS = range(6)
"""Places that a step fills in, in the order in which a launch takes their addresses."""
GATE_UP, DOWN, ERROR = 6, 7, 8
"""Places of a layer; its tables follow."""
_FIRST_TABLE = 9
_ALIGNMENT = 256
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
        forms: Of the two products; None: what suits the rows.
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
    forms: tuple[str, str] | None = None

    @property
    def most_rows(self) -> int:
        """Rows of a step whose routes have a slot each, whoever they name; 0: not even one."""
        return self.slots // self.top_k

    @property
    def fits(self) -> bool:
        """Whether every route has a slot, whoever the routes name."""
        return slots_needed(self.rows * self.top_k, self.experts) <= self.slots


@dataclass(frozen=True, slots=True)
class ProductsPlan:
    """The kernels of a step, checked and chosen.

    Args:
        sizes: What for.
        route: The plan of slots; the copy of missing experts follows it.
        products: The kernels after that copy.
        forms: Of the two products.
        scratch_bytes: What lies at place SCRATCH: between the products.
        outputs_bytes: What lies at place OUTPUTS: those of the route plan, as ``SlotAdmission`` has
            them.
    """

    sizes: ProductsSizes
    route: KernelCall
    products: tuple[KernelCall, ...]
    forms: tuple[str, str]
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
    view = _Views(driver)
    rows, routes = sizes.rows, sizes.rows * sizes.top_k
    tables = {
        name: view.at(table_places()[name], dtype, shape)
        for name, (dtype, shape) in table_shapes(sizes.experts, sizes.slots).items()
    }
    scratch = _Scratch(view)
    shapes = output_shapes(sizes.experts, rows, sizes.top_k)
    offsets, outputs_bytes = offsets_of(shapes)
    outputs = {
        name: view.at(OUTPUTS, dtype, shape, offsets[name])
        for name, (dtype, shape) in shapes.items()
    }
    inner = scratch.tensor(sizes.dtype, (routes, sizes.inner))
    space = moe_grouped_gemm.workspace_bytes(routes, sizes.hidden)
    workspace = scratch.tensor("uint8", (space,))
    chosen = (rows, sizes.top_k)
    route = route_plan.plan(
        view.at(IDS, sizes.ids, chosen),
        tables,
        outputs,
        weights=view.at(WEIGHTS, sizes.weights, chosen),
        policy=policy,
    )
    shared: dict[str, Any] = {"error": view.at(ERROR, "int32", (1,)), "driver": driver}
    forms = sizes.forms or (None, None)
    up = moe_grouped_gemm.plan(
        view.at(X, sizes.dtype, (rows, sizes.hidden)),
        view.at(GATE_UP, sizes.dtype, _bank(sizes, 2 * sizes.inner, sizes.hidden)),
        outputs["offsets"],
        outputs["slots"],
        inner,
        gather=outputs["gather"],
        form=forms[0],
        **sizes.options.first,
        **shared,
    )
    down = moe_grouped_gemm.plan(
        inner,
        view.at(DOWN, sizes.dtype, _bank(sizes, sizes.hidden, sizes.inner)),
        outputs["offsets"],
        outputs["slots"],
        view.at(OUT, sizes.dtype, (rows, sizes.hidden)),
        scale=outputs["scale"],
        scatter=outputs["scatter"],
        workspace=workspace,
        form=forms[1],
        **sizes.options.second,
        **shared,
    )
    return ProductsPlan(
        sizes,
        KernelCall.over_places(route.kernel, route.config, route.arguments),
        tuple(
            KernelCall.over_places(each.kernel, each.config, each.arguments)
            for each in (*up.launches, *down.launches)
        ),
        (up.form.name, down.form.name),
        scratch.size,
        outputs_bytes,
    )


def of_one_form(sizes: ProductsSizes, plan: ProductsPlan, rows: int) -> ProductsSizes:
    """The sizes of ``rows`` rows out of those of ``plan``, whose bits they shall have."""
    return replace(sizes, rows=rows, forms=plan.forms)


def _bank(sizes: ProductsSizes, columns: int, depth: int) -> tuple[int, int, int]:
    pair = (columns, depth) if sizes.options.layout == "nk" else (depth, columns)
    return (sizes.slots, *pair)


class _Views:
    """Tensors that lie at places, for planning; nothing is there."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def at(self, place: int, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Buffer:
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


class _Scratch:
    """Tensors one after another at place SCRATCH."""

    def __init__(self, view: _Views) -> None:
        self._view = view
        self.size = 0

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        made = self._view.at(SCRATCH, dtype, shape, self.size)
        self.size += -(-made.nbytes // _ALIGNMENT) * _ALIGNMENT
        return made
