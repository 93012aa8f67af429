"""The operands of a grouped product, checked: everything that can be seen without the device.

Nothing is launched before all of this holds; what the tables hold is the device's to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from graphcore.errors import CapacityError, ConfigurationError
from graphcore.resources.overlap import overlap, overlaps_itself
from graphcore.resources.tensors import TensorRef
from graphcore_kernels._gemm_forms import (
    ACTIVATIONS,
    CHUNK_BYTES,
    ITEMSIZES,
    MOST_EXPERTS,
    Layout,
    places_bytes,
)

Refs = Mapping[str, TensorRef]
WRITTEN = ("out", "workspace", "error")
_DTYPES = {"bfloat16": "bf16", "float16": "f16"}
_PRECISIONS = ("ieee", "tf32x3", "tf32")
_MOST = 2**31 - 1
_REACH = 2**32 * CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Choices:
    """What is to be done, by the caller's words.

    Args:
        activation: None or "swiglu".
        gate_up: "concat" or "interleaved": where gate and up lie in the weights.
        layout: "nk" or "kn".
        precision: "ieee", "tf32x3" or "tf32", for F32.
    """

    activation: str | None = None
    gate_up: str = "concat"
    layout: str = "nk"
    precision: str = "ieee"


@dataclass(frozen=True, slots=True)
class Sizes:
    """A checked product: its sizes, and its choices in the words of the forms.

    ``columns`` are the weights', ``out_columns`` what is left after the activation. ``tokens``:
    rows of out where rows are combined; 0 where they are not.
    """

    x_rows: int
    rows: int
    depth: int
    experts: int
    n_slots: int
    columns: int
    out_columns: int
    tokens: int
    layout: Layout
    arithmetic: str
    activation: int

    @property
    def workspace_bytes(self) -> int:
        """What combining needs, 0 without it."""
        return workspace_bytes(self.rows, self.out_columns) if self.tokens else 0


def workspace_bytes(rows: int, columns: int) -> int:
    """Bytes that a product needs which combines ``rows`` rows of ``columns`` columns of out."""
    return places_bytes(rows) + 4 * rows * columns


def measure(refs: Refs, choices: Choices) -> Sizes:
    """The sizes of a product whose ``out``, ``workspace`` and ``error`` may still be missing.

    Raises:
        ConfigurationError: Choices, shapes, element types, strides, alignment or devices are none
            that the kernels can work with.
    """
    arithmetic = _arithmetic_of(refs, choices)
    for name, dtype in _table_types(refs):
        _expect(f"{name}.dtype", refs[name].dtype == dtype, dtype, refs[name].dtype)
    for name, rank in (("x", 2), ("weights", 3), *((name, 1) for name, _ in _table_types(refs))):
        _expect(f"{name}.shape", len(refs[name].shape) == rank, f"{rank} axes", refs[name].shape)
    for name, ref in refs.items():
        _check_place(name, ref, refs["x"])
    layout = cast("Layout", choices.layout)
    x, weights = refs["x"], refs["weights"]
    n_slots, *sides = weights.shape
    columns, depth = sides if layout == "nk" else reversed(sides)
    sizes = Sizes(
        x_rows=x.shape[0],
        rows=refs["gather"].shape[0] if "gather" in refs else x.shape[0],
        depth=depth,
        experts=refs["offsets"].shape[0] - 1,
        n_slots=n_slots,
        columns=columns,
        out_columns=columns // 2 if choices.activation else columns,
        tokens=_tokens_of(refs),
        layout=layout,
        arithmetic=arithmetic,
        activation=ACTIVATIONS[choices.gate_up if choices.activation else None],
    )
    _check_sizes(refs, sizes)
    _check_chunks(refs, sizes)
    return sizes


def are_within_reach(refs: Refs, sizes: Sizes) -> bool:
    """Whether rows of x, and of each slot of weights, lie ahead of the first, within 64 GiB.

    Then 32 bits say how many chunks lie between.
    """
    x, weights = refs["x"], refs["weights"]
    rows = ((weights.shape[1], weights.strides[1]), (x.shape[0], x.strides[0]))
    return all(
        count < 2 or 0 <= step * x.itemsize * (count - 1) <= _REACH - sizes.depth * x.itemsize
        for count, step in rows
    )


def check_written(refs: Refs, sizes: Sizes) -> None:
    """Checks what is written, once it is all there.

    Raises:
        CapacityError: The workspace is too small.
        ConfigurationError: Shapes, element types or strides are wrong, or something that is
            written shares memory with another operand or with itself.
    """
    out = refs["out"]
    _expect("out.dtype", out.dtype == refs["x"].dtype, f"{refs['x'].dtype} as x has", out.dtype)
    wanted = (sizes.tokens or sizes.rows, sizes.out_columns)
    _expect("out.shape", out.shape == wanted, wanted, out.shape)
    _expect("out.strides", out.shape[1] == 1 or out.strides[1] == 1 or not out.size,
            "columns side by side", out.strides)  # fmt: skip
    _expect("out.strides", not overlaps_itself(_sides(out)),
            "a place for each element", out.strides)  # fmt: skip
    error = refs["error"]
    _expect("error.dtype", error.dtype == "int32", "int32", error.dtype)
    _expect("error.shape", error.size == 1, "one element", error.shape)
    workspace = refs.get("workspace")
    if workspace is not None:
        _check_workspace(workspace, sizes)
    for name in WRITTEN:
        for other, ref in refs.items():
            if name in refs and name != other:
                _check_apart(name, refs[name], other, ref)


def _arithmetic_of(refs: Refs, choices: Choices) -> str:
    for field, known in (
        ("activation", (None, "swiglu")),
        ("gate_up", ("concat", "interleaved")),
        ("layout", ("nk", "kn")),
        ("precision", _PRECISIONS),
    ):
        value = getattr(choices, field)
        _expect(field, value in known, " or ".join(map(repr, known)), repr(value))
    dtype = refs["x"].dtype
    known_types = (*_DTYPES, "float32")
    _expect("x.dtype", dtype in known_types, " or ".join(known_types), dtype)
    _expect("weights.dtype", refs["weights"].dtype == dtype, f"{dtype} as x has",
            refs["weights"].dtype)  # fmt: skip
    return arithmetic_of(dtype, choices.precision)


def arithmetic_of(dtype: str, precision: str) -> str:
    """How products of ``dtype`` are computed: an element type's name, or a precision of F32.

    Raises:
        ConfigurationError: A precision for elements that have none.
    """
    if dtype == "float32":
        return precision
    _expect("precision", precision == "ieee", f"'ieee' for {dtype}", precision)
    return _DTYPES[dtype]


def _table_types(refs: Refs) -> list[tuple[str, str]]:
    types = {"offsets": "int32", "slots": "int32", "gather": "int32", "scatter": "int32",
             "scale": "float32"}  # fmt: skip
    return [(name, dtype) for name, dtype in types.items() if name in refs]


def _tokens_of(refs: Refs) -> int:
    if "scatter" not in refs:
        return 0
    rows, out = refs["scatter"].shape[0], refs.get("out")
    if out is None:
        tokens = refs["x"].shape[0]
        what = "x"
    else:
        _expect("out.shape", len(out.shape) == 2, "2 axes", out.shape)
        tokens, what = out.shape[0], "out"
    _expect(f"{what}.shape", tokens > 0 and rows > 0 and rows % tokens == 0,
            f"as many choices for each token: rows that divide {rows}, of scatter",
            f"{tokens} rows")  # fmt: skip
    return tokens


def _check_place(name: str, ref: TensorRef, x: TensorRef) -> None:
    home = f"{x.device_kind}:{x.device}"
    where = f"{ref.device_kind}:{ref.device}"
    _expect(f"{name}.device", where == home, f"{home} as x", where)
    _expect(f"{name}.shape", max(ref.shape, default=0) <= _MOST, f"at most {_MOST}", ref.shape)
    _expect(f"{name}", ref.address % ref.itemsize == 0 or not ref.size,
            f"an address that is a multiple of {ref.itemsize}", f"{ref.address:#x}")  # fmt: skip
    if name in {"offsets", "slots", "gather", "scatter", "scale", "error", "workspace"}:
        _expect(f"{name}.strides", ref.is_contiguous, "dense memory", ref.strides)


def _check_sizes(refs: Refs, sizes: Sizes) -> None:
    x = refs["x"]
    _expect("x.shape", x.shape[1] == sizes.depth, f"[rows, {sizes.depth}] for weights "
            f"{refs['weights'].shape} in layout {sizes.layout!r}", x.shape)  # fmt: skip
    _expect("weights.shape", min(refs["weights"].shape) > 0, "no empty axis",
            refs["weights"].shape)  # fmt: skip
    _expect("offsets.shape", 1 <= sizes.experts <= MOST_EXPERTS,
            f"one more than 1 to {MOST_EXPERTS} experts", refs["offsets"].shape)  # fmt: skip
    if "slots" in refs:
        shape = refs["slots"].shape
        _expect("slots.shape", shape == (sizes.experts,), f"[{sizes.experts}]", shape)
    else:
        _expect("slots", sizes.experts <= sizes.n_slots,
                f"a table, for {sizes.experts} experts in {sizes.n_slots} slots", None)  # fmt: skip
    for name in ("scatter", "scale"):
        if name in refs:
            shape = refs[name].shape
            _expect(f"{name}.shape", shape == (sizes.rows,), f"[{sizes.rows}]", shape)


def _check_chunks(refs: Refs, sizes: Sizes) -> None:
    """Rows must begin and end at whole chunks."""
    itemsize = ITEMSIZES[sizes.arithmetic]
    whole = CHUNK_BYTES // itemsize
    for name in ("x", "weights"):
        ref = refs[name]
        if not ref.size:
            continue
        _expect(name, ref.address % CHUNK_BYTES == 0,
                f"an address that is a multiple of {CHUNK_BYTES}", f"{ref.address:#x}")  # fmt: skip
        _expect(f"{name}.strides", ref.strides[-1] == 1 or ref.shape[-1] == 1,
                "the last axis dense", ref.strides)  # fmt: skip
        _expect(f"{name}.strides", all(step % whole == 0 for step, size in
                zip(ref.strides[:-1], ref.shape[:-1], strict=True) if size > 1),
                f"multiples of {whole} elements", ref.strides)  # fmt: skip
    _expect("weights.shape", sizes.depth % whole == 0, f"K a multiple of {whole}", sizes.depth)
    if sizes.activation:
        _expect("weights.shape", sizes.columns % 2 == 0, "N even: gate and up", sizes.columns)
    if sizes.layout == "kn":
        _expect("weights.shape", sizes.columns % whole == 0, f"N a multiple of {whole}",
                sizes.columns)  # fmt: skip
        if sizes.activation == ACTIVATIONS["concat"]:
            _expect("weights.shape", sizes.out_columns % whole == 0,
                    f"N / 2 a multiple of {whole}", sizes.out_columns)  # fmt: skip
    if sizes.tokens:
        _expect("out.shape", sizes.out_columns % 4 == 0, "columns a multiple of 4 to combine",
                sizes.out_columns)  # fmt: skip


def _check_workspace(workspace: TensorRef, sizes: Sizes) -> None:
    needed = sizes.workspace_bytes
    if workspace.nbytes < needed:
        raise CapacityError(f"workspace: expected {needed} bytes, got {workspace.nbytes}")
    is_aligned = workspace.address % CHUNK_BYTES == 0 or not needed
    _expect("workspace", is_aligned, f"an address that is a multiple of {CHUNK_BYTES}",
            f"{workspace.address:#x}")  # fmt: skip


def _check_apart(name: str, ref: TensorRef, other: str, second: TensorRef) -> None:
    if not ref.size or not second.size:
        return
    distance = second.address - ref.address
    if overlap(_sides(ref), _sides(second), distance, ref.itemsize, second.itemsize):
        raise ConfigurationError(
            f"{name}: expected memory apart from {other} (at {second.address:#x}, shape "
            f"{second.shape}), got memory that shares bytes with it (at {ref.address:#x}, shape "
            f"{ref.shape})"
        )


def _sides(ref: TensorRef) -> tuple[tuple[int, int], ...]:
    pairs = zip(ref.shape, ref.strides, strict=True)
    return tuple((size, step * ref.itemsize) for size, step in pairs)


def _expect(field: str, holds: bool, expected: object, got: object) -> None:
    if not holds:
        raise ConfigurationError(f"{field}: expected {expected}, got {got}")
