"""Resources: the addresses, sizes and choices that a graph of experts has baked in.

What lies in that memory (which expert sits in which slot, expert ids, the clock) is no part of it:
that changes at every replay.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from graphcore.moe.manifests.capability import Capability
from graphcore.moe.manifests.names import PlanOutcome, Role
from graphcore.moe.manifests.ownership import Admission

SLOT_TABLES = (
    "slot_for_expert",
    "expert_for_slot",
    "last_used",
    "frequency",
    "frequency_epoch",
    "clock",
    "step",
)
"""Tables without which no group is run from slots."""


@dataclass(frozen=True, slots=True)
class BankResources:
    """One bank: where its slots and its experts lie, and the kernel that reads them."""

    pool: int
    source: int
    capability: Capability


@dataclass(frozen=True, slots=True)
class AuxiliaryResources:
    """One scale or bias.

    Args:
        address: On the device.
        values: For each expert.
        tensor: Identity of the tensor.
        source: Its address where the manifest has it.
        role: Of the bank.
        resident: Address of all experts' values on the device; 0 where there is none.
        nbytes: Of the source.
        generation: Of the resource.
    """

    address: int
    values: int
    tensor: Hashable
    source: int
    role: Role
    resident: int
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class GroupResources:
    """One group, as a graph uses it.

    Args:
        name: Of the group.
        semantic_key: Of the certificate that its part of the plan was made for.
        device: Ordinal.
        rank: Of the process among those that share the experts.
        top_k: Experts for a row.
        rows: Rows of the step.
        routes: Choices of experts.
        row_stride: Bytes between rows of expert ids.
        slots: On the device.
        generation: Counts how often the resource was made anew.
        serial: Of its allocation, never given twice; 0: none.
        stream: Handle of the stream that it runs on.
        tables: (name, address) of every table of its slots, :data:`SLOT_TABLES` among them.
        plan_buffer: Address of what the route plan writes.
        plan_bytes: Its size.
        bank_descriptors: Address of what the gather reads about banks; 0: its arguments say it.
        auxiliary_array: Address of what it reads about auxiliaries; 0: its arguments say it.
        auxiliary_count: How many those are.
        miss_values: Values that it copies for each missing expert.
        banks: In the order of the manifest.
        auxiliaries: In the order of the manifest.
    """

    name: str
    semantic_key: int
    device: int
    rank: int
    top_k: int
    rows: int
    routes: int
    row_stride: int
    slots: int
    generation: int
    serial: int
    stream: int
    tables: tuple[tuple[str, int], ...]
    plan_buffer: int
    plan_bytes: int
    bank_descriptors: int
    auxiliary_array: int
    auxiliary_count: int
    miss_values: int
    banks: tuple[BankResources, ...]
    auxiliaries: tuple[AuxiliaryResources, ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """All that one graph uses.

    Args:
        generation: Of the manifest.
        semantic_key: Of the plan's certificate.
        device: Ordinal of the device that the graph runs on.
        rank: Of the process among those that share the experts.
        groups: In the order of the model.
        transfer_counter: Address of a counter of copied bytes; 0: tables of the groups count.
        ranks: How many processes share the experts.
    """

    generation: int
    semantic_key: int
    device: int
    rank: int
    groups: tuple[GroupResources, ...]
    transfer_counter: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class GroupState:
    """What is going on with the resource of a group just now; in no fingerprint."""

    in_transaction: bool = False
    is_refreshing: bool = False
    is_registered: bool = True


@dataclass(frozen=True, slots=True)
class ResourceState:
    """What decides whether a fingerprint can be taken now; in none itself.

    Args:
        outcome: Of the plan.
        admission: Whether expert caching is open.
        generation: Of the manifest that holds now.
        stream: That the step runs on.
        groups: In the order of the resources.
    """

    outcome: PlanOutcome
    admission: Admission
    generation: int
    stream: int
    groups: tuple[GroupState, ...]
