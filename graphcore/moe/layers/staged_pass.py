"""StagedPass: the products of as many rows as fit the scratch memory, chunk by chunk of experts.

Rows are sorted by expert, so a chunk's rows lie together; each chunk's products land in their
places among all of them, and are added up at the end, in the router's order. That is what the same
rows get from the slots, bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphcore_kernels import (
    GroupedGemmPlan,
    RoutePlan,
    StagePlan,
    moe_grouped_gemm,
    route_plan,
    stage_plan,
)

from graphcore.driver import Driver, active
from graphcore.driver.records import MemsetParams, StreamHandle
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.staged_copies import StagedBank, StagedCopies
from graphcore.resources.buffer import Buffer

_LISTS = ("offsets", "experts", "starts", "counts")


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """Some experts: their copies, then their share of both products."""

    copies: StagedCopies
    first: GroupedGemmPlan
    second: GroupedGemmPlan


@dataclass(frozen=True, slots=True)
class StagedPass:
    """One pass, planned; everything in it is at fixed addresses.

    Args:
        routes: Sorts the rows by expert.
        stages: Lists the experts that have rows, in chunks.
        chunks: As many as the routes may need.
        combine: Adds up each token's products.
        experts: The list, as ``stages`` writes it.
        places: Of the workspace: begins with the first row that counts.
    """

    routes: RoutePlan
    stages: StagePlan
    chunks: Sequence[StagedChunk]
    combine: GroupedGemmPlan
    experts: Buffer
    places: int

    def launch(self, driver: Driver, stream: StreamHandle, *, reads_hits: bool) -> None:
        """Runs on ``stream``; with ``reads_hits`` the host waits for the list of experts."""
        self.routes.launch(stream)
        self.stages.launch(stream)
        hits = self._read_hits(driver) if reads_hits else []
        each = self.experts.shape[0] // len(self.chunks)
        # where nothing has rows, the first chunk says so to what combines
        needed = max(1, -(-len(hits) // each)) if reads_hits else len(self.chunks)
        for index, chunk in enumerate(self.chunks[:needed]):
            chunk.copies.launch(driver, stream, hits[index * each : (index + 1) * each])
            chunk.first.launch(stream)
            chunk.second.launch(stream)
        # each product noted where its own rows begin; all of them begin at 0
        driver.fill(MemsetParams(self.places, 0, 4, 1), stream)
        self.combine.launch(stream)

    def _read_hits(self, driver: Driver) -> list[int]:
        with active.outside_captures():
            data = driver.read(self.experts.address, self.experts.nbytes)
        listed = struct.iter_unpack("<i", data)
        return [expert for (expert,) in listed if expert >= 0]


@dataclass(frozen=True, slots=True)
class StagedPlanner:
    """Plans passes of one step.

    Args:
        banks: "up" and "down".
        tables: Private ones of ``route_plan``, with a slot for every expert.
        slots: int32, 0, 1, ...: the scratch rows of a chunk.
        error: The error word of the products.
        options: Of the products.
        form: Of the products: that of the whole step's capacities.
        driver: Where.
    """

    banks: Mapping[str, StagedBank]
    tables: Mapping[str, Any]
    slots: Any
    error: Any
    options: ProductOptions
    form: str
    driver: Driver

    def plan(self, operands: Mapping[str, Any], scratch: Mapping[str, Buffer]) -> StagedPass:
        """A pass over the caller's ``x``, ``ids``, ``weights`` and ``out``.

        Args:
            operands: By these names.
            scratch: Of ``StagedSizes.step_shapes`` for their rows.
        """
        given = {**scratch, **operands}
        routes = route_plan.plan(given["ids"], self.tables, scratch, weights=given["weights"])
        stages = stage_plan.plan(*(scratch[name] for name in _LISTS))
        whole = self._second(given, scratch["offsets"], scratch["slots"])
        return StagedPass(
            routes=routes,
            stages=stages,
            chunks=[self._chunk(given, index) for index in range(scratch["counts"].shape[0])],
            combine=replace(whole, launches=whole.launches[1:]),
            experts=scratch["experts"],
            places=scratch["workspace"].address,
        )

    def _chunk(self, given: Mapping[str, Any], index: int) -> StagedChunk:
        each = self.banks["up"].rows.shape[0]
        begin = index * each
        lists = {
            "miss_expert": _part(given["experts"], begin, each),
            "miss_slot": self.slots,
            "miss_count": _part(given["counts"], index, 1),
        }
        starts = _part(given["starts"], begin, each + 1)
        second = self._second(given, starts, None)
        return StagedChunk(
            StagedCopies.plan(tuple(self.banks.values()), lists),
            self._first(given, starts),
            replace(second, launches=second.launches[:1]),
        )

    def _first(self, given: Mapping[str, Any], starts: Buffer) -> GroupedGemmPlan:
        return moe_grouped_gemm.plan(
            given["x"], self.banks["up"].rows, starts, None, given["inner"],
            gather=given["gather"], error=self.error, form=self.form, driver=self.driver,
            **self.options.first,
        )  # fmt: skip

    def _second(
        self, given: Mapping[str, Any], offsets: Buffer, slots: Buffer | None
    ) -> GroupedGemmPlan:
        """Two launches: the product, and what combines."""
        return moe_grouped_gemm.plan(
            given["inner"], self.banks["down"].rows, offsets, slots, given["out"],
            scale=given["scale"], scatter=given["scatter"], workspace=given["workspace"],
            error=self.error, form=self.form, driver=self.driver, **self.options.second,
        )  # fmt: skip


def _part(list_: Buffer, begin: int, count: int) -> Buffer:
    """``count`` elements of a dense list."""
    ref = list_.__graphcore_tensor__()
    address = ref.address + begin * ref.itemsize
    return Buffer(replace(ref, address=address, shape=(count,), strides=(1,)), list_.driver)
