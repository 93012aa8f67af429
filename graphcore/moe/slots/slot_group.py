"""SlotGroup: the slots of one group of experts: a row of each bank on the device, and the tables.

Experts stay in pinned host memory; slots are copies of some of them, and a slot has the same number
in every bank. A group is as it is for life; a pool that grows has another in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from graphcore_kernels import GatherPlan, expert_gather

from graphcore.driver import Driver, records
from graphcore.driver.api import LEGACY_STREAM
from graphcore.errors import ConfigurationError
from graphcore.executable.memory_report import in_words
from graphcore.moe.slots.slot_state import SlotState
from graphcore.moe.slots.slot_tables import SlotTables
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import describe


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """One group of a pool.

    Args:
        name: Of the group.
        experts: How many there are.
        slots: How many can be resident.
        sources: Bank -> its experts, [experts, ...], where they were found.
        rows: Bank -> its slots, [slots, ...] on the device; the weights of the grouped product.
        tables: Which expert sits where.
        gather: The copy of missing experts.
    """

    name: str
    experts: int
    slots: int
    sources: Mapping[str, Any]
    rows: Mapping[str, Buffer]
    tables: SlotTables
    gather: GatherPlan

    @classmethod
    def make(
        cls, name: str, sources: Mapping[str, Any], state: SlotState, driver: Driver
    ) -> SlotGroup:
        """Allocates the rows and the tables, and checks that the device can read the experts.

        Raises:
            CacheTypeError: A source is no tensor.
            ConfigurationError: Sources that do not fit each other, or pageable memory.
            CudaError: Out of memory, or the driver refused.
        """
        rows = {
            bank: Buffer.allocate(
                (state.slots, *describe(source, name=f"{name}.{bank}").shape[1:]),
                describe(source).dtype,
                driver=driver,
            )
            for bank, source in sources.items()
        }
        tables = SlotTables(driver, state)
        try:
            pairs = [(sources[bank], rows[bank]) for bank in sources]
            gather = expert_gather.plan(pairs, tables.tensors)
        except ConfigurationError as error:
            banks = ", ".join(f"banks[{index}] is {bank}" for index, bank in enumerate(sources))
            error.add_note(f"group {name}: {banks}")
            raise
        return cls(name, state.experts, state.slots, dict(sources), rows, tables, gather)

    @property
    def nbytes(self) -> int:
        """Device memory of the rows and the tables."""
        return sum(rows.nbytes for rows in self.rows.values()) + self.tables.nbytes

    @property
    def expert_nbytes(self) -> int:
        """What a miss copies."""
        return sum(rows.nbytes // self.slots for rows in self.rows.values())

    def grown(self, slots: int, driver: Driver) -> SlotGroup:
        """A group with more slots that holds what this one holds; all work must be over.

        Raises:
            CudaError: Out of memory, or the driver refused; this group is as it was.
        """
        made = SlotGroup.make(self.name, self.sources, self.tables.read().grown(slots), driver)
        for bank, old in self.rows.items():
            to, source = (records.CopyOperand(each.address) for each in (made.rows[bank], old))
            driver.copy(records.MemcpyParams(to, source, old.nbytes), LEGACY_STREAM)
        return made

    def named_tensors(self) -> Iterator[tuple[str, Buffer]]:
        """Every static tensor, by a name for reports."""
        for bank, rows in self.rows.items():
            yield f"{self.name}.{bank}", rows
        for name, table in self.tables.tensors.items():
            yield f"{self.name}.{name}", table

    def close(self) -> None:
        """Lets go of the memory; graphs that use it keep it, and refuse where they are guarded."""
        for rows in self.rows.values():
            rows.close()
        self.tables.close()


def need_of_slots(sources: Mapping[str, Mapping[str, Any]], slots: Mapping[str, int]) -> str:
    """What the slots of these groups take of device memory, in words."""
    every = [
        prod(described.shape[1:]) * described.itemsize * slots[name]
        for name, banks in sources.items()
        for described in map(describe, banks.values())
    ]
    return (
        f"the rows of {sum(slots.values())} slots in {len(slots)} groups take "
        f"{in_words(sum(every))} in all; fewer slots take less"
    )


def expert_count(name: str, sources: Mapping[str, Any]) -> int:
    """How many experts the banks of a group have.

    Raises:
        CacheTypeError: A source is no tensor.
        ConfigurationError: No bank, or banks of different numbers of experts.
    """
    counts = {bank: describe(source, name=f"{name}.{bank}").shape[:1]
              for bank, source in sources.items()}  # fmt: skip
    if len(set(counts.values())) != 1 or () in counts.values():
        raise ConfigurationError(
            f"groups[{name!r}]: expected banks [experts, ...] of one number of experts, got "
            f"{ {bank: count[0] if count else None for bank, count in counts.items()} }"
        )
    return next(iter(counts.values()))[0]
