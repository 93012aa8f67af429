"""Small groups of experts in pinned memory, pools over them, and steps that are checked whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
from graphcore_kernels import RoutePolicy, RouteStatus

from graphcore.driver import Driver
from graphcore.driver.kernel import Pointer
from graphcore.moe import SlotAdmission, SlotOracle, SlotPool
from graphcore.resources.buffer import Buffer
from graphcore.resources.pinned import PinnedMemory
from graphcore.resources.tensors import TensorRef, contiguous_strides

EXPERTS, SLOTS, ROWS, TOP_K = 10, 5, 2, 2
BANKS = {"gate_up": (8, 4), "down": (4, 4), "scale": ()}


def pinned_experts(driver: Driver, *shape: int, seed: int = 0) -> tuple[TensorRef, Any]:
    """float32 experts in pinned memory, and the same as an array on the host."""
    memory = PinnedMemory(driver, 4 * int(numpy.prod(shape)))
    values = Pointer(memory.address, "float32").array(shape)
    values[...] = numpy.random.default_rng(seed).standard_normal(shape, numpy.float32)
    ref = TensorRef(
        memory.address, shape, contiguous_strides(shape), "float32", 4, "cpu", owner=memory
    )
    return ref, values


class Model:
    """Groups of experts, a pool over them, an admission and an oracle for each."""

    def __init__(
        self,
        driver: Driver,
        groups: Sequence[str] = ("first", "second"),
        slots: int = SLOTS,
        policy: RoutePolicy | None = None,
    ) -> None:
        self.driver = driver
        made = {
            name: {bank: pinned_experts(driver, EXPERTS, *row, seed=index * 10 + place)
                   for place, (bank, row) in enumerate(BANKS.items())}
            for index, name in enumerate(groups)
        }  # fmt: skip
        self.experts = {
            name: {bank: values for bank, (_, values) in banks.items()}
            for name, banks in made.items()
        }
        self.sources = {
            name: {bank: ref for bank, (ref, _) in banks.items()} for name, banks in made.items()
        }
        self.pool = SlotPool(self.sources, slots, driver=driver, policy=policy)
        self.ids = {name: Buffer.allocate((ROWS, TOP_K), "int32", driver=driver) for name in groups}
        self.oracles = {name: SlotOracle(EXPERTS, slots, policy) for name in groups}
        self.admit()

    def admit(self) -> None:
        """Makes the admissions, over the pool as it is now."""
        self.admissions = {
            name: SlotAdmission(self.pool, name, ids) for name, ids in self.ids.items()
        }

    def launch(self, stream: Any = None) -> None:
        for admission in self.admissions.values():
            admission.launch(stream)

    def choose(self, draw: random.Random) -> dict[str, list[int]]:
        """Other expert ids for every group, mostly popular ones."""
        chosen = {
            name: [min(int(draw.expovariate(0.3)), EXPERTS - 1) for _ in range(ROWS * TOP_K)]
            for name in self.ids
        }
        for name, ids in chosen.items():
            self.ids[name].write(numpy.reshape(ids, (ROWS, TOP_K)))
        return chosen

    def check(self, chosen: dict[str, list[int]]) -> None:
        """The step of these ids did what the oracles say, and every route finds its expert."""
        for name, ids in chosen.items():
            oracle, admission = self.oracles[name], self.admissions[name]
            expected = oracle.plan(ids, TOP_K)
            outcome = admission.outcome()
            assert outcome.status is expected.status
            assert (outcome.unique, outcome.misses) == (
                len(expected.unique), len(expected.misses)
            )  # fmt: skip
            assert self.pool.residents()[name] == oracle.residents()
            for key in ("route_slots", "offsets", "slots", "gather", "scatter"):
                read = admission.outputs[key].read().reshape(-1).tolist()
                assert read == list(getattr(expected, key)), key
            assert expected.status is RouteStatus.OK
        self.check_rows()

    def check_rows(self) -> None:
        """Every resident's row is its expert, bit for bit, in every bank."""
        for name, residents in self.pool.residents().items():
            for bank, rows in self.pool[name].rows.items():
                held, experts = rows.read(), self.experts[name][bank]
                for expert, slot in residents.items():
                    assert held[slot].tobytes() == experts[expert].tobytes(), (name, bank, expert)
