"""Experts in slots and in scratch memory for which the device has not memory enough."""

from __future__ import annotations

import random
from typing import Any

import numpy
from graphcore_kernels import RouteStatus
from helpers.exhaustion import Case
from helpers.slot_pools import Model, pinned_experts
from helpers.staged_layers import StagedLayer

from graphcore.driver import Driver
from graphcore.moe import SlotAdmission, SlotPool, StagingMemory
from graphcore.resources.buffer import Buffer

EXPERTS = 6


class Admitting(Case):
    """Two groups of experts with steps before, each checked whole against an oracle."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.model = Model(driver)
        self.draw = random.Random(3)
        self.wide, self.values = pinned_experts(driver, EXPERTS, self.unit // 4)
        self.still_right()

    def still_right(self) -> None:
        for _ in range(2):
            chosen = self.model.choose(self.draw)
            for admission in self.model.admissions.values():
                report = admission.outputs["report"]
                self.driver.write(report.address, b"\xff" * report.nbytes)
            self.model.launch()
            self.model.check(chosen)

    def serves(self, pool: SlotPool) -> None:
        """A step over the wide experts finds them, bit for bit, in rows that were poisoned."""
        rows = pool["wide"].rows["bank"]
        ids = Buffer.allocate((2, 1), "int32", driver=self.driver)
        admission = SlotAdmission(pool, "wide", ids)
        missing = [each for each in range(EXPERTS) if each not in pool.residents()["wide"]][:2]
        ids.write(numpy.reshape(missing, (2, 1)))
        admission.launch()
        outcome = admission.outcome()
        assert (outcome.status, outcome.misses) == (RouteStatus.OK, 2)
        for expert, slot in pool.residents()["wide"].items():
            held = self.driver.read(rows.address + slot * self.unit, self.unit)
            assert held == self.values[expert].tobytes()


class Pool(Admitting):
    """A pool of slots: of a group of several banks some find room, and the others none."""

    says = (*Case.says, "asked for ", "the rows of 12 slots in 2 groups take ", "fewer slots")
    shares = (0.05, 0.3, 0.75)

    def operate(self) -> Any:
        groups = {"wide": {"bank": self.wide}, "twin": {"bank": self.wide}}
        return SlotPool(groups, EXPERTS, driver=self.driver)

    def check(self, made: Any) -> None:
        assert made.residents() == {"wide": {}, "twin": {}}
        self.serves(made)


class Growth(Admitting):
    """A pool that grows: old and new rows would lie side by side."""

    says = (*Case.says, "the rows of 6 slots in 1 groups take ", "the old ones lie beside them")

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.pool = SlotPool({"wide": {"bank": self.wide}}, 2, driver=driver)
        self.serves(self.pool)
        self.before = self.pool.serial, self.pool.generation, self.pool.residents()

    def operate(self) -> Any:
        self.pool.grow(EXPERTS)
        return self.pool

    def still_right(self) -> None:
        super().still_right()
        if hasattr(self, "pool") and self.pool["wide"].slots == 2:
            now = self.pool.serial, self.pool.generation, self.pool.residents()
            assert now == self.before
            rows = self.pool["wide"].rows["bank"]
            for expert, slot in self.pool.residents()["wide"].items():
                held = self.driver.read(rows.address + slot * self.unit, self.unit)
                assert held == self.values[expert].tobytes()

    def check(self, made: Any) -> None:
        assert made["wide"].slots == EXPERTS
        assert made.residents() == self.before[2], "who was resident is"
        self.serves(made)


class Admission(Admitting):
    """The outputs of an admission, where not even they find room."""

    says = (*Case.says, "asked for ")

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        if not driver.is_emulated:
            self.holds_memory = None  # less than a step in which a device hands memory out

    def lefts(self, took: int) -> list[int]:
        return [0]

    def operate(self) -> Any:
        return SlotAdmission(self.model.pool, "first", self.model.ids["first"])

    def check(self, made: Any) -> None:
        self.model.admissions["first"] = made
        self.still_right()


class Staging(Case):
    """Scratch memory of two parts, of which the first finds room; staged steps go on."""

    says = (*Case.says, "asked for ", "expert_bytes=", " in all; smaller ones make more chunks")
    shares = (0.1, 0.6)

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.layer = StagedLayer(driver)
        self.tensors = self.layer.step(6, 2)
        self.products = self.layer.staged(self.layer.memory())
        self.draw = random.Random(4)
        self.still_right()

    def operate(self) -> Any:
        return StagingMemory(expert_bytes=self.unit, row_bytes=3 * self.unit, driver=self.driver)

    def check(self, made: Any) -> None:
        self.staged(self.layer.staged(made))

    def still_right(self) -> None:
        self.staged(self.products)

    def staged(self, products: Any) -> None:
        """A step of other experts, into memory that was poisoned, is the truth in float64."""
        self.tensors.choose(self.draw)
        self.tensors.poison()
        products.launch(*self.tensors.all())
        self.driver.synchronize()
        self.tensors.check()
