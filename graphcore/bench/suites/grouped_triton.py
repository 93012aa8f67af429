"""A grouped product in Triton, for suite grouped: what one writes in an afternoon.

A list of tiles made on the host says which expert and rows each has, so that the device searches
for nothing; the order keeps tiles of one expert together. Triton is loaded when a kernel is made.
"""

# Triton's compiler reads the annotations of a kernel: only strings may be in them

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graphcore.bench.replays import replayed
from graphcore.bench.suites.grouped_operands import GroupedCall, tiles_of
from graphcore.bench.suites.grouped_ways import TRITON, Product
from graphcore.driver import Driver, Stream

tl: Any = None
"""``triton.language``, once there is a kernel: the compiler looks for it here."""

_TRIED_CALLS = 2
_CONSTANTS = ("tile_rows", "tile_columns", "tile_depth", "together", "precision")


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the product: rows, columns and depth of a tile, warps and stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_FEW = (Tiling(16, 64, 128, 4, 4), Tiling(16, 128, 128, 4, 4))
_SOME = (Tiling(64, 128, 64, 4, 4), Tiling(16, 128, 128, 4, 4))
_MANY = (Tiling(128, 128, 64, 8, 4), Tiling(128, 256, 64, 8, 3))
_FLOATS = (Tiling(64, 128, 32, 4, 3), Tiling(128, 128, 32, 8, 3))


def _product(  # noqa: PLR0913, PLR0917  (each is an argument of the kernel)
    x: "Any",
    weights: "Any",
    out: "Any",
    expert_of: "Any",
    first_of: "Any",
    end_of: "Any",
    tiles: "Any",
    width: "Any",
    depth: "Any",
    tile_rows: "Any",
    tile_columns: "Any",
    tile_depth: "Any",
    together: "Any",
    precision: "Any",
) -> None:
    # `together` tiles of rows pass over all columns before the next ones do: weights stay in L2
    program = tl.program_id(0)
    column_tiles = width // tile_columns
    first = program // (together * column_tiles) * together
    size = tl.minimum(tiles - first, together)
    within = program % (together * column_tiles)
    tile = first + within % size
    columns = within // size * tile_columns + tl.arange(0, tile_columns)
    expert = tl.load(expert_of + tile).to(tl.int64)
    rows = tl.load(first_of + tile) + tl.arange(0, tile_rows)
    is_mine = (rows < tl.load(end_of + tile))[:, None]
    inner = tl.arange(0, tile_depth)
    rows = rows.to(tl.int64)[:, None]
    x_at = x + rows * depth + inner[None, :]
    weights_at = weights + expert * width * depth + columns[None, :] * depth + inner[:, None]
    sums = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
    for _ in range(0, depth, tile_depth):
        left = tl.load(x_at, mask=is_mine, other=0.0)
        right = tl.load(weights_at)
        sums = tl.dot(left, right, sums, input_precision=precision)
        x_at += tile_depth
        weights_at += tile_depth
    tl.store(out + rows * width + columns[None, :], sums.to(out.dtype.element_ty), mask=is_mine)


@cache
def _kernel() -> Any:
    global tl
    tl = importlib.import_module("triton.language")
    _product.__annotations__.update(dict.fromkeys(_CONSTANTS, tl.constexpr))
    # the number of tiles is another one in each call: no kernel of its own for 1 and for 16 x n
    return importlib.import_module("triton").jit(_product, do_not_specialize=["tiles"])


class TritonProduct:
    """One call, cut by one tiling."""

    def __init__(self, call: GroupedCall, tiling: Tiling) -> None:
        self.out = call.new_out()
        self._call, self._tiling = call, tiling
        self._tiles = tiles_of(call.routed.routing.offsets.tolist(), tiling.rows)
        columns = torch.tensor(self._tiles, dtype=torch.int32).to(self.out.device).unbind(1)
        # each at an address of its own: Triton compiles anew for another alignment
        self._tables = [column.clone() for column in columns]

    def launch(self, stream: Stream) -> None:
        """On torch's current stream."""
        del stream
        shape, tiling = self._call.case.shape, self._tiling
        count = len(self._tiles)
        _kernel()[(count * (shape.columns // tiling.columns),)](
            self._call.routed.x, self._call.weights, self.out, *self._tables, count,
            shape.columns, shape.depth, tile_rows=tiling.rows, tile_columns=tiling.columns,
            tile_depth=tiling.depth, together=8, precision=_precision(self._call),
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip


def fastest(driver: Driver, stream: Stream, calls: Sequence[GroupedCall]) -> list[Product]:
    """The products of all calls by the tiling that took the least time for the first ones."""
    times: dict[Tiling, float] = {}
    for tiling in _tilings(calls[0]):
        tried = _products(calls[:_TRIED_CALLS], tiling)
        arm = replayed(TRITON, driver, stream, tried).arm()
        times[tiling] = min(arm.burst(len(tried)) for _ in range(2))
    return _products(calls, min(times, key=lambda tiling: times[tiling]))


def _products(calls: Sequence[GroupedCall], tiling: Tiling) -> list[Product]:
    made = [TritonProduct(call, tiling) for call in calls]
    return [Product(each.launch, each.out) for each in made]


def _tilings(call: GroupedCall) -> Sequence[Tiling]:
    if call.case.precision != "bf16":
        return _FLOATS
    routing = call.routed.routing
    each = routing.rows / routing.hit
    return _FEW if each <= 16 else _SOME if each <= 64 else _MANY


def _precision(call: GroupedCall) -> str:
    """Triton's name for how float32 is multiplied; of bf16 it makes no difference."""
    return "ieee" if call.case.precision == "bf16" else call.case.precision
