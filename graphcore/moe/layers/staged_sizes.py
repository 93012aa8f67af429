"""StagedSizes: what a group's experts measure, and what memory their products take in chunks. Pure.

Legend: E experts, K columns of x, I columns between the two products, N columns of out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphcore_kernels import moe_grouped_gemm
from graphcore_kernels.route_layout import output_shapes
from graphcore_kernels.stage_plan import stage_shapes

from graphcore.errors import CapacityError, ConfigurationError
from graphcore.moe.decisions.static_tensors import Shapes, offsets_of
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.resources.tensors import describe

_MOST_ROUTES = 2**24  # that one route_plan takes


@dataclass(frozen=True, slots=True)
class StagedSizes:
    """Sizes of the experts of one group.

    Args:
        experts: E.
        depth: K.
        inner: I.
        columns: N.
        dtype: Of everything.
        up_row: Shape of an expert in the first product's bank.
        down_row: Shape of an expert in the second product's bank.
    """

    experts: int
    depth: int
    inner: int
    columns: int
    dtype: str
    up_row: tuple[int, ...]
    down_row: tuple[int, ...]

    @classmethod
    def of(cls, up: Any, down: Any, options: ProductOptions) -> StagedSizes:
        """The sizes of a group with these two banks, [E, ...] each.

        Raises:
            CacheTypeError: A bank is no tensor.
            ConfigurationError: They do not fit each other.
        """
        first, second = describe(up, name="up"), describe(down, name="down")
        if len(first.shape) != 3 or len(second.shape) != 3:
            raise ConfigurationError(
                f"banks: expected [experts, N, K] each, got {first.shape} and {second.shape}"
            )
        is_nk = options.layout == "nk"
        wide, depth = first.shape[1:] if is_nk else first.shape[:0:-1]
        columns, inner = second.shape[1:] if is_nk else second.shape[:0:-1]
        expected = wide // 2 if options.activation else wide
        same = (first.shape[0], first.dtype) == (second.shape[0], second.dtype)
        if not same or inner != expected or not first.size:
            raise ConfigurationError(
                f"banks: expected experts of one number and type, and {expected} columns between "
                f"the two products, got {first.dtype} {first.shape} and {second.dtype} "
                f"{second.shape} in layout {options.layout!r}"
            )
        return cls(
            first.shape[0], depth, inner, columns, first.dtype, first.shape[1:], second.shape[1:]
        )

    def bank_shapes(self, chunk: int) -> Shapes:
        """The scratch rows of ``chunk`` experts."""
        return {
            "up": (self.dtype, (chunk, *self.up_row)),
            "down": (self.dtype, (chunk, *self.down_row)),
        }

    def step_shapes(self, rows: int, top_k: int, chunk: int) -> Shapes:
        """The scratch tensors of ``rows`` rows that choose ``top_k`` experts each."""
        routes = rows * top_k
        space = moe_grouped_gemm.workspace_bytes(routes, self.columns)
        return {
            **output_shapes(self.experts, rows, top_k),
            **stage_shapes(self.chunks(routes, chunk), chunk),
            "inner": (self.dtype, (routes, self.inner)),
            "workspace": ("uint8", (space,)),
        }

    def chunks(self, routes: int, chunk: int) -> int:
        """How many chunks the experts of ``routes`` routes may need."""
        return -(-min(routes, self.experts) // chunk)

    def bytes_of_experts(self, chunk: int) -> int:
        """Scratch memory of ``chunk`` experts."""
        return offsets_of(self.bank_shapes(chunk))[1]

    def bytes_of_rows(self, rows: int, top_k: int, chunk: int) -> int:
        """Scratch memory of ``rows`` rows."""
        return offsets_of(self.step_shapes(rows, top_k, chunk))[1]

    def most_experts(self, nbytes: int) -> int:
        """How many experts fit ``nbytes`` at once.

        Raises:
            CapacityError: Not even one.
        """
        return _most(nbytes, self.experts, self.bytes_of_experts, "one expert")

    def most_rows(self, nbytes: int, rows: int, top_k: int, chunk: int) -> int:
        """How many of ``rows`` rows fit ``nbytes`` at once.

        Raises:
            CapacityError: Not even one.
        """
        most = min(rows, _MOST_ROUTES // top_k)
        return _most(nbytes, most, lambda n: self.bytes_of_rows(n, top_k, chunk), "one row")


def _most(nbytes: int, most: int, bytes_of: Callable[[int], int], what: str) -> int:
    """The greatest count up to ``most`` whose bytes fit."""
    if bytes_of(1) > nbytes:
        raise CapacityError(
            f"staging memory: expected at least {bytes_of(1)} bytes for {what}, got {nbytes}"
        )
    low, high = 1, most + 1  # low fits, high does not or is not wanted
    while high - low > 1:
        middle = (low + high) // 2
        if bytes_of(middle) <= nbytes:
            low = middle
        else:
            high = middle
    return low
