"""The forms of the grouped product: which kernel there is, which one suits, and how it is launched.

Pure. Everything here depends on capacities and the device alone: a captured launch stays right
whatever counts, offsets and slots say when it is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from graphcore.driver import Kernel, kernel
from graphcore.driver.records import DeviceInfo, LaunchConfig
from graphcore_kernels._gemm_warpgroup import WarpgroupShape, has_warpgroups, warpgroup_kernel
from graphcore_kernels._module import load_through_cupy, read_source
from graphcore_kernels.moe_grouped_gemm_reference import combine_reference, product_reference

Layout = Literal["nk", "kn"]
Way = Literal["direct", "flow", "stream", "tile", "lanes", "warpgroups"]

THREADS = 256
CHUNK_BYTES = 16
"""What memory moves in: rows of x and of the weights begin and end at multiples of it."""
MOST_EXPERTS = 512
PLACES_HEADER = 4
# with the tables of MOST_EXPERTS just below the 99 KiB that a block has on sm_86, sm_89 and sm_120
_RING_BYTES = 96 * 1024
# where a block may have 227 KiB, and is alone on its multiprocessor
_LARGE_RING_BYTES = 192 * 1024
_ROOMY = frozenset({(9, 0), (10, 0), (10, 3)})
_FLOW_WARPS = 8 + 2 + 1
"""Those that multiply, those that copy weights, and the one that copies tokens."""
_FLOW_RING_BYTES = {False: 64 * 1024, True: 192 * 1024}
_FLOW_UNITS = {False: 1, True: 2}
_FLOW_SLICE = {False: 8, True: 16}
# sums on their way out, two barriers for each stage, how many experts have rows, and their shares
_FLOW_BYTES, _SHARE_BYTES = 8 * 32 * 20 * 4 + 16 * 16 + 20, 20
_DIRECT_WARPS, _DIRECT_AHEAD = 4, 8
"""Those that share the depth, and how many steps of it each loads ahead."""
# tokens of two rounds; then sums of two passes, a bit for each expert, and what is said of each
_DIRECT_RING_BYTES = _DIRECT_WARPS * 2 * _DIRECT_AHEAD * 32 * CHUNK_BYTES
_DIRECT_BYTES, _EXPERT_BYTES = 2 * _DIRECT_WARPS * 8 * 20 * 4 + MOST_EXPERTS // 8, 12

ARITHMETIC = ("bf16", "f16", "ieee", "tf32x3", "tf32")
"""By number, as the source has them: an element type, or a precision of F32."""
ITEMSIZES = {"bf16": 2, "f16": 2, "ieee": 4, "tf32x3": 4, "tf32": 4}
ACTIVATIONS = {None: 0, "concat": 1, "interleaved": 2}
"""By number: none, SwiGLU of gate and up one after the other, or in turn."""

_SIGNATURE = (
    "const void* x, const void* weights, const i32* offsets, const i32* slots, const i32* gather, "
    "const f32* scale, const i32* scatter, void* out, i32* places, i32* error, i64 x_stride, "
    "i64 slot_stride, i64 weight_stride, i64 out_stride, i32 x_rows, i32 rows, i32 experts, "
    "i32 n_slots, i32 columns, i32 depth, i32 routes, i32 activation"
)
_COMBINE_SIGNATURE = (
    "const f32* products, const i32* places, const i32* scatter, const i32* offsets, void* out, "
    "i32* error, i64 out_stride, i32 tokens, i32 choices, i32 columns, i32 experts"
)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to do the product.

    Args:
        name: Of the form.
        columns: Of the weights, that a task takes; in a flow, that a warp takes at a time; of
            warpgroups, that a block of threads takes of a task.
        tokens: The most rows that a pass over the weights takes.
        way: "direct" (from memory into registers), "flow" (through one ring of copies from the
            first expert to the last) and "stream" (task by task) take all rows of an expert, pass
            after pass; "tile", "lanes" (in F32 arithmetic) and "warpgroups" take tiles.
        blocks: That a multiprocessor holds at once, where it has room.
        shape: Of a form of warpgroups, which sm_90a has.
        threads: Of a block that does task after task.
    """

    name: str
    columns: int
    tokens: int
    way: Way
    blocks: int
    shape: WarpgroupShape | None = None
    threads: int = THREADS

    @property
    def is_paired(self) -> bool:
        """Whether a multiprocessor has two blocks of lanes, which reach no further than 64 GiB."""
        return self.way == "lanes" and self.blocks == 2

    @property
    def alone(self) -> Form:
        """The same sums by a block that is alone on its multiprocessor and reaches anything."""
        return replace(self, blocks=1, threads=THREADS) if self.is_paired else self

    def on(self, capability: tuple[int, int]) -> Form:
        """As devices of this capability have it: two blocks of lanes need room for two rings."""
        return self if capability in _ROOMY else self.alone

    def tasks(self, rows: int, experts: int, columns: int) -> int:
        """The most tasks that ``rows`` rows of ``experts`` experts can make."""
        has_tiles = self.way in {"tile", "lanes", "warpgroups"}
        most = min(rows, experts) + (rows // self.tokens if has_tiles else 0)
        cluster = self.shape.cluster if self.shape else 1
        return most * -(-columns // (self.columns * cluster))

    def ring_bytes(self, capability: tuple[int, int]) -> int:
        """Shared memory, on devices of this capability, for what is copied ahead."""
        if self.way == "direct":
            return _DIRECT_RING_BYTES
        is_roomy = capability in _ROOMY and not self.is_paired
        if self.way == "flow":
            return _FLOW_RING_BYTES[is_roomy]
        return _LARGE_RING_BYTES if is_roomy else _RING_BYTES

    def config(self, rows: int, experts: int, columns: int, device: DeviceInfo) -> LaunchConfig:
        """The launch shape: as many blocks as are resident, fewer where there is less to do."""
        tasks = self.tasks(rows, experts, columns)
        if self.shape:
            return self.shape.config(tasks, experts, device)
        form = self.on(device.capability)
        held, threads = form.blocks, form.threads
        tables = 4 * (threads // 32 + experts + 1)
        if self.way == "direct":
            held = held if device.capability in _ROOMY else 2
            tables = _DIRECT_BYTES + _EXPERT_BYTES * experts
            threads = 32 * _DIRECT_WARPS
        if self.way == "flow":
            tables = _FLOW_BYTES + _SHARE_BYTES * (experts + 1)
            threads = 32 * _FLOW_WARPS
        blocks = min(held * device.multiprocessors, tasks)
        shared = self.ring_bytes(device.capability) + tables
        return LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared)


DIRECT = Form("direct", 16, 8, way="direct", blocks=4)
# F32 arithmetic has more sums, and three products more parts: four blocks would spill on sm_100
DIRECT_WIDE = Form("direct", 16, 8, way="direct", blocks=3)
FLOW = Form("flow", 16, 64, way="flow", blocks=1)
WIDE = Form("wide", 64, 32, way="stream", blocks=1)
WIDE_16 = Form("wide", 64, 16, way="stream", blocks=1)
TILE_64 = Form("tile64", 128, 64, way="tile", blocks=1)
TILE_128 = Form("tile128", 128, 128, way="tile", blocks=1)
LANES_64 = Form("tile64", 128, 64, way="lanes", blocks=2, threads=128)
LANES_128 = Form("tile128", 128, 128, way="lanes", blocks=2, threads=128)
_OF_16_BITS = (
    WarpgroupShape(256, 64, 8, 5),
    WarpgroupShape(128, 256, 32, 4, cluster=2, grains_of_box=2),
)
_SHAPES: Mapping[str, tuple[WarpgroupShape, ...]] = {
    "bf16": _OF_16_BITS,
    "f16": _OF_16_BITS,
    "tf32x3": (
        WarpgroupShape(256, 64, 8, 4, itemsize=4, is_split=True),
        WarpgroupShape(128, 128, 16, 4, itemsize=4, is_split=True),
    ),
    "tf32": (WarpgroupShape(256, 64, 8, 5, itemsize=4),),
}

# The rows for each expert that has any, up to which a form is chosen, and those above which a form
# of warpgroups is, the widest first: by what an H200 measured, see docs/kernel-notes.md.
_MOST_ROWS_OF_16_BITS = {
    "direct": 4, "flow": 64, "wide": 32, "tile64": 96, "tile128": math.inf
}  # fmt: skip
_MOST_ROWS: Mapping[str, Mapping[str, float]] = {
    "bf16": _MOST_ROWS_OF_16_BITS,
    "f16": _MOST_ROWS_OF_16_BITS,
    "ieee": {"direct": 3, "wide": 32, "tile64": 96, "tile128": math.inf},
    "tf32x3": {"direct": 3, "wide": 32, "tile64": math.inf},
    "tf32": {"direct": 3, "wide": 32, "tile64": 96, "tile128": math.inf},
}
_LEAST_ROWS_OF_16_BITS = {"warpgroup256": 40, "warpgroup64": 3}
_LEAST_ROWS: Mapping[str, Mapping[str, float]] = {
    "bf16": _LEAST_ROWS_OF_16_BITS,
    "f16": _LEAST_ROWS_OF_16_BITS,
    "tf32x3": {"warpgroup128": 60, "warpgroup64": 4},
    "tf32": {"warpgroup64": 4},
}


@cache
def warpgroups_of(arithmetic: str) -> Mapping[str, Form]:
    """The forms of warpgroups by name; none of "ieee"."""
    forms = [
        Form(f"warpgroup{shape.tokens}", shape.columns, shape.tokens, way="warpgroups", blocks=1,
             shape=shape)
        for shape in _SHAPES.get(arithmetic, ())
    ]  # fmt: skip
    return {form.name: form for form in forms}


def forms_of(arithmetic: str, layout: Layout) -> dict[str, Form]:
    """The portable forms by name; F32 in more than one product an element leaves sums less room."""
    has_room = arithmetic not in {"ieee", "tf32x3"}
    tiles = [TILE_64, TILE_128]
    if arithmetic == "ieee":
        tiles = [LANES_64, LANES_128]
        if layout == "kn":  # rows of columns: not made for two blocks
            tiles = [each.alone for each in tiles]
    forms = [WIDE if has_room else WIDE_16, *tiles]
    if layout == "nk" and ITEMSIZES[arithmetic] == 2:
        forms[:1] = [DIRECT, FLOW]
    elif layout == "nk":  # of [K, N] a warp reads whole chunks of columns
        forms.insert(0, DIRECT if has_room else DIRECT_WIDE)
    if arithmetic == "tf32x3":
        forms.remove(TILE_128)
    return {form.name: form for form in forms}


def choose_form(
    rows: int, experts: int, arithmetic: str, layout: Layout, capability: tuple[int, int]
) -> Form:
    """The form for ``rows`` rows at most, shared by ``experts`` experts, on such a device."""
    if has_warpgroups(arithmetic, layout, capability):
        for name, least in _LEAST_ROWS.get(arithmetic, {}).items():
            if _rows_each(rows, experts) > least:
                return warpgroups_of(arithmetic)[name]
    return choose_portable_form(rows, experts, arithmetic, layout)


def choose_portable_form(rows: int, experts: int, arithmetic: str, layout: Layout) -> Form:
    """As :func:`choose_form`, of those forms that every device takes."""
    forms = forms_of(arithmetic, layout)
    each = _rows_each(rows, experts)
    chosen = (
        name for name, most in _MOST_ROWS[arithmetic].items() if name in forms and each <= most
    )
    return forms[next(chosen)]


def _rows_each(rows: int, experts: int) -> float:
    return rows / max(1, min(rows, experts))


def combine_config(tokens: int, columns: int, multiprocessors: int) -> LaunchConfig:
    """The launch shape of the kernel that adds the rows of each token: four columns a thread."""
    blocks = min(8 * multiprocessors, -(-tokens * columns // (4 * THREADS)))
    return LaunchConfig((blocks, 1, 1), (THREADS, 1, 1))


def places_bytes(rows: int) -> int:
    """Of the table that says where each route's product lies; the products come behind it."""
    return -(-4 * (PLACES_HEADER + rows) // 256) * 256


_PARTS: Mapping[Way, tuple[str, ...]] = {
    "direct": ("arrivals", "grouped_rows", "gemm_sums", "gemm_units", "gemm_direct"),
    "flow": ("arrivals", "grouped_rows", "gemm_sums", "gemm_units", "gemm_shares", "gemm_flow"),
    "stream": ("grouped_rows", "gemm_sums", "gemm_stream", "gemm_tasks"),
    "tile": ("grouped_rows", "gemm_sums", "gemm_tile", "gemm_tasks"),
    "lanes": ("grouped_rows", "gemm_sums", "gemm_lanes", "lane_tasks"),
}


@cache
def product_source(arithmetic: str, layout: Layout, form: Form, ring_bytes: int) -> str:
    """The source of one kernel: what was chosen, and the text that all share."""
    chosen = {
        "NAME": product_name(arithmetic, layout, form),
        "PRECISION": ARITHMETIC.index(arithmetic),
        "KN": int(layout == "kn"),
        "TILES": 4 if form.way in {"tile", "lanes"} else form.columns // 16,
        "TOKENS": form.tokens,
        "BLOCKS": form.blocks,
        "RING": ring_bytes // CHUNK_BYTES,
    }
    if form.way == "direct":
        chosen["AHEAD"] = _DIRECT_AHEAD
    elif form.way == "flow":
        is_roomy = ring_bytes == _FLOW_RING_BYTES[True]
        chosen |= {"UNITS": _FLOW_UNITS[is_roomy], "SLICE": _FLOW_SLICE[is_roomy]}
    parts = ("tensor_cores", *_PARTS[form.way], "moe_grouped_gemm")
    threads = f"#define THREADS {form.threads}\n" if form.way == "lanes" else ""
    return threads + _define(chosen) + _sources(*parts)


@cache
def combine_source(element: str) -> str:
    """The source of the kernel that adds the rows of each token."""
    chosen = {"NAME": f"moe_combine_{element}", "PRECISION": ARITHMETIC.index(element)}
    return _define(chosen) + _sources("tensor_cores", "grouped_rows", "moe_combine")


def product_name(arithmetic: str, layout: Layout, form: Form) -> str:
    return f"moe_grouped_gemm_{arithmetic}_{layout}_{form.name}" + "_two_blocks" * form.is_paired


def warpgroup_product(arithmetic: str, form: Form, *, has_pairs: bool, is_combined: bool) -> Kernel:
    """The kernel of a form of warpgroups; one object for each choice.

    Of F32 the same does both: what is to be combined is stored as results are.
    """
    assert form.shape is not None
    return warpgroup_kernel(
        product_name(arithmetic, "nk", form), arithmetic, form.shape, _SIGNATURE,
        product_reference, has_pairs=has_pairs,
        is_combined=is_combined and ITEMSIZES[arithmetic] == 2,
    )  # fmt: skip


def product_kernel(
    arithmetic: str, layout: Layout, form: Form, capability: tuple[int, int]
) -> Kernel:
    """The kernel of one form for devices of a capability; one object for each ring."""
    form = form.on(capability)
    return _product_kernel(arithmetic, layout, form, form.ring_bytes(capability))


@cache
def _product_kernel(arithmetic: str, layout: Layout, form: Form, ring_bytes: int) -> Kernel:
    return kernel(
        product_name(arithmetic, layout, form),
        _SIGNATURE,
        product_source(arithmetic, layout, form, ring_bytes),
        product_reference(arithmetic, is_kn=layout == "kn"),
        loader=load_through_cupy,
    )


def combine_kernel(arithmetic: str) -> Kernel:
    """The kernel that adds the rows of each token; one object for each element type."""
    return _combine_kernel(arithmetic if ITEMSIZES[arithmetic] == 2 else "ieee")


@cache
def _combine_kernel(element: str) -> Kernel:
    return kernel(
        f"moe_combine_{element}",
        _COMBINE_SIGNATURE,
        combine_source(element),
        combine_reference(element),
        loader=load_through_cupy,
    )


def _define(chosen: dict[str, object]) -> str:
    return "".join(f"#define GEMM_{name} {value}\n" for name, value in chosen.items())


def _sources(*names: str) -> str:
    return "\n".join(read_source(f"{name}.cu") for name in names)
