"""ProductOptions: how the two grouped products of a group of experts are computed.

The same for every way in which a step may take: what differs in one of them differs in its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """Choices of ``graphcore_kernels.moe_grouped_gemm``.

    Args:
        activation: Behind the first product: "swiglu", or None.
        gate_up: Where gate and up lie in the first product's weights: "concat" or "interleaved".
        layout: Of the weights: "nk" or "kn".
        precision: Of float32: "ieee", "tf32x3" or "tf32".
    """

    activation: str | None = "swiglu"
    gate_up: str = "concat"
    layout: Literal["nk", "kn"] = "nk"
    precision: str = "ieee"

    @property
    def first(self) -> dict[str, Any]:
        """Keywords of the product with the activation."""
        return {"activation": self.activation, "gate_up": self.gate_up, **self.second}

    @property
    def second(self) -> dict[str, Any]:
        """Keywords of the product that combines."""
        return {"layout": self.layout, "precision": self.precision}
