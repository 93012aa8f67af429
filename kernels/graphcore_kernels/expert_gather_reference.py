"""The kernel of ``expert_gather.cu`` in Python: what the emulated driver runs."""

from __future__ import annotations

import struct

from graphcore.driver.kernel import Pointer
from graphcore.driver.records import LaunchConfig

BANK = struct.Struct("<5Q")
"""A bank as the kernel takes it: source, slots, source stride, slot stride, bytes of a row."""


def run(
    _config: LaunchConfig,
    banks: bytes,
    miss_expert: Pointer,
    miss_slot: Pointer,
    miss_count: Pointer,
    bank_count: int,
    experts: int,
    slots: int,
) -> None:
    """Copies the rows of the listed experts into their slots; entries out of range lead nowhere."""
    count = min(max(int(miss_count.array(1)[0]), 0), slots)
    pairs = zip(miss_expert.array(count).tolist(), miss_slot.array(count).tolist(), strict=True)
    rows = [BANK.unpack_from(banks, index * BANK.size) for index in range(bank_count)]
    for expert, slot in pairs:
        if not (0 <= expert < experts and 0 <= slot < slots):
            continue
        for source, to, source_stride, slot_stride, size in rows:
            row = Pointer(source + expert * source_stride, "uint8").array(size)
            Pointer(to + slot * slot_stride, "uint8").array(size)[:] = row
