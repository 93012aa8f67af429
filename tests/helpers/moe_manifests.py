"""Small manifests of mixture-of-experts models, with addresses that nobody dereferences."""

from __future__ import annotations

from math import prod
from typing import Any

from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup, Manifest
from graphcore.moe.manifests.names import Layout, Role

HIDDEN, INTER, EXPERTS = 16, 24, 8
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def bank(
    role: Role, *shape: int, layer: int = 0, dtype: str = "float32", **more: Any
) -> ExpertBank:
    """A packed bank, at an address of its own."""
    size = prod(shape) * BYTES.get(dtype, 4)
    address = 0x1000_0000 + (layer * len(Role) + list(Role).index(role)) * 0x10_0000
    fields: dict[str, Any] = {"address": address, "nbytes": size, **more}
    name = f"layers.{layer}.experts.{role.value.replace(' ', '_')}"
    return ExpertBank(name, role, dtype, shape, **fields)


def fused(layer: int = 0, *, slots: int = 4, top_k: int = 2, **more: Any) -> ExpertGroup:
    """gate_up and down."""
    banks = (
        bank(Role.GATE_UP, EXPERTS, 2 * INTER, HIDDEN, layer=layer),
        bank(Role.DOWN, EXPERTS, HIDDEN, INTER, layer=layer),
    )
    return _group(f"layers.{layer}", Layout.FUSED, banks, slots, top_k, **more)


def separate(layer: int = 0, *, slots: int = 4, top_k: int = 2, **more: Any) -> ExpertGroup:
    """gate, up and down, with a scale and a bias."""
    banks = (
        bank(Role.GATE, EXPERTS, INTER, HIDDEN, layer=layer),
        bank(Role.UP, EXPERTS, INTER, HIDDEN, layer=layer),
        bank(Role.DOWN, EXPERTS, HIDDEN, INTER, layer=layer),
        bank(Role.UP_SCALE, EXPERTS, layer=layer),
        bank(Role.DOWN_BIAS, EXPERTS, HIDDEN, layer=layer),
    )
    return _group(f"layers.{layer}", Layout.SEPARATE, banks, slots, top_k, **more)


def ungated(layer: int = 0, *, slots: int = 4, top_k: int = 2, **more: Any) -> ExpertGroup:
    """up and down."""
    banks = (
        bank(Role.UP, EXPERTS, INTER, HIDDEN, layer=layer),
        bank(Role.DOWN, EXPERTS, HIDDEN, INTER, layer=layer),
    )
    return _group(f"layers.{layer}", Layout.UNGATED, banks, slots, top_k, **more)


def _group(
    name: str,
    layout: Layout,
    banks: tuple[ExpertBank, ...],
    slots: int,
    top_k: int,
    **more: Any,
) -> ExpertGroup:
    fields: dict[str, Any] = {"experts": EXPERTS, "slots": slots, "top_k": top_k, **more}
    return ExpertGroup(name, layout, banks, **fields)


def manifest(layers: int = 2, **more: Any) -> Manifest:
    """Fused groups, a layer each."""
    return Manifest(tuple(fused(layer, **more) for layer in range(layers)))
