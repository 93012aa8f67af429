"""Succession: which groups of a pool stay, which are made and which go when a manifest is replaced.

A group stays, with its slots and whoever sits in them, where its banks are the very same memory in
the same form. Deciding only; the pool does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graphcore.driver import Driver
from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup
from graphcore.moe.slots.bank_sources import bank_source, bank_tensor, is_served
from graphcore.moe.slots.slot_group import SlotGroup, expert_count
from graphcore.moe.slots.slot_state import SlotState
from graphcore.resources.tensors import TensorRef, describe


@dataclass(frozen=True, slots=True)
class Succession:
    """What becomes of the groups of a pool.

    Args:
        order: Names of the groups that there will be, as in the manifest.
        kept: Those that stay.
        sources: Group -> bank -> experts, of those that are made.
        slots: Group -> slots, of the same.
        gone: Names of those that are closed: they are in no manifest any more, or made anew.
    """

    order: tuple[str, ...]
    kept: Mapping[str, SlotGroup]
    sources: Mapping[str, Mapping[str, Any]]
    slots: Mapping[str, int]
    gone: frozenset[str]

    @property
    def changes_nothing(self) -> bool:
        return not self.sources and not self.gone

    def make(self, driver: Driver) -> dict[str, SlotGroup]:
        """The groups that there will be; those that are new have no residents.

        Raises:
            CacheTypeError: A bank is no tensor.
            ConfigurationError: Banks of a group that do not fit each other.
            CudaError: Out of memory, or the driver refused; nothing is left.
        """
        made = {name: made_group(name, banks, self.slots[name], driver)
                for name, banks in self.sources.items()}  # fmt: skip
        every = {**self.kept, **made}
        return {name: every[name] for name in self.order}


def made_group(name: str, banks: Mapping[str, Any], slots: int, driver: Driver) -> SlotGroup:
    """A group without residents."""
    return SlotGroup.make(name, banks, SlotState.empty(expert_count(name, banks), slots), driver)


def succession(
    held: Mapping[str, SlotGroup],
    groups: Iterable[ExpertGroup],
    owners: Mapping[str, object],
    driver: Driver,
) -> Succession:
    """What becomes of ``held`` under a manifest of ``groups``.

    Groups that have no slots, or a bank that slots cannot serve (an active adapter, pageable
    memory), have no place in a pool.

    Args:
        held: The groups of the pool.
        groups: Of the manifest.
        owners: Name of a bank -> whose memory it is; a bank that stays as it is needs none.
        driver: Where.

    Raises:
        ConfigurationError: A bank that is new and has no owner.
    """
    served = [group for group in groups if group.slots and all(map(is_served, group.banks))]
    kept, sources = {}, {}
    for group in served:
        old = held.get(group.name)
        if old is not None and _is_same(old, group, owners, driver):
            kept[group.name] = old
        else:
            sources[group.name] = {
                _key(bank, group, old): bank_source(bank, owners, driver) for bank in group.banks
            }
    return Succession(
        order=tuple(group.name for group in served),
        kept=kept,
        sources=sources,
        slots={group.name: group.slots for group in served if group.name in sources},
        gone=frozenset(held) - frozenset(kept),
    )


def _is_same(
    old: SlotGroup, group: ExpertGroup, owners: Mapping[str, object], driver: Driver
) -> bool:
    keys = {_key(bank, group, old): bank for bank in group.banks}
    if old.slots != group.slots or set(keys) != set(old.sources):
        return False
    return all(
        describe(source) == bank_tensor(keys[key], None, driver)
        and _has_owner(source, describe(source), owners.get(keys[key].name))
        for key, source in old.sources.items()
    )


def _has_owner(source: object, ref: TensorRef, owner: object) -> bool:
    """Whether ``owner``, where one is given, is that of before: an address may be reused."""
    return owner is None or owner is source or owner is ref.owner


def _key(bank: ExpertBank, group: ExpertGroup, old: SlotGroup | None) -> str:
    """What the pool calls a bank: its name, or what follows "group." where it does so already."""
    short = bank.name.removeprefix(f"{group.name}.")
    has_short = old is not None and short in old.sources and bank.name not in old.sources
    return short if has_short else bank.name
