"""Grouped products for tests: random operands on a driver between guard bytes, and the truth.

The truth is computed in float64 from the very elements the kernel reads. What is no element of an
operand is NaN: the guards, and what lies between the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
from graphcore_kernels import GroupedGemmPlan, moe_grouped_gemm

from graphcore.driver import Driver
from graphcore.resources.tensors import TensorRef, contiguous_strides

GUARD = 256
# of a row's norm: about twice what rounding the result, or the products, makes
TOLERANCES = {
    "bfloat16": 4e-3,
    "float16": 6e-4,
    "ieee": 1e-6,
    "tf32x3": 2e-6,
    "tf32": 1.5e-3,
}
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint8": 1}
_POISON = {"bfloat16": 0x7FC1, "float16": 0x7E01, "float32": 0x7FC00001}


@dataclass(frozen=True)
class Case:
    """A product by its sizes and choices.

    ``counts``: rows of each expert. ``start``: rows before the first. ``slack``: capacity beyond
    the last. ``choices``: of each token where rows are combined, else 0. ``pitch``: elements
    between rows of x and out that belong to nobody.
    """

    counts: tuple[int, ...]
    columns: int = 72
    depth: int = 88
    dtype: str = "bfloat16"
    precision: str = "ieee"
    layout: str = "nk"
    activation: str | None = None
    gate_up: str = "concat"
    form: str | None = None
    start: int = 0
    slack: int = 0
    choices: int = 0
    has_slots: bool = True
    has_gather: bool = False
    has_scale: bool = False
    pitch: int = 0

    @property
    def rows(self) -> int:
        return self.start + sum(self.counts) + self.slack

    @property
    def out_columns(self) -> int:
        return self.columns // 2 if self.activation else self.columns

    @property
    def tolerance(self) -> float:
        kind = self.precision if self.dtype == "float32" else self.dtype
        return TOLERANCES[kind] * (2 if self.activation else 1)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "activation": self.activation, "gate_up": self.gate_up, "layout": self.layout,
            "precision": self.precision, "form": self.form,
        }  # fmt: skip


def encode(values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """Numbers as elements, to nearest even; bfloat16 as its 16 bits."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    words = values.astype(numpy.float32).view(numpy.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(numpy.uint16)


