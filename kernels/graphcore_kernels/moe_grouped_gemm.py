"""``moe_grouped_gemm``: the launcher of the grouped product. It checks, chooses and launches.

A product is checked whole before anything is launched; one that raises has written nothing. Counts,
offsets and slots stay on the device: launch shapes depend on capacities alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graphcore.driver import LEGACY_STREAM, Driver, active
from graphcore.driver.records import CaptureState, DeviceInfo
from graphcore.errors import CaptureError, ConfigurationError
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef, describe
from graphcore_kernels._drivers import Operand, Place, choose_place, device_facts
from graphcore_kernels._gemm_faults import GemmFault, read_fault
from graphcore_kernels._gemm_forms import (
    Form,
    Layout,
    choose_form,
    choose_portable_form,
    combine_config,
    combine_kernel,
    forms_of,
    places_bytes,
    product_kernel,
    warpgroup_product,
    warpgroups_of,
)
from graphcore_kernels._gemm_operands import (
    WRITTEN,
    Choices,
    Sizes,
    are_within_reach,
    arithmetic_of,
    check_written,
    measure,
    workspace_bytes,
)
from graphcore_kernels._gemm_warpgroup import encoded_maps, why_not_warpgroups
from graphcore_kernels._module import load
from graphcore_kernels._planned import KernelLaunch, Planned

_OLDEST = (8, 0)


@dataclass(frozen=True, slots=True)
class GroupedGemmPlan(Planned):
    """One product, checked and chosen; launch it as often as wanted.

    Args:
        operands: By name; the plan keeps them alive. ``out``, ``workspace`` and ``error`` are here
            also where the plan allocated them.
        sizes: What was measured.
        form: How it is done.
        launches: The kernels, in order: the product, then the one that combines. None where there
            are no rows.
        driver: Where it runs, unless the stream or a capture says another of the same device.
    """

    name: ClassVar[str] = "moe_grouped_gemm"
    operands: Mapping[str, Operand]
    sizes: Sizes
    form: Form
    launches: tuple[KernelLaunch, ...]
    driver: Driver

    @property
    def out(self) -> Any:
        return self.operands["out"].obj

    @property
    def error(self) -> Any:
        return self.operands["error"].obj

    @property
    def is_empty(self) -> bool:
        return not self.launches

    def kept(self) -> Mapping[str, Operand]:
        return self.operands

    def kernels(self, driver: Driver) -> Sequence[KernelLaunch]:
        del driver  # they are of the device that they were chosen for
        return self.launches

    def home(self) -> Driver:
        return self.driver

    def read_fault(self) -> GemmFault | None:
        """What the error word says after all work; it is not cleared. Not inside a capture."""
        address = self.operands["error"].ref.address
        return read_fault(int.from_bytes(self.driver.read(address, 4), "little"))


class MoeGroupedGemm:
    """The callable behind :data:`moe_grouped_gemm`; it holds nothing."""

    workspace_bytes = staticmethod(workspace_bytes)
    """``workspace_bytes(rows, columns)``: what combining ``rows`` rows of ``columns`` columns of
    out needs; without ``scatter`` no workspace is needed."""

    @staticmethod
    def choose_form(
        rows: int,
        experts: int,
        dtype: str,
        *,
        capability: tuple[int, int],
        layout: Layout = "nk",
        precision: str = "ieee",
    ) -> str:
        """The form that a product of these capacities takes where none is named.

        For products that are done in parts and must have the bits of the whole. Only a product
        whose operands, or whose device, warpgroups cannot take has another: see ``form`` of the
        call.

        Args:
            rows: Capacity in rows.
            experts: As many as offsets has, less one.
            dtype: Of x and the weights.
            capability: Of the device, (major, minor), as ``Driver.device_info`` has it.
            layout: Of the weights.
            precision: Of float32.
        """
        arithmetic = arithmetic_of(dtype, precision)
        return choose_form(rows, experts, arithmetic, layout, capability).name

    def __call__(  # noqa: PLR0913  (each is a choice of its own)
        self,
        x: Any,
        weights: Any,
        offsets: Any,
        slots: Any = None,
        out: Any = None,
        *,
        gather: Any = None,
        scale: Any = None,
        scatter: Any = None,
        activation: str | None = None,
        gate_up: str = "concat",
        layout: str = "nk",
        precision: str = "ieee",
        workspace: Any = None,
        error: Any = None,
        form: str | None = None,
        stream: Any = None,
        driver: Driver | None = None,
    ) -> Any:
        """Multiplies rows of ``x`` by the weights of their expert, all experts in one launch.

        Expert e has rows offsets[e] to offsets[e + 1] of the product and its weights in row
        slots[e] of the bank. Both tables are read on the device when the kernel runs, so that a
        captured launch follows whatever they then say. A row's bits depend on the row, its weights
        and the form alone: neither on its neighbours nor on where its expert lies.

        What the device finds wrong goes to ``error``, never to an illegal access: a row that cannot
        be computed (expert without a slot, or its row of ``x`` outside) is zero; with bad offsets
        all are. Rows outside offsets[0] to offsets[E] are left as they were.

        Args:
            x: [x_rows, K] bfloat16, float16 or float32.
            weights: [n_slots, N, K], or [n_slots, K, N] in layout "kn"; of x's type.
            offsets: int32 [E + 1], ascending, at most 512 experts. The last may be below the
                capacity in rows.
            slots: int32 [E], or None where expert e lies in row e.
            out: [rows, N] of x's type, or [rows, N / 2] after an activation; with ``scatter``
                [tokens, ...]. None allocates it (as many tokens as x has rows).
            gather: int32 [rows]: the row of x for each row of the product. None: the same row.
                Its length, else x's, is the capacity in rows.
            scale: float32 [rows]: a factor for each row of the product, after the activation.
            scatter: int32 [rows]: the route of each row, which is token * choices + choice; every
                route at most once. Then out[token] is the sum of its choices' rows, in their
                order, in F32, without atomics; a route that no row has adds nothing.
                choices = rows / tokens.
            activation: "swiglu": silu(gate) * up; the weights hold both, N = 2 * inner.
            gate_up: "concat" (all of gate, then all of up) or "interleaved" (in turn).
            layout: "nk" or "kn".
            precision: Of float32: "ieee" (F32 arithmetic), "tf32x3" (three products of TF32 on
                the tensor cores, error about that of F32; infinities become NaN, and numbers from
                3.4019e38 on NaN or infinities) or "tf32". Sums are F32 everywhere.
            workspace: At least ``workspace_bytes(rows, columns of out)`` bytes, of any type, with
                any contents; needed with ``scatter`` only. None allocates it.
            error: int32 [1], raised by the device to expert * 256 + fault (GemmFault) where that
                is greater, and never cleared. None allocates it.
            form: "direct", "flow", "wide", "tile64" or "tile128" instead of what suits the
                capacities. Every precision and layout has some of them. "warpgroup64" (not of
                "ieee"), "warpgroup128" (of "tf32x3") and "warpgroup256" (of 16-bit elements) are
                for layout "nk" on devices of capability (9, 0), rows of x and of the weights that
                share no memory, and with an activation N a multiple of 16, "warpgroup256" also
                for two multiprocessors or more; they are taken unasked only where they can be.
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy one.
            driver: The driver to launch through. None: the stream's, the capture's or the device's.

        Returns:
            ``out``.

        Raises:
            CacheTypeError: An operand is no tensor, or ``stream`` no stream.
            CapacityError: The workspace is too small.
            CaptureError: Inside a capture ``out``, ``error`` or a needed ``workspace`` is None.
            ConfigurationError: Shapes, element types, strides, alignment (rows of x and weights at
                multiples of 16 bytes), devices or choices do not fit, or out, workspace or error
                shares memory with another operand.
            CudaError: The driver refused a launch.
        """
        made = self.plan(
            x, weights, offsets, slots, out, gather=gather, scale=scale, scatter=scatter,
            activation=activation, gate_up=gate_up, layout=layout, precision=precision,
            workspace=workspace, error=error, form=form, stream=stream, driver=driver,
        )  # fmt: skip
        made.launch(stream)
        return made.out

    def plan(  # noqa: PLR0913  (each is a choice of its own)
        self,
        x: Any,
        weights: Any,
        offsets: Any,
        slots: Any = None,
        out: Any = None,
        *,
        gather: Any = None,
        scale: Any = None,
        scatter: Any = None,
        activation: str | None = None,
        gate_up: str = "concat",
        layout: str = "nk",
        precision: str = "ieee",
        workspace: Any = None,
        error: Any = None,
        form: str | None = None,
        stream: Any = None,
        driver: Driver | None = None,
    ) -> GroupedGemmPlan:
        """Checks, chooses, allocates and loads now, so that a capture only launches.

        Args and errors as for the call itself; ``stream`` only says whether it is captured.
        """
        given = {
            "x": x, "weights": weights, "offsets": offsets, "slots": slots, "gather": gather,
            "scale": scale, "scatter": scatter, "out": out, "workspace": workspace,
            "error": error,
        }  # fmt: skip
        operands = {
            name: Operand(obj, describe(obj, writable=name in WRITTEN, name=name))
            for name, obj in given.items()
            if obj is not None or name in {"x", "weights", "offsets"}
        }
        sizes = measure(_refs(operands), Choices(activation, gate_up, layout, precision))
        place = choose_place(stream, tuple(operands.values()), driver)
        _check_device(place.driver)
        chosen = _form_of(_refs(operands), sizes, form, device_facts(place.driver))
        if not are_within_reach(_refs(operands), sizes):
            chosen = chosen.alone
        operands |= _allocate(operands, sizes, place)
        check_written(_refs(operands), sizes)
        launches = _launches(_refs(operands), sizes, chosen, place.driver)
        for each in launches:
            load(place.driver, each.kernel)
        return GroupedGemmPlan(operands, sizes, chosen, launches, place.driver)

    def __repr__(self) -> str:
        return "moe_grouped_gemm(x, weights, offsets, slots=None, out=None, ..., stream=None)"


moe_grouped_gemm = MoeGroupedGemm()


def _refs(operands: Mapping[str, Operand]) -> dict[str, TensorRef]:
    return {name: operand.ref for name, operand in operands.items()}


def _form_of(
    refs: Mapping[str, TensorRef], sizes: Sizes, name: str | None, device: DeviceInfo
) -> Form:
    capacities = sizes.rows, sizes.experts, sizes.arithmetic, sizes.layout
    if name is None:
        chosen = choose_form(*capacities, device.capability)
        if chosen.shape and (
            why_not_warpgroups(refs, sizes, device.capability) or chosen.shape.why_not(device)
        ):
            return choose_portable_form(*capacities)
        return chosen
    if name.startswith("warpgroup"):
        expected = why_not_warpgroups(refs, sizes, device.capability)
        if expected:
            raise ConfigurationError(f"form: {name!r}: expected {expected}")
    forms = {**forms_of(sizes.arithmetic, sizes.layout), **warpgroups_of(sizes.arithmetic)}
    if name not in forms:
        raise ConfigurationError(
            f"form: expected one of {', '.join(forms)} for {sizes.arithmetic} in layout "
            f"{sizes.layout!r}, got {name!r}"
        )
    shape = forms[name].shape
    if shape and (expected := shape.why_not(device)):
        raise ConfigurationError(f"form: {name!r}: expected {expected}")
    return forms[name]


def _check_device(driver: Driver) -> None:
    capability = device_facts(driver).capability
    if not driver.is_emulated and capability < _OLDEST:
        raise ConfigurationError(
            f"device: expected compute capability {_OLDEST} or newer, got {capability}"
        )


def _allocate(operands: Mapping[str, Operand], sizes: Sizes, place: Place) -> dict[str, Operand]:
    """What is written and was not given; an error word is cleared."""
    wanted: dict[str, tuple[tuple[int, ...], str]] = {
        "out": ((sizes.tokens or sizes.rows, sizes.out_columns), operands["x"].ref.dtype),
        "error": ((1,), "int32"),
    }
    if sizes.workspace_bytes:
        wanted["workspace"] = ((sizes.workspace_bytes,), "uint8")
    missing = [name for name in wanted if name not in operands]
    if missing and _is_capturing(place):
        shape, dtype = wanted[missing[0]]
        raise CaptureError(
            f"{missing[0]}: expected a tensor inside a capture, where nothing is allocated "
            f"({dtype} {list(shape)}), got None"
        )
    made = {}
    for name in missing:
        buffer = Buffer.allocate(*wanted[name], driver=place.driver)
        if name == "error":
            buffer.write(0)
        made[name] = Operand(buffer, describe(buffer))
    return made


def _is_capturing(place: Place) -> bool:
    if active.current() is not None:
        return True
    # no capture takes the legacy stream, and asking about it may be an error in one
    if place.stream in (0, LEGACY_STREAM):
        return False
    return place.driver.capture_status(place.stream).state is CaptureState.ACTIVE


def _launches(
    refs: Mapping[str, TensorRef], sizes: Sizes, form: Form, driver: Driver
) -> tuple[KernelLaunch, ...]:
    if not sizes.rows:
        return ()
    device = device_facts(driver)
    address = {name: ref.address for name, ref in refs.items()}
    places, out_stride = 0, _step(refs["out"], 0)
    products = address["out"]
    if sizes.tokens:
        places = address["workspace"]
        products = places + places_bytes(sizes.rows)
    maps: tuple[bytes, ...] = ()
    if form.shape:
        product = warpgroup_product(
            sizes.arithmetic, form, has_pairs=sizes.activation > 0, is_combined=sizes.tokens > 0
        )
        maps = encoded_maps(driver, refs, sizes, form.shape)
    else:
        product = product_kernel(sizes.arithmetic, sizes.layout, form, device.capability)
    arguments = product.pack(
        *maps,
        address["x"], address["weights"], address["offsets"], address.get("slots", 0),
        address.get("gather", 0), address.get("scale", 0), address.get("scatter", 0), products,
        places, address["error"], _step(refs["x"], 0), _step(refs["weights"], 0),
        _step(refs["weights"], 1), sizes.out_columns if sizes.tokens else out_stride,
        sizes.x_rows, sizes.rows, sizes.experts, sizes.n_slots, sizes.columns, sizes.depth,
        sizes.rows if sizes.tokens else 0, sizes.activation,
    )  # fmt: skip
    config = form.config(sizes.rows, sizes.experts, sizes.columns, device)
    launches = (KernelLaunch(product, config, arguments),)
    if not sizes.tokens:
        return launches
    combine = combine_kernel(sizes.arithmetic)
    arguments = combine.pack(
        products, places, address["scatter"], address["offsets"], address["out"],
        address["error"], out_stride, sizes.tokens, sizes.rows // sizes.tokens,
        sizes.out_columns, sizes.experts,
    )  # fmt: skip
    config = combine_config(sizes.tokens, sizes.out_columns, device.multiprocessors)
    return (*launches, KernelLaunch(combine, config, arguments))


def _step(ref: TensorRef, axis: int) -> int:
    """Elements from one index to the next; an axis of one index takes none."""
    return ref.strides[axis] if ref.shape[axis] > 1 else 0
