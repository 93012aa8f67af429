"""Resources of a pool of slots that a step has baked in, and the objects that own them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.resources import (
    AuxiliaryResources,
    BankResources,
    GroupResources,
    GroupState,
    Resources,
)
from graphcore.moe.manifests.capability import Capability
from graphcore.moe.manifests.names import Location
from graphcore.moe.manifests.ownership import Ownership, Transaction
from graphcore.moe.slots.pool_bank import PoolBank
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.sighting import SightedGroup


class Place(NamedTuple):
    """Where a step runs: device, rank of so many, and for each of its groups the stream."""

    device: int
    rank: int
    streams: tuple[int, ...]
    ranks: int = 1


def pool_resources(
    pool: SlotPool, groups: Sequence[SightedGroup], plan: ExpertPlan, place: Place
) -> Resources:
    """What a graph of ``plan`` uses of ``pool``, in the order of its groups."""
    key = plan.subject.semantic_key
    return Resources(
        generation=plan.subject.published.generation,
        semantic_key=key,
        device=place.device,
        rank=place.rank,
        ranks=place.ranks,
        # bytes are counted by misses, in the table "totals" of each group, which has its field
        transfer_counter=0,
        groups=tuple(
            _group(pool, sighted, planned.sighting.capabilities, key, place, stream)
            for sighted, planned, stream in zip(groups, plan.groups, place.streams, strict=True)
        ),
    )


def _group(
    pool: SlotPool,
    sighted: SightedGroup,
    capabilities: Sequence[Capability | None],
    key: int,
    place: Place,
    stream: int,
) -> GroupResources:
    use, slots = sighted.use, pool[sighted.use.group]
    made = use.admission
    auxiliaries = [bank for bank in sighted.banks if bank.is_auxiliary]
    served = [bank for bank in sighted.banks if not bank.is_auxiliary]
    return GroupResources(
        name=use.group,
        semantic_key=key,
        device=place.device,
        rank=place.rank,
        top_k=use.top_k,
        rows=use.rows,
        routes=use.routes,
        row_stride=use.row_stride,
        slots=slots.slots,
        generation=pool.generation,
        serial=pool.serial,
        stream=stream,
        tables=tuple((name, each.address) for name, each in slots.tables.tensors.items()),
        plan_buffer=0 if made is None else made.plan_buffer.address,
        plan_bytes=0 if made is None else made.plan_buffer.nbytes,
        # a design that hands these over in arrays on the device has their addresses here; our
        # gather has its banks, scales and biases too, among its arguments by value
        bank_descriptors=0,
        auxiliary_array=0,
        auxiliary_count=len(auxiliaries),
        miss_values=slots.expert_nbytes,
        banks=tuple(
            BankResources(_rows(bank), bank.source.address, capability)
            for bank, capability in zip(served, capabilities, strict=False)
            if capability is not None
        ),
        auxiliaries=tuple(_auxiliary(bank, pool.generation) for bank in auxiliaries),
    )


def _rows(bank: PoolBank) -> int:
    return 0 if bank.rows is None else bank.rows.address


def _auxiliary(bank: PoolBank, generation: int) -> AuxiliaryResources:
    assert bank.role is not None
    return AuxiliaryResources(
        address=_rows(bank),
        values=bank.source.size // max(bank.source.shape[0], 1),
        tensor=bank.name,
        source=bank.source.address,
        role=bank.role,
        resident=bank.source.address if bank.location is Location.DEVICE else 0,
        nbytes=bank.source.nbytes,
        generation=generation,
    )


def owners_of(pool: SlotPool, groups: Sequence[SightedGroup]) -> tuple[object, ...]:
    """The objects that own it, in order: another object at an old address is not the old one."""
    found: list[object] = [pool]
    for sighted in groups:
        slots = pool[sighted.use.group]
        found += [slots.tables, *slots.rows.values()]
        if sighted.use.admission is not None:
            found.append(sighted.use.admission)
    return tuple(found)


def group_states(
    ownership: Ownership,
    groups: Sequence[SightedGroup],
    mine: Transaction | None = None,
) -> tuple[GroupState, ...]:
    """What is going on with each group just now; ``mine`` is the step's own use of them."""
    return tuple(
        GroupState(
            in_transaction=mine is None and ownership.is_busy(sighted.use.group),
            is_registered=sighted.group is not None,
        )
        for sighted in groups
    )
