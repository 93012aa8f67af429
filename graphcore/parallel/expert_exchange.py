"""ExpertExchange: rows travel to the ranks that own their experts, and back, by all-to-all.

Every rank has a fixed number of places for every other one, so that nothing depends on a count that
the host would have to read: counts stay on the device. A place that no route takes holds zeros.

Shape legend: R rows of this rank, K experts of a row, W ranks, C places for each, H hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from graphcore.errors import ConfigurationError


class Received(NamedTuple):
    """What came to this rank: rows [W * C, H], and the local expert of each, int64 [W * C, 1]."""

    rows: torch.Tensor
    ids: torch.Tensor


class Sent(NamedTuple):
    """Where this rank's routes went, int64 [R * K], and whether the step is bad, bool 0-d."""

    places: torch.Tensor
    is_bad: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExchangeTotals:
    """What one layer has sent since it was made.

    Attributes:
        routes: To each rank.
        faults: Steps in which a route found no place, or named no expert: their results are zero.
    """

    routes: tuple[int, ...]
    faults: int


class ExpertExchange:
    """The exchange of one layer, whose rows are each rank's own.

    Args:
        group: Process group of the ranks that share the experts, warmed up.
        experts: Of the router, a multiple of the ranks; rank r owns the r-th part, in order.
        capacity: Share of the most routes that may go to one rank (R * K) for which there are
            places; 1.0: none is ever without one.
        device: ``torch.device`` of the rows.
    """

    shares_rows = False

    def __init__(self, group: Any, experts: int, capacity: float, device: Any) -> None:
        check_capacity(capacity)
        self.group = group
        self.ranks: int = group.size()
        self.experts = experts
        self.local_experts = experts // self.ranks
        self.capacity = float(capacity)
        self.device = device
        self._routes = torch.zeros(self.ranks, dtype=torch.int64, device=device)
        self._faults = torch.zeros((), dtype=torch.int64, device=device)
        self._owners = torch.arange(self.ranks, device=device)

    def places(self, routes: int) -> int:
        """C: how many of ``routes`` routes have a place with each rank."""
        return max(1, math.ceil(routes * self.capacity))

    def arriving(self, routes: int) -> int:
        """How many rows come to this rank, empty places included, where each sends ``routes``."""
        return self.ranks * self.places(routes)

    def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[Received, Sent]:
        """Sends each row to the owners of its experts, a place for each of its routes.

        Args:
            hidden: [R, H].
            ids: int32 or int64 [R, K] of the router's experts.
        """
        rows, choices = ids.shape
        routes = rows * choices
        most = self.places(routes)
        flat = ids.reshape(-1).to(torch.int64)
        is_expert = (flat >= 0) & (flat < self.experts)
        chosen = flat.clamp(0, self.experts - 1)
        owner = torch.div(chosen, self.local_experts, rounding_mode="floor")
        goes = owner[:, None] == self._owners  # [R * K, W]
        order = goes.to(torch.int64).cumsum(0)
        position = order.gather(1, owner[:, None])[:, 0] - 1
        fits = is_expert & (position < most)
        nowhere = self.ranks * most  # one place more, which is not sent
        places = torch.where(fits, owner * most + position, nowhere)
        is_bad = ~fits.all()
        self._routes.add_(order[-1])
        self._faults.add_(is_bad.to(torch.int64))

        spread = hidden[:, None].expand(rows, choices, hidden.shape[1]).reshape(routes, -1)
        out = hidden.new_zeros(nowhere + 1, hidden.shape[1]).index_copy(0, places, spread)
        local = chosen - owner * self.local_experts
        absent = torch.full((nowhere + 1,), -1, dtype=torch.int64, device=hidden.device)
        names = absent.index_copy(0, places, local)
        rows_here, came = self._swap(out[:nowhere]), self._swap(names[:nowhere])
        received = Received(rows_here, named(came, self.local_experts))
        return received, Sent(places, is_bad)

    def combine(self, results: torch.Tensor, sent: Sent, weights: torch.Tensor) -> torch.Tensor:
        """Brings the rows' results back and adds them up, in F32 in the router's order.

        Args:
            results: [W * C, H], one for each row that came.
            sent: Of the dispatch.
            weights: [R, K] of the router.

        Returns:
            [R, H] of the type of ``results``; zero where the step is bad.
        """
        rows, choices = weights.shape
        back = self._swap(results.contiguous())
        back = torch.cat([back, back.new_zeros(1, back.shape[1])])
        each = back.index_select(0, sent.places).reshape(rows, choices, -1).to(torch.float32)
        scaled = each * weights.to(torch.float32)[:, :, None]
        total = scaled[:, 0]
        for choice in range(1, choices):
            total = total + scaled[:, choice]
        return total.masked_fill(sent.is_bad, 0.0).to(results.dtype)

    def totals(self) -> ExchangeTotals:
        """What was sent so far; waits for it."""
        return ExchangeTotals(tuple(self._routes.tolist()), int(self._faults))

    # ---- inside ---------------------------------------------------------------------------------

    def _swap(self, parts: torch.Tensor) -> torch.Tensor:
        """The r-th part of every rank on rank r; its own parts in the order of ranks."""
        came = torch.empty_like(parts)
        dist.all_to_all_single(came, parts, group=self.group)
        return came


def named(names: torch.Tensor, experts: int) -> torch.Tensor:
    """An expert for every place, int64 [places, 1], of names that are -1 in empty ones.

    Those take one of ``experts`` that is needed anyhow.
    """
    is_taken = names >= 0
    least = torch.where(is_taken, names, experts).min()
    filler = torch.where(least < experts, least, 0)
    return torch.where(is_taken, names, filler)[:, None]


def check_capacity(capacity: object) -> None:
    """Raises ConfigurationError for what is no share."""
    is_number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
    if not is_number or not 0 < capacity <= 1:  # type: ignore[operator]
        raise ConfigurationError(f"capacity: expected above 0, to 1, got {capacity!r}")
