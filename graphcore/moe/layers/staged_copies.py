"""StagedCopies: how a chunk of experts comes into scratch memory: read by the device, or copied.

The device reads pinned memory and its own on the stream, by a list that it made itself. Experts in
pageable memory are copied by the host, which must know the list: it waits for the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphcore_kernels import GatherPlan, expert_gather

from graphcore.driver import Driver
from graphcore.driver.records import CopyOperand, MemcpyParams, MemoryKind, StreamHandle
from graphcore.moe.manifests.names import Location
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import describe


@dataclass(frozen=True, slots=True)
class StagedBank:
    """A bank, its scratch rows, and who moves experts from the one to the other."""

    source: Any
    rows: Buffer
    is_pageable: bool


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """The copies of one chunk.

    Args:
        banks: All of them.
        gather: Of those that the device reads; None: there are none.
    """

    banks: Sequence[StagedBank]
    gather: GatherPlan | None

    @classmethod
    def plan(cls, banks: Sequence[StagedBank], lists: Mapping[str, Any]) -> StagedCopies:
        """Checks and loads; ``lists`` is the miss list of ``expert_gather``."""
        readable = [(bank.source, bank.rows) for bank in banks if not bank.is_pageable]
        return cls(banks, expert_gather.plan(readable, lists) if readable else None)

    def launch(self, driver: Driver, stream: StreamHandle, experts: Sequence[int]) -> None:
        """Copies on ``stream``; ``experts`` are those that the host copies, in their order."""
        for bank in self.banks:
            if bank.is_pageable:
                _copy_rows(driver, stream, bank, experts)
        if self.gather is not None:
            self.gather.launch(stream)


def is_pageable(driver: Driver, bank: Any, location: Location | None) -> bool:
    """Whether the device cannot read a bank where it lies.

    Args:
        driver: Whose device.
        bank: Any tensor.
        location: What is known of it; None: it is looked at. The emulated driver's device reads
            all memory that nobody calls pageable.
    """
    if location is not None:
        return location is Location.PAGEABLE
    ref = describe(bank)
    if driver.is_emulated or ref.device_kind == "cuda":
        return False
    found = driver.allocation_of(ref.address)
    return found is None or found.memory is MemoryKind.DEVICE


def _copy_rows(
    driver: Driver, stream: StreamHandle, bank: StagedBank, experts: Sequence[int]
) -> None:
    ref = describe(bank.source)
    step, size = ref.strides[0] * ref.itemsize, ref.nbytes // ref.shape[0]
    for slot, expert in enumerate(experts):
        to = CopyOperand(bank.rows.address + slot * size)
        # from pageable memory: the driver has read the source when the call returns
        source = CopyOperand(ref.address + expert * step, MemoryKind.HOST)
        driver.copy(MemcpyParams(to, source, size), stream)
