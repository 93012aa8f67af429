"""What the grouped product's kernels do, in NumPy; the emulated driver runs it.

It reads the very arguments the device gets. A row's bits depend on the row and its expert's
weights alone, as on a device: rows are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from graphcore.driver import Pointer
from graphcore_kernels._gemm_faults import Fault

if TYPE_CHECKING:
    import numpy

    from graphcore.driver.records import LaunchConfig

    Array = numpy.ndarray[Any, Any]

_WORDS = {"bf16": "uint16", "f16": "float16"}
_PLACES_HEADER = 4
_NO_ACTIVATION, _CONCAT = 0, 1


def product_reference(arithmetic: str, *, is_kn: bool) -> Callable[..., None]:
    """The reference of one kernel, called as ``reference(config, *arguments)``."""

    def run(config: LaunchConfig, *arguments: Any) -> None:
        import numpy

        with numpy.errstate(all="ignore"):
            _Product(arithmetic, is_kn, *arguments).run()

    return run


def combine_reference(element: str) -> Callable[..., None]:
    """The reference of the kernel that adds the rows of each token."""

    def run(config: LaunchConfig, *arguments: Any) -> None:
        import numpy

        products, places, scatter, offsets, out, error, *numbers = arguments
        out_stride, tokens, choices, columns, experts = numbers
        routes = tokens * choices
        header = places.array(_PLACES_HEADER + routes)
        begin, end = int(header[0]), int(header[1])
        row_of, route_of = header[_PLACES_HEADER:], scatter.array(max(end, routes))
        parts = products.array((max(end, 1), columns))
        result = _retype(out, element).array((tokens, columns), (out_stride, 1))
        with numpy.errstate(all="ignore"):
            for token in range(tokens):
                total = numpy.zeros(columns, numpy.float32)
                for route in range(token * choices, (token + 1) * choices):
                    row = int(row_of[route])
                    if begin <= row < end and route_of[row] == route:
                        total += parts[row]
                result[token] = _narrowed(total, element)
        ends = offsets.array(experts + 1)
        for row in range(begin, end):
            route = int(route_of[row])
            if 0 <= route < routes and row_of[route] != row:
                expert = int(numpy.searchsorted(ends[1:], row, "right"))
                _report(error, Fault.BAD_SCATTER, min(expert, experts - 1))

    return run


class _Product:
    """One launch."""

    def __init__(self, arithmetic: str, is_kn: bool, *arguments: Any) -> None:
        self.arithmetic, self.is_kn = arithmetic, is_kn
        (
            self.x,
            self.weights,
            self.offsets,
            self.slots,
            self.gather,
            self.scale,
            self.scatter,
            self.out,
            self.places,
            self.error,
            self.x_stride,
            self.slot_stride,
            self.weight_stride,
            self.out_stride,
            self.x_rows,
            self.rows,
            self.experts,
            self.n_slots,
            self.columns,
            self.depth,
            self.routes,
            self.activation,
        ) = arguments

    def run(self) -> None:
        bounds = self.offsets.array(self.experts + 1).tolist()
        faults = [self._look_at(e, *bounds[e : e + 2]) for e in range(self.experts)]
        for expert, fault in enumerate(faults):
            if fault:
                _report(self.error, fault, expert)
        is_bad = Fault.BAD_OFFSETS in faults
        if self.routes:
            header = self.places.array(_PLACES_HEADER)
            header[:2] = (0, 0) if is_bad else (bounds[0], bounds[-1])
        if is_bad:
            if not self.routes:
                self._outputs()[...] = 0
            return
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                self._do_expert(expert, begin, end, is_missing=bool(faults[expert]))

    def _look_at(self, expert: int, begin: int, end: int) -> int:
        if begin < 0 or end < begin or end > self.rows:
            return Fault.BAD_OFFSETS
        if begin == end:
            return 0
        slot = self._slot_of(expert)
        if slot < 0:
            return Fault.NO_SLOT
        return 0 if slot < self.n_slots else Fault.SLOT_OUT_OF_RANGE

    def _slot_of(self, expert: int) -> int:
        return int(self.slots.array(self.experts)[expert]) if self.slots.address else expert

    def _do_expert(self, expert: int, begin: int, end: int, *, is_missing: bool) -> None:
        outputs = self._outputs()
        weights = None if is_missing else self._weights_of(self._slot_of(expert))
        for row in range(begin, end):
            if weights is None:
                outputs[row] = 0
                continue
            value = self._activated(weights @ self._token(expert, row))
            if self.scale.address:
                value *= self.scale.array(self.rows)[row]
            outputs[row] = value if self.routes else _narrowed(value, self.arithmetic)
        if not self.routes:
            return
        row_of = self.places.array(_PLACES_HEADER + self.routes)[_PLACES_HEADER:]
        for row, route in enumerate(self.scatter.array(self.rows)[begin:end].tolist(), begin):
            if 0 <= route < self.routes:
                row_of[route] = row
            else:
                _report(self.error, Fault.BAD_SCATTER, expert)

    def _outputs(self) -> Array:
        element = "ieee" if self.routes else self.arithmetic
        columns = self.columns // (2 if self.activation else 1)
        return _retype(self.out, element).array((self.rows, columns), (self.out_stride, 1))

    def _weights_of(self, slot: int) -> Array:
        """[N, K] in F32."""
        shape = (self.depth, self.columns) if self.is_kn else (self.columns, self.depth)
        bank = _retype(self.weights, self.arithmetic).array(
            (self.n_slots, *shape), (self.slot_stride, self.weight_stride, 1)
        )
        weights = _widened(bank[slot], self.arithmetic)
        return weights.T if self.is_kn else weights

    def _token(self, expert: int, row: int) -> Array:
        import numpy

        source = int(self.gather.array(self.rows)[row]) if self.gather.address else row
        if not 0 <= source < self.x_rows:
            _report(self.error, Fault.BAD_GATHER, expert)
            return numpy.zeros(self.depth, numpy.float32)
        x = _retype(self.x, self.arithmetic)
        return _widened(x.array((self.x_rows, self.depth), (self.x_stride, 1))[source],
                        self.arithmetic)  # fmt: skip

    def _activated(self, sums: Array) -> Array:
        import numpy

        if self.activation == _NO_ACTIVATION:
            return sums
        half = self.columns // 2
        is_concat = self.activation == _CONCAT
        gate, up = (sums[:half], sums[half:]) if is_concat else (sums[::2], sums[1::2])
        result: Array = gate / (numpy.float32(1) + numpy.exp(-gate)) * up
        return result


def _retype(pointer: Pointer, arithmetic: str) -> Pointer:
    return Pointer(pointer.address, _WORDS.get(arithmetic, "float32"))


def _widened(values: Array, arithmetic: str) -> Array:
    """F32 of elements; rounded to TF32 where that is the precision."""
    import numpy

    if arithmetic == "bf16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    result = values.astype(numpy.float32)
    if arithmetic == "tf32":
        # to nearest, ties away from zero; infinities and NaNs stay
        words = result.view(numpy.uint32)
        is_finite = numpy.isfinite(result)
        words[is_finite] = (words[is_finite] + 0x1000) & 0xFFFFE000
    return result


def _narrowed(values: Array, arithmetic: str) -> Array:
    """Elements of F32, to nearest even; bf16 as its 16 bits."""
    import numpy

    if arithmetic != "bf16":
        return values
    words = values.view(numpy.uint32)
    rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    return numpy.where(numpy.isnan(values), 0x7FFF, rounded).astype(numpy.uint16)


def _report(error: Pointer, fault: int, expert: int) -> None:
    word = error.array(1)
    word[0] = max(int(word[0]), fault | expert << 8)
