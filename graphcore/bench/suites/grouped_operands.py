"""The tensors of one case of suite grouped, rotated past the caches, and what must come out.

The truth is float64 of the very elements that are read: of the first, middle and last row of every
expert that is hit, in columns of all parts of the weights. No element of a result may be NaN, with
which results are filled before a check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch

from graphcore.bench.suites.grouped_cases import GroupedCase, Routing, Shape, draw
from graphcore.errors import GraphcoreError

_COLUMNS = 96
_SEED = 23
_GRAPH_SECONDS = 5e-4  # a graph is to take, so that the gap between two launches does not count
_MOST_CALLS, _MOST_ROUTINGS = 64, 16
_FAST = 4e12, 7.5e14
"""Bytes and flops a second, to say how long a call may take; nothing is judged by them."""

BOUNDS = {"bf16": 1e-2, "ieee": 1e-5, "tf32x3": 1e-5, "tf32": 2e-3}
"""Errors (Frobenius, relative) above which a way is wrong rather than inexact."""


class Banks:
    """Weights of one shape and type, as many banks as a case asks for; kept from case to case."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._key: tuple[Shape, torch.dtype] | None = None
        self._banks: list[torch.Tensor] = []

    def take(self, case: GroupedCase, count: int) -> list[torch.Tensor]:
        """``count`` banks ``[experts, columns, depth]`` for ``case``; others' are let go."""
        shape = case.shape
        if self._key != (shape, case.dtype):
            self._key, self._banks = (shape, case.dtype), []
        while len(self._banks) < count:
            size = (shape.experts, shape.columns, shape.depth)
            bank = torch.randn(size, dtype=case.dtype, device=self._device)
            self._banks.append(bank.mul_(shape.depth**-0.5))
        return self._banks[:count]


class Routed:
    """What one routing of a case is computed from: rows, sorted by expert, and where they begin."""

    def __init__(self, case: GroupedCase, routing: Routing, device: str) -> None:
        self.routing = routing
        self.x = torch.randn(routing.rows, case.shape.depth, dtype=case.dtype, device=device)
        self.offsets = routing.offsets.to(device)
        self.ends = self.offsets[1:].clone()


class GroupedCall:
    """One product of one way: the operands, and the result that its launches write.

    Args:
        case: Which.
        routed: Rows and where they belong.
        weights: ``[experts, columns, depth]``.
    """

    def __init__(self, case: GroupedCase, routed: Routed, weights: torch.Tensor) -> None:
        self.case, self.routed, self.weights = case, routed, weights

    def new_out(self) -> torch.Tensor:
        """Memory for a result, NaN."""
        x = self.routed.x
        return x.new_full((x.shape[0], self.case.shape.columns), float("nan"))

    @cached_property
    def _sampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, columns, float64 of them)."""
        routing, weights = self.routed.routing, self.weights
        starts = routing.offsets.tolist()
        columns = torch.tensor(spread(self.case.shape.columns, _COLUMNS), device=weights.device)
        rows, parts = [], []
        for expert, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            mine = sorted({start, (start + end) // 2, end - 1})
            rows += mine
            parts.append(self.routed.x[mine].double() @ weights[expert, columns].double().t())
        return torch.tensor(rows, device=weights.device), columns, torch.cat(parts)

    def error(self, out: torch.Tensor) -> float:
        """Of a result against float64, by Frobenius' norm, relative; infinite with a NaN in it."""
        if not bool(torch.isfinite(out).all()):
            return float("inf")
        rows, columns, expected = self._sampled
        found = out[rows][:, columns].double()
        return float((found - expected).norm() / expected.norm())


class GroupedOperands:
    """Calls of a case on rotated weights.

    Args:
        case: Which.
        banks: Where weights come from.
        device: Of torch.
        cached: Bytes that caches may hold: weights are read again after more than that.
    """

    def __init__(self, case: GroupedCase, banks: Banks, device: str, cached: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(_SEED)
        first = draw(case, generator)
        needed = case.weight_bytes(first.hit)
        taken = banks.take(case, max(1, -(-cached // int(needed))))
        count = max(len(taken), call_count(needed, case.flops, device))
        routings = [first, *(draw(case, generator) for _ in range(min(count, _MOST_ROUTINGS) - 1))]
        self.routed = [Routed(case, routing, device) for routing in routings]
        self.calls = [
            GroupedCall(case, self.routed[at % len(routings)], taken[at % len(taken)])
            for at in range(count)
        ]

    @property
    def experts_hit(self) -> float:
        """Of a call, on average."""
        hit = [call.routed.routing.hit for call in self.calls]
        return sum(hit) / len(hit)

    def check(self, name: str, outs: Sequence[torch.Tensor], run: Callable[[], object]) -> float:
        """Fills results with NaN, runs all calls, and compares the first and the last.

        Args:
            name: Of the way.
            outs: What its calls write, in order.
            run: Runs the calls and waits for them.

        Returns:
            The larger error of the two.

        Raises:
            GraphcoreError: A result is wrong.
        """
        for out in outs:
            out.fill_(float("nan"))
        if outs[0].is_cuda:
            torch.cuda.synchronize(outs[0].device)
        run()
        error = max(self.calls[at].error(outs[at]) for at in (0, -1))
        bound = BOUNDS[self.case.precision]
        if not error <= bound:
            raise GraphcoreError(
                f"bench grouped: {self.case.name}: arm {name}: expected an error of {bound:g} at "
                f"most against float64, got {error:g}"
            )
        return error


def spread(size: int, count: int) -> list[int]:
    """At most ``count`` indices below ``size``, first and last among them, evenly apart."""
    return sorted({round(at * (size - 1) / max(1, count - 1)) for at in range(count)})


def call_count(needed: float, flops: float, device: str) -> int:
    """Of a graph: so many that launching it does not count.

    Args:
        needed: Bytes that a call reads.
        flops: Of a call.
        device: Of torch; two calls do on the host.
    """
    if device == "cpu":
        return 2
    seconds = max(needed / _FAST[0], flops / _FAST[1])
    return max(2, min(_MOST_CALLS, round(_GRAPH_SECONDS / seconds)))


def tiles_of(starts: Sequence[int], rows: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end of the expert's rows) of each tile of so many rows.

    Args:
        starts: Where the rows of each expert begin, and where the last one's end.
        rows: Of a tile at most.
    """
    return [
        (expert, first, end)
        for expert, (start, end) in enumerate(pairwise(starts))
        for first in range(start, end, rows)
    ]
