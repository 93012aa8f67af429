"""MoELayer: a sparse block of a model: router, experts in slots, experts that every row has.

The router's arithmetic is the caller's, or the model's own; between its choice and the sum nothing
waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphcore.errors import ConfigurationError
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.products_plan import ProductsPlans
from graphcore.moe.layers.slot_experts import SlotExperts
from graphcore.moe.layers.slot_products import SlotProducts
from graphcore.moe.layers.transformers_experts import found_experts, router_choice, shared_part
from graphcore.moe.slots.slot_pool import SlotPool

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Rows [rows, hidden] -> (ids int32 or int64 [rows, top_k], weights [rows, top_k])."""


class MoELayer(torch.nn.Module):
    """A layer of experts over one group of a pool.

    Args:
        pool: Whose slots.
        group: Of the pool, with banks ``gate_up`` and ``down``.
        router: Chooses, and weighs: normalised, scaled, biased as the model does it.
        shared_experts: What is added for every row, of the block's input; None: nothing.
        options: Of the products.
        plans: Shared by the layers of a pool; None makes some.

    Raises:
        CaptureError: Inside a capture.
        ConfigurationError: Banks that do not fit the kernels.
        CudaError: Out of memory.
    """

    def __init__(
        self,
        pool: SlotPool,
        group: str,
        *,
        router: Router,
        shared_experts: Callable[[torch.Tensor], torch.Tensor] | None = None,
        options: ProductOptions | None = None,
        plans: ProductsPlans | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = SlotExperts(SlotProducts(pool, group, options=options, plans=plans))
        self.shared_experts = shared_experts

    @classmethod
    def from_transformers(
        cls,
        block: Any,
        pool: SlotPool,
        group: str,
        *,
        precision: str = "ieee",
        plans: ProductsPlans | None = None,
    ) -> MoELayer:
        """The sparse block of a transformers model over slots; ``block`` stays as it is.

        Routes by the block's own ``gate``, and adds its ``shared_experts`` (DeepSeek-V3 and kin) or
        its gated ``shared_expert`` (Qwen2-MoE).

        Args:
            block: With ``gate``, ``experts`` and maybe shared ones; nothing else.
            pool: Its group ``group`` holds the weights of ``block.experts``.
            group: Of the pool.
            precision: Of float32 experts, as of ``moe_grouped_gemm``.
            plans: As for the layer itself.

        Raises:
            ConfigurationError: A block of another form, or a group of other sizes.
        """
        experts = found_experts("block.experts", block, "experts", getattr(block, "experts", None))
        shared = shared_part(block)
        _check_group(pool, group, experts.weights)
        layer = cls(
            pool,
            group,
            router=lambda hidden: router_choice(block.gate, hidden),
            shared_experts=shared,
            options=experts.options(precision),
            plans=plans,
        )
        return layer.train(block.training)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The layer of ``hidden_states`` [..., hidden], of the same shape.

        Raises:
            ConfigurationError: A router that gives something else than ids and weights.
            CudaError: The driver refused a launch.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = self.router(rows)
        out: torch.Tensor = self.experts(rows, ids, weights).reshape(hidden_states.shape)
        return out if self.shared_experts is None else out + self.shared_experts(hidden_states)


def _check_group(pool: SlotPool, group: str, weights: dict[str, Any]) -> None:
    sources = pool[group].sources
    for bank, weight in weights.items():
        shape = tuple(sources[bank].shape) if bank in sources else None
        if shape != tuple(weight.shape):
            raise ConfigurationError(
                f"group {group}: expected a bank {bank} of {tuple(weight.shape)} as the block's "
                f"experts, got {shape}"
            )