def decode(elements: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """Elements as float64."""
    if dtype == "bfloat16":
        elements = (elements.astype(numpy.uint32) << 16).view(numpy.float32)
    return elements.astype(numpy.float64)


def poison(shape: tuple[int, ...], dtype: str) -> numpy.ndarray:
    """NaN everywhere, with a payload of its own."""
    size = _ITEMSIZES[dtype]
    words = numpy.full(shape, _POISON[dtype], f"uint{8 * size}")
    return words if dtype == "bfloat16" else words.view(dtype)


class Problem:
    """The operands of a case, and what comes out."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        random = numpy.random.default_rng(seed)
        experts, rows = len(case.counts), case.rows
        n_slots = experts + 2 if case.has_slots else experts
        x_rows = max(3, rows // 2) if case.has_gather else rows
        weights = random.standard_normal((n_slots, case.columns, case.depth))
        if case.layout == "kn":
            weights = numpy.ascontiguousarray(weights.transpose(0, 2, 1))
        dtype = case.dtype
        self.arrays: dict[str, numpy.ndarray] = {
            "x": encode(random.standard_normal((x_rows, case.depth)), dtype),
            "weights": encode(weights / case.depth**0.5, dtype),
            "offsets": numpy.cumsum([case.start, *case.counts], dtype=numpy.int32),
        }
        if case.has_slots:
            self.arrays["slots"] = random.permutation(n_slots)[:experts].astype(numpy.int32)
        if case.has_gather:
            self.arrays["gather"] = random.integers(0, x_rows, rows).astype(numpy.int32)
        if case.has_scale:
            self.arrays["scale"] = random.uniform(0.1, 1.0, rows).astype(numpy.float32)
        if case.choices:
            self.arrays["scatter"] = random.permutation(rows).astype(numpy.int32)
        shape = (rows // case.choices if case.choices else rows, case.out_columns)
        self.arrays["out"] = poison(shape, dtype)
        self.arrays["error"] = numpy.zeros(1, numpy.int32)
        if case.choices:
            size = moe_grouped_gemm.workspace_bytes(rows, case.out_columns)
            self.arrays["workspace"] = random.integers(0, 256, size, numpy.uint8)

    def products(self) -> numpy.ndarray:
        """float64 [rows, out columns]; NaN in rows that no expert has, 0 where it has no slot."""
        case, arrays = self.case, self.arrays
        x, weights = decode(arrays["x"], case.dtype), decode(arrays["weights"], case.dtype)
        if case.layout == "kn":
            weights = weights.transpose(0, 2, 1)
        if "gather" in arrays:
            x = x[arrays["gather"]]
        result = numpy.full((case.rows, case.out_columns), numpy.nan)
        ends = arrays["offsets"]
        for expert in range(len(case.counts)):
            slot = int(arrays["slots"][expert]) if "slots" in arrays else expert
            rows = slice(int(ends[expert]), int(ends[expert + 1]))
            result[rows] = 0
            if 0 <= slot < len(weights):
                result[rows] = activated(x[rows] @ weights[slot].T, case)
        if "scale" in arrays:
            result *= arrays["scale"][:, None].astype(numpy.float64)
        return result

    def expected(self) -> numpy.ndarray:
        """float64 of the shape of out; NaN where it must be as it was."""
        products = self.products()
        if not self.case.choices:
            return products
        parts = numpy.zeros_like(products)
        routes = self.arrays["scatter"]
        counted = slice(int(self.arrays["offsets"][0]), int(self.arrays["offsets"][-1]))
        parts[routes[counted]] = products[counted]
        return parts.reshape(-1, self.case.choices, self.case.out_columns).sum(1)

    def check(self, out: numpy.ndarray) -> None:
        """Compares out with the truth, row by row; rows of nobody must be as they were."""
        expected, got = self.expected(), decode(out, self.case.dtype)
        is_nobodys = numpy.isnan(expected).all(1)
        assert out[is_nobodys].tobytes() == self.arrays["out"][is_nobodys].tobytes()
        assert not numpy.isnan(got[~is_nobodys]).any()
        error = numpy.linalg.norm(got - expected, axis=1)[~is_nobodys]
        size = numpy.linalg.norm(expected, axis=1)[~is_nobodys]
        assert (error <= self.case.tolerance * size).all(), (error / size).max()


def activated(sums: numpy.ndarray, case: Case) -> numpy.ndarray:
    if case.activation is None:
        return sums
    half = case.columns // 2
    is_concat = case.gate_up == "concat"
    gate, up = (sums[:, :half], sums[:, half:]) if is_concat else (sums[:, ::2], sums[:, 1::2])
    return gate / (1 + numpy.exp(-gate)) * up


class Placed:
    """A problem's operands in a driver's memory, each between guards."""

    def __init__(self, problem: Problem, driver: Driver) -> None:
        self.problem, self.driver = problem, driver
        self.refs: dict[str, TensorRef] = {}
        self._starts: dict[str, tuple[int, bytes]] = {}

    def place(self, name: str, array: numpy.ndarray) -> None:
        dtype = self.problem.case.dtype if name in {"x", "weights", "out"} else str(array.dtype)
        pitch = self.problem.case.pitch if name in {"x", "out"} else 0
        strides = contiguous_strides((*array.shape[:-1], array.shape[-1] + pitch))
        room = numpy.full(2 * GUARD + (max(array.shape[0], 1) * max(strides[0], 1) + pitch)
                          * array.itemsize, 0xFF, numpy.uint8)  # fmt: skip
        address = self.driver.alloc(room.size)
        kind = "cpu" if self.driver.is_emulated else "cuda"
        device = 0 if self.driver.is_emulated else self.driver.device
        self.refs[name] = TensorRef(
            address + GUARD, array.shape, strides, dtype, array.itemsize, kind, device,
            owner=_Home(self.driver),
        )  # fmt: skip
        self._view(room, name)[...] = array
        self._starts[name] = (address, room.tobytes())
        self.driver.write(address, room.tobytes())

    def _view(self, room: numpy.ndarray, name: str) -> numpy.ndarray:
        ref, array = self.refs[name], self.problem.arrays[name]
        steps = tuple(step * ref.itemsize for step in ref.strides)
        return numpy.ndarray(ref.shape, array.dtype, buffer=room, offset=GUARD, strides=steps)

    def plan(self, **others: Any) -> GroupedGemmPlan:
        options = {**self.problem.case.options, **self.refs, **others}
        x, weights, offsets = (options.pop(name) for name in ("x", "weights", "offsets"))
        return moe_grouped_gemm.plan(x, weights, offsets, driver=self.driver, **options)

    def change(self, name: str, array: numpy.ndarray) -> None:
        """Writes other contents, on the device and in the problem."""
        self.problem.arrays[name] = array
        address, before = self._starts[name]
        room = numpy.frombuffer(before, numpy.uint8).copy()
        self._view(room, name)[...] = array
        self._starts[name] = (address, room.tobytes())
        self.driver.write(address, room.tobytes())

    def read(self, name: str) -> numpy.ndarray:
        """The contents now; guards, and what lies between rows, must be as they were."""
        address, before = self._starts[name]
        room = numpy.frombuffer(self.driver.read(address, len(before)), numpy.uint8).copy()
        contents = self._view(room, name).copy()
        self._view(room, name)[...] = self._view(numpy.frombuffer(before, numpy.uint8).copy(), name)
        assert room.tobytes() == before, f"{name}: written outside its elements"
        return contents

    def check(self) -> None:
        """Compares out with the truth; nothing else may have changed, nor may a fault be told."""
        self.problem.check(self.read("out"))
        assert self.read("error")[0] == 0
        for name, array in self.problem.arrays.items():
            contents = self.read(name)
            if name not in {"out", "workspace"}:
                assert contents.tobytes() == array.tobytes(), name

    def free(self) -> None:
        for address, _ in self._starts.values():
            self.driver.free(address)


@dataclass(frozen=True)
class _Home:
    driver: Driver


@contextmanager
def placed(driver: Driver, case: Case, seed: int = 0, **arrays: numpy.ndarray) -> Iterator[Placed]:
    """A case's operands on a driver; ``arrays`` replaces some."""
    problem = Problem(case, seed)
    problem.arrays |= arrays
    operands = Placed(problem, driver)
    try:
        for name, array in problem.arrays.items():
            operands.place(name, array)
        yield operands
    finally:
        operands.free()


def every_type(case: Case) -> dict[str, Case]:
    """The case in every element type and precision."""
    cases = {dtype: replace(case, dtype=dtype) for dtype in ("bfloat16", "float16")}
    for precision in ("ieee", "tf32x3", "tf32"):
        cases[precision] = replace(case, dtype="float32", precision=precision)
    return cases


# sizes are no multiples of tiles on purpose
CASES: dict[str, Case] = {
    "a row each": Case((1, 1, 1, 1)),
    "empty experts": Case((0, 3, 0, 0, 9, 0)),
    "one expert has all": Case((0, 0, 37, 0)),
    "no rows at all": Case((0, 0, 0), slack=5),
    "one expert": Case((11,), has_slots=False),
    "more experts than threads": Case((1, 0, 2) * 100, columns=24, depth=16),
    "as many experts as there may be": Case((0, 1, 0, 0) * 128, columns=8, depth=8),
    "rows before and after": Case((2, 17, 1), start=3, slack=6),
    "pitched rows": Case((5, 2, 8), pitch=24),
    "short depth": Case((3, 4), depth=8, columns=8),
    "long depth": Case((3, 4), depth=1000, columns=24),
    "no slots": Case((4, 5, 6), has_slots=False),
    "gathered": Case((7, 0, 20, 2), has_gather=True),
    "scaled": Case((7, 0, 20, 2), has_scale=True),
    "combined": Case((7, 1, 20, 2), choices=2, columns=72),
    "combined, one choice": Case((7, 0, 20, 2), choices=1),
    "combined, gathered and scaled": Case(
        (5, 0, 33, 2), choices=4, has_gather=True, has_scale=True, pitch=8
    ),
    "combined with routes missing": Case((5, 1, 9), choices=3, start=2, slack=4, has_scale=True),
    "swiglu": Case((3, 0, 18), activation="swiglu", columns=80),
    "swiglu, interleaved": Case(
        (3, 0, 18), activation="swiglu", gate_up="interleaved", columns=80
    ),
    "swiglu, everything": Case(
        (3, 1, 12, 0), activation="swiglu", columns=144, choices=2, has_gather=True,
        has_scale=True, pitch=8,
    ),
    "many rows": Case((130, 1, 70), columns=200, depth=136),
}  # fmt: skip
