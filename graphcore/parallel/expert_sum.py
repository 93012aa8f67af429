"""ExpertSum: every rank has the same rows; each gives what its own experts do, and sums are added.

No row travels. Of each row's experts a rank computes those that it owns; the weighted sums of all
ranks are added by an all-reduce. A route whose expert is elsewhere takes a row of zeros here.

Shape legend: R rows, the same on all ranks, K experts of a row, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from graphcore.parallel.expert_exchange import ExchangeTotals, Received, named


class Kept(NamedTuple):
    """Which routes are this rank's, bool [R * K], and whether the step is bad, bool 0-d."""

    is_here: torch.Tensor
    is_bad: torch.Tensor


class ExpertSum:
    """The sum of one layer, in the place of an :class:`ExpertExchange`.

    Args:
        group: Process group of the ranks that share the experts, warmed up.
        experts: Of the router, a multiple of the ranks; rank r owns the r-th part, in order.
        device: ``torch.device`` of the rows.
    """

    shares_rows = True
    capacity = 1.0

    def __init__(self, group: Any, experts: int, device: Any) -> None:
        self.group = group
        self.ranks: int = group.size()
        self.experts = experts
        self.local_experts = experts // self.ranks
        self.device = device
        self._first = group.rank() * self.local_experts
        self._routes = torch.zeros(self.ranks, dtype=torch.int64, device=device)
        self._faults = torch.zeros((), dtype=torch.int64, device=device)
        self._owners = torch.arange(self.ranks, device=device)

    def arriving(self, routes: int) -> int:
        """How many rows the experts of this rank compute, those of zeros included."""
        return routes

    def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[Received, Kept]:
        """A row for each route: its own where the expert is here, else zeros.

        Args:
            hidden: [R, H].
            ids: int32 or int64 [R, K] of the router's experts.
        """
        rows, choices = ids.shape
        flat = ids.reshape(-1).to(torch.int64)
        is_expert = (flat >= 0) & (flat < self.experts)
        local = flat - self._first
        is_here = (local >= 0) & (local < self.local_experts)
        is_bad = ~is_expert.all()
        chosen = flat.clamp(0, self.experts - 1)
        owner = torch.div(chosen, self.local_experts, rounding_mode="floor")
        self._routes.add_((owner[:, None] == self._owners).sum(0))
        self._faults.add_(is_bad.to(torch.int64))
        spread = hidden[:, None].expand(rows, choices, hidden.shape[1]).reshape(rows * choices, -1)
        mine = spread.masked_fill(~is_here[:, None], 0.0)
        names = named(torch.where(is_here, local, -1), self.local_experts)
        return Received(mine, names), Kept(is_here, is_bad)

    def combine(self, results: torch.Tensor, kept: Kept, weights: torch.Tensor) -> torch.Tensor:
        """Adds up what this rank's experts gave, and then what all ranks' did, in F32.

        Args:
            results: [R * K, H], one for each route.
            kept: Of the dispatch.
            weights: [R, K] of the router.

        Returns:
            [R, H] of the type of ``results``, the same on all ranks; zero where the step is bad.
        """
        here = results.to(torch.float32).masked_fill(~kept.is_here[:, None], 0.0)
        scaled = here.reshape(*weights.shape, -1) * weights.to(torch.float32)[:, :, None]
        total = scaled.sum(1)
        dist.all_reduce(total, group=self.group)
        return total.masked_fill(kept.is_bad, 0.0).to(results.dtype)

    def totals(self) -> ExchangeTotals:
        """What was computed so far, of all ranks; waits for it."""
        return ExchangeTotals(tuple(self._routes.tolist()), int(self._faults))
