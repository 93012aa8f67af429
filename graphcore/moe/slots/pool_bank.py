"""PoolBank: one bank of a group as a step finds it: its experts, its slots, what the manifest says.

A pool's bank is the manifest's of the same name, or of the name "group.bank".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.reverse_map import WeightSource
from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup
from graphcore.moe.manifests.names import Location, Role
from graphcore.moe.slots.slot_group import SlotGroup
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides, describe


@dataclass(frozen=True, slots=True)
class PoolBank:
    """One bank.

    Args:
        name: In the manifest; "group.bank" where it has none.
        role: In the manifest, else as its name says; None where that says nothing.
        location: Of its experts.
        source: Its experts.
        rows: Its slots; None without a pool.
    """

    name: str
    role: Role | None
    location: Location
    source: TensorRef
    rows: TensorRef | None

    @property
    def is_auxiliary(self) -> bool:
        """Whether it is a scale or a bias."""
        return self.role is not None and self.role.is_auxiliary

    @property
    def weights(self) -> WeightSource:
        """What a product of it multiplies by."""
        return WeightSource(self.name, self.source.address, self.source.shape, self.source.dtype)

    def has_rows_at(self, low: int, high: int) -> bool:
        """Whether bytes ``low`` to ``high`` lie in its slots, in part or whole."""
        if self.rows is None:
            return False
        return low < self.rows.address + self.rows.nbytes and self.rows.address < high


def role_of(name: str) -> Role | None:
    """The role that a bank's name says: "gate_up", "down_scale"; None for any other."""
    base, _, kind = name.rpartition("_")
    words = f"{base} {kind}" if kind in ("scale", "bias") else name
    return Role(words) if words in {role.value for role in Role} else None


def banks_of(name: str, slots: SlotGroup | None, group: ExpertGroup | None) -> tuple[PoolBank, ...]:
    """The banks of a group, as the pool has them, else as the manifest does.

    Raises:
        ConfigurationError: Neither has the group.
    """
    known: Sequence[ExpertBank] = () if group is None else group.banks
    if slots is None:
        if group is None:
            raise ConfigurationError(f"group: expected one of the manifest, got {name!r}")
        return tuple(
            PoolBank(bank.name, bank.role, bank.location, _ref_of(bank), None) for bank in known
        )
    named = {bank.name: bank for bank in known}
    found = []
    for key, source in slots.sources.items():
        whole = key if key in named else f"{name}.{key}"
        bank = named.get(whole)
        role = role_of(key.removeprefix(f"{name}.")) if bank is None else bank.role
        location = Location.PINNED if bank is None else bank.location
        rows = slots.rows[key].__graphcore_tensor__()
        found.append(PoolBank(whole, role, location, describe(source, name=whole), rows))
    return tuple(found)


def _ref_of(bank: ExpertBank) -> TensorRef:
    itemsize = DTYPES[bank.dtype].itemsize
    strides = contiguous_strides(bank.shape)
    return TensorRef(bank.address, bank.shape, strides, bank.dtype, itemsize, "cpu")
