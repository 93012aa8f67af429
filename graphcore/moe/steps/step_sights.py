"""StepSights: looks at the nodes of steps, certifies them, and remembers what it saw."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.coverage import (
    Coverage,
    CoverageRecord,
    CoverageTable,
    ExpertProduct,
    Uncertified,
    UncertifiedReason,
    cover,
)
from graphcore.moe.decisions.reverse_map import ReverseMap
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.manifests.manifest_registry import ManifestRegistry, Published
from graphcore.moe.manifests.ownership import Admission
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.slots.pool_bank import banks_of
from graphcore.moe.slots.slot_group import SlotGroup
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.sighting import SightedGroup
from graphcore.moe.steps.step_facts import Seen
from graphcore.moe.steps.step_work import StepWork

_Stamp = tuple[int, Hashable, int]
"""Uid, allocations of the pool, generation of the manifest."""


class StepSights:
    """What was seen of each step, and the records of those that were certified. Not locked.

    Args:
        manifests: What manifest holds.
    """

    def __init__(self, manifests: ManifestRegistry) -> None:
        self._manifests = manifests
        self._coverage = CoverageTable()
        self._seen: WeakKeyDictionary[StepWork, tuple[_Stamp, Seen]] = WeakKeyDictionary()
        self._maps: tuple[Published, ReverseMap] | None = None

    def look(self, work: StepWork, uid: int, pool: SlotPool | None, published: Published) -> Seen:
        """The nodes and groups of ``work``; looked at again where one of the others changed.

        Raises:
            ConfigurationError: A group that neither pool nor manifest has, or one without an
                admission although its slots serve it.
        """
        serial = None if pool is None or pool.is_closed else (id(pool), pool.serial)
        stamp: _Stamp = uid, serial, published.generation
        known = self._seen.get(work)
        if uid and known is not None and known[0] == stamp:
            return known[1]
        manifest, groups = published.manifest, []
        slots = {} if pool is None or pool.is_closed else pool.groups
        named = [(use, manifest.group(use.group)) for use in work.groups]
        banks = [(use, banks_of(use.group, slots.get(use.group), group)) for use, group in named]
        found = work.look(banks)
        for (use, each), places, (_, group) in zip(banks, found.places, named, strict=True):
            held = slots.get(use.group)
            if use.admission is None and held is not None:
                _refuse_missing(use, held)
            groups.append(SightedGroup(use, each, places, group))
        seen = Seen(found, tuple(groups))
        if known is not None and known[0][1:] == stamp[1:] and known[1] == seen:
            seen = known[1]  # with all that was made of it
        self._seen[work] = stamp, seen
        return seen

    def forget(self) -> None:
        """Looks at every step anew."""
        self._seen.clear()

    def certify(self, work: StepWork, pool: SlotPool | None) -> CoverageRecord | Uncertified:
        """Notes which nodes of ``work`` are products of experts, as it is now."""
        return self._certify(self.look(work, work.uid, pool, self._manifests.current))

    def coverage(self, seen: Seen, published: Published) -> Coverage:
        """How what was seen stands to its record and to the manifest.

        What is seen for the first time is certified, as is what was seen so long ago that its
        record made room for others.
        """
        nodes = seen.look.nodes
        record = self._coverage.recover(nodes)
        if isinstance(record, Uncertified) and record.reason is UncertifiedReason.UNKNOWN:
            record = self._certify(seen)
        return seen.once(
            ("coverage", id(record)),  # which stays, as part of what is kept
            lambda: cover(record, nodes, products_of(seen), self._reverse_map(published)),
        )

    def _certify(self, seen: Seen) -> CoverageRecord | Uncertified:
        is_open = self._manifests.ownership.admission is Admission.OPEN
        return self._coverage.certify(seen.look.nodes, products_of(seen), is_open=is_open)

    def _reverse_map(self, published: Published) -> ReverseMap:
        if self._maps is None or self._maps[0] is not published:
            self._maps = published, ReverseMap(published.manifest)
        return self._maps[1]


def products_of(seen: Seen) -> tuple[ExpertProduct, ...]:
    """The products of all groups, in the order of their nodes."""
    return seen.once("products", lambda: _products(seen))


def _products(seen: Seen) -> tuple[ExpertProduct, ...]:
    found = (product for sighted in seen.groups for product in sighted.products)
    return tuple(sorted(found, key=lambda product: product.index))


def _refuse_missing(use: GroupUse, held: SlotGroup) -> None:
    if slots_needed(use.routes, held.experts) <= held.slots:
        raise ConfigurationError(
            f"group {use.group}: expected an admission for {use.routes} routes, which its "
            f"{held.slots} slots serve, got none"
        )
