"""How much staging memory suits the layers of a model: some experts at once, some rows at once."""

from __future__ import annotations

from collections.abc import Iterable

from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.staged_sizes import StagedSizes
from graphcore.moe.layers.staging_memory import EXPERT_BYTES, ROW_BYTES, StagingMemory
from graphcore.moe.slots.slot_pool import SlotPool

_ROWS = 2048
"""Rows of a prompt that are worth a single pass over the experts."""


def staging_for(
    pool: SlotPool, layers: Iterable[tuple[str, ProductOptions, int]]
) -> StagingMemory | None:
    """Memory that prompts' experts pass through; None where every expert has a slot.

    As much as 2048 rows and all experts of a layer need, within the usual bounds; at least what one
    row and one expert need.

    Args:
        pool: Whose experts.
        layers: (group, options, top_k) of each layer.

    Raises:
        CudaError: Out of memory.
    """
    expert_bytes = row_bytes = 0
    for name, options, top_k in layers:
        group = pool[name]
        if group.slots == group.experts:
            continue
        sizes = StagedSizes.of(group.sources["gate_up"], group.sources["down"], options)
        least, most = sizes.bytes_of_experts(1), sizes.bytes_of_experts(sizes.experts)
        expert_bytes = max(expert_bytes, least, min(most, EXPERT_BYTES))
        chunk = sizes.most_experts(expert_bytes)
        least, most = (sizes.bytes_of_rows(rows, top_k, chunk) for rows in (1, _ROWS))
        row_bytes = max(row_bytes, least, min(most, ROW_BYTES))
    if not expert_bytes:
        return None
    return StagingMemory(expert_bytes=expert_bytes, row_bytes=row_bytes, driver=pool.driver)
