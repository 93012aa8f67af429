"""Experts in slots for suite moe: a module in the place of a model's experts, of static tensors.

A step that GraphReuse runs must say which ids its groups are routed by, at fixed addresses: here
each number of rows has its own ids, weights, rows and results. Rows whose routes have no slot each
go through scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from graphcore_kernels import moe_grouped_gemm, read_fault

from graphcore.driver import Driver
from graphcore.errors import CapacityError, GraphcoreError
from graphcore.moe import (
    GroupUse,
    ManifestRegistry,
    ProductOptions,
    SlotAdmission,
    SlotPool,
    StagedProducts,
    StagingMemory,
    manifest_of,
)

_OPTIONS = ProductOptions()
_EXPERT_BYTES, _ROW_BYTES = 1 << 28, 1 << 27
_SMALL_BYTES = 1 << 20

Launch = Callable[[], None]


class Lane:
    """The experts of one layer for steps of one number of rows.

    Args:
        pool: Its slots.
        group: The layer's name.
        staged: The layer's products through scratch memory.
        like: ``[rows, hidden]``: of the type and device of what comes in.
        top_k: Experts of a row.
    """

    def __init__(
        self, pool: SlotPool, group: str, staged: StagedProducts, like: torch.Tensor, top_k: int
    ) -> None:
        rows = like.shape[0]
        self.x, self.out = (torch.zeros_like(like) for _ in range(2))
        self.ids = torch.zeros(rows, top_k, dtype=torch.int64, device=like.device)
        self.weights = torch.zeros(rows, top_k, dtype=like.dtype, device=like.device)
        self.error = torch.zeros(1, dtype=torch.int32, device=like.device)
        self._staged = staged.plan(self.x, self.ids, self.weights, self.out)
        self.admission: SlotAdmission | None = None
        self._launches: list[Any] = []
        try:
            self.admission = SlotAdmission(pool, group, self.ids, weights=self.weights)
        except CapacityError:
            pass  # more experts than slots: such steps are staged
        else:
            self._launches = [self.admission.launch, *self._products(pool, group, self.admission)]
        self.use = GroupUse(group, self.ids, admission=self.admission)

    def launch(self, is_staged: bool) -> None:
        """Computes ``out`` on the current stream."""
        if is_staged or not self._launches:
            self._staged.launch()
            return
        for each in self._launches:
            each()

    def _products(self, pool: SlotPool, group: str, admission: SlotAdmission) -> list[Launch]:
        bank, found = pool[group].rows, admission.outputs
        where = (found["offsets"], found["slots"])
        inner = self.x.new_zeros(self.ids.numel(), bank["down"].shape[2])
        up = moe_grouped_gemm.plan(
            self.x, bank["gate_up"], *where, inner, gather=found["gather"], error=self.error,
            driver=pool.driver, **_OPTIONS.first,
        )  # fmt: skip
        down = moe_grouped_gemm.plan(
            inner, bank["down"], *where, self.out, scale=found["scale"],
            scatter=found["scatter"], error=self.error, driver=pool.driver, **_OPTIONS.second,
        )  # fmt: skip
        return [up.launch, down.launch]


class SteppedExperts(torch.nn.Module):
    """Stands in the place of one layer's experts; called as transformers calls them.

    Args:
        lanes: By rows; a step of other rows is a KeyError.
        way: ``way["staged"]`` says whether steps leave the slots alone.
    """

    def __init__(self, lanes: Mapping[int, Lane], way: Mapping[str, bool]) -> None:
        super().__init__()
        self.lanes, self._way = lanes, way

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        lane = self.lanes[hidden_states.shape[0]]
        lane.x.copy_(hidden_states)
        lane.ids.copy_(top_k_index)
        lane.weights.copy_(top_k_weights)
        lane.launch(self._way["staged"])
        return lane.out


class SlottedModel:
    """A model's experts in slots, and the model's own beside them.

    Args:
        model: Of transformers, with sparse blocks whose ``experts`` hold ``gate_up_proj`` and
            ``down_proj``.
        pinned: The experts in pinned memory; see :func:`pinned_experts`.
        slots: Of each layer.
        rows: Numbers of rows that steps have.
        driver: Where.
    """

    def __init__(
        self,
        model: Any,
        pinned: Mapping[str, Mapping[str, torch.Tensor]],
        slots: int,
        rows: tuple[int, ...],
        driver: Driver,
    ) -> None:
        config, like = model.config, model.get_input_embeddings().weight
        self.manifests = ManifestRegistry()
        self.pool = SlotPool(pinned, slots, driver=driver, ownership=self.manifests.ownership)
        published = self.manifests.replace(manifest_of(self.pool, top_k=config.num_experts_per_tok))
        if not published.is_accepted:
            raise GraphcoreError(f"bench moe: {published}")
        self._memory = StagingMemory(
            expert_bytes=_SMALL_BYTES if driver.is_emulated else _EXPERT_BYTES,
            row_bytes=_SMALL_BYTES if driver.is_emulated else _ROW_BYTES,
            driver=driver,
        )
        self._way = {"staged": False}
        self._blocks = blocks_of(model)
        self._lanes: dict[str, dict[int, Lane]] = {}
        for name in self._blocks:
            staged = StagedProducts.of_pool(self.pool, name, memory=self._memory, options=_OPTIONS)
            self._lanes[name] = {
                count: Lane(
                    self.pool,
                    name,
                    staged,
                    like.new_zeros(count, config.hidden_size),
                    config.num_experts_per_tok,
                )
                for count in rows
            }

    def uses(self, rows: int) -> list[GroupUse]:
        """How steps of so many rows use each layer."""
        return [lanes[rows].use for lanes in self._lanes.values()]

    def fits(self, rows: int) -> bool:
        """Whether slots serve every step of so many rows."""
        return all(lanes[rows].admission is not None for lanes in self._lanes.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model's experts are these."""
        own = {name: block.experts for name, block in self._blocks.items()}
        for name, block in self._blocks.items():
            block.experts = SteppedExperts(self._lanes[name], self._way)
        try:
            yield
        finally:
            for name, block in self._blocks.items():
                block.experts = own[name]

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Inside the block steps leave the slots alone."""
        self._way["staged"] = True
        try:
            yield
        finally:
            self._way["staged"] = False

    @property
    def hit_rate(self) -> float:
        """Of all experts asked for, after all work."""
        totals = [self.pool.totals(name) for name in self._blocks]
        hits, misses = sum(each.hits for each in totals), sum(each.misses for each in totals)
        return hits / max(1, hits + misses)

    def check(self) -> None:
        """Raises GraphcoreError where a step was refused on the device, or a product wrong."""
        for name, lanes in self._lanes.items():
            fault = self.pool.fault(name)
            if fault.count:
                raise GraphcoreError(f"bench moe: {name}: {fault}")
            for lane in lanes.values():
                found = read_fault(int(lane.error))
                if found is not None:
                    raise GraphcoreError(f"bench moe: {name}: {found}")

    def close(self) -> None:
        """Gives the slots and the scratch memory back."""
        self.pool.close()
        self._memory.close()


def blocks_of(model: Any) -> dict[str, Any]:
    """Name -> sparse block, in order."""
    return {name: each for name, each in model.named_modules() if hasattr(each, "experts")}


def pinned_experts(model: Any, driver: Driver) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of a model's experts in memory that the device can read, by layer and bank."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, block in blocks_of(model).items():
        banks = {"gate_up": block.experts.gate_up_proj, "down": block.experts.down_proj}
        found[name] = {bank: _pinned(weights, driver) for bank, weights in banks.items()}
    return found


def _pinned(weights: torch.Tensor, driver: Driver) -> torch.Tensor:
    if driver.is_emulated:
        return weights.detach().clone()
    held = torch.empty(weights.shape, dtype=weights.dtype, pin_memory=True)
    return held.copy_(weights.detach())
