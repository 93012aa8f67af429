"""manifest_of: the manifest of a pool of slots: all its groups, each bank active where it lies."""

from __future__ import annotations

from collections.abc import Mapping

from graphcore.errors import ConfigurationError
from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup, Manifest
from graphcore.moe.manifests.names import Layout, Location, Role
from graphcore.moe.slots.pool_bank import PoolBank, banks_of
from graphcore.moe.slots.slot_pool import SlotPool


def manifest_of(
    pool: SlotPool,
    *,
    top_k: int | Mapping[str, int],
    order: str = "nk",
    rank: int = 0,
    ranks: int = 1,
) -> Manifest:
    """The manifest of a pool whose banks have the names of roles: "gate_up", "down_scale", ...

    Args:
        pool: The slots.
        top_k: Experts for a row, of all groups or of each.
        order: "nk": weights are [N, K] as torch's linear layers have them, or "kn".
        rank: Of this process among those that share the experts.
        ranks: How many those are.

    Raises:
        ConfigurationError: A bank of another name, roles that make up no layout, or a group without
            ``top_k``.
    """
    groups = []
    for name, slots in pool.groups.items():
        choices = top_k[name] if isinstance(top_k, Mapping) and name in top_k else top_k
        if not isinstance(choices, int):
            raise ConfigurationError(f"top_k: expected one of group {name}, got {top_k!r}")
        banks = tuple(_bank(each, pool.driver.device) for each in banks_of(name, slots, None))
        groups.append(
            ExpertGroup(
                name=name,
                layout=_layout(name, banks),
                banks=banks,
                experts=slots.experts,
                slots=slots.slots,
                top_k=choices,
                order=order,
                device=pool.driver.device,
            )
        )
    return Manifest(tuple(groups), rank=rank, ranks=ranks)


def _bank(bank: PoolBank, device: int) -> ExpertBank:
    if bank.role is None:
        roles = [role.value.replace(" ", "_") for role in Role]
        raise ConfigurationError(f"bank {bank.name}: expected the name of a role {roles}")
    source = bank.source
    on_device = source.device_kind == "cuda"
    stride = source.strides[0] * source.itemsize if source.strides else None
    reach = (source.shape[0] - 1) * (stride or 0) + source.nbytes // max(source.shape[0], 1)
    return ExpertBank(
        name=bank.name,
        role=bank.role,
        dtype=source.dtype,
        shape=source.shape,
        address=source.address,
        nbytes=reach,
        location=Location.DEVICE if on_device else Location.PINNED,
        device=device if on_device else None,
        expert_stride=stride,
    )


def _layout(name: str, banks: tuple[ExpertBank, ...]) -> Layout:
    roles = frozenset(bank.role for bank in banks if not bank.role.is_auxiliary)
    found = next((layout for layout in Layout if layout.roles == roles), None)
    if found is None:
        layouts = "; ".join(layout.value for layout in Layout)
        names = sorted(role.value for role in roles)
        raise ConfigurationError(f"group {name}: expected banks {layouts}, got {names}")
    return found
