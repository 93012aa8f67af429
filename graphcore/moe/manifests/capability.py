"""Capability: the kernel that serves a bank, and everything by which it was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from graphcore.moe.manifests.names import GroupReason, Location, Phase, Role, RowSemantics

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capability:
    """Two graphs whose banks have equal capabilities run equal kernels.

    Extents and strides are of the source (all experts) and of its form in slots; strides in bytes.

    Args:
        role: Of the bank.
        kernel: Class of the kernel that was selected.
        consumer: What reads the product.
        reason: How its group stands.
        equivalence: Why that consumer sees the same bits, or does not.
        phase: Prompt or decode.
        location: Of the source.
        row_semantics: What the rows are to each other; None without a certificate.
        source_type: Element type of the source.
        source_flags: What else is said of it, in bits; 0: nothing.
        input_type: Element type of what is multiplied.
        output_type: Element type of the product.
        tokens: Rows of the step.
        experts: Of the group.
        top_k: Experts for a row.
        rows: Rows of the product.
        routes: Choices of experts.
        row_stride: Bytes between rows of expert ids.
        slots: Of the group.
        source_extents: Of the source.
        source_strides: Of the source.
        slot_extents: Of its form in slots.
        slot_strides: Of its form in slots.
        device: Ordinal.
        compute_capability: Of the device, as 90 for 9.0.
        warp_size: Of the device.
        shared_memory_limit: Bytes a block may have.
    """

    role: Role
    kernel: str
    consumer: str
    reason: GroupReason
    equivalence: str
    phase: Phase
    location: Location
    row_semantics: RowSemantics | None
    source_type: str
    source_flags: int
    input_type: str
    output_type: str
    tokens: int
    experts: int
    top_k: int
    rows: int
    routes: int
    row_stride: int
    slots: int
    source_extents: Extents
    source_strides: Extents
    slot_extents: Extents
    slot_strides: Extents
    device: int
    compute_capability: int
    warp_size: int
    shared_memory_limit: int
