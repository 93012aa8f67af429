"""Pools that grow while others use them: who waits, what is stale, and that residents stay."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence

import pytest
from helpers.interrupts import press_at
from helpers.slot_pools import EXPERTS, ROWS, SLOTS, TOP_K, Model
from helpers.threads import SOON, in_thread, until

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import LifecycleError
from graphcore.moe import Lease, Ownership, Refusal, RefusalReason, SlotAdmission
from graphcore.moe.manifests.ownership import Transaction
from graphcore.resources.buffer import Buffer

GROUPS = ("first", "second")
LEAVES = {"expert_for_slot": -1, "last_used": 0, "frequency": 0, "frequency_epoch": 0}


def owned(driver: Driver, groups: Sequence[str] = GROUPS) -> tuple[Model, Ownership]:
    model, ownership = Model(driver, groups), Ownership(groups)
    model.pool.ownership = ownership
    return model, ownership


def extend(model: Model, name: str, by: int) -> None:
    """The oracle of a group gets more slots."""
    for word, fresh in LEAVES.items():
        getattr(model.oracles[name], word).extend([fresh] * by)


def steps(model: Model, count: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        chosen = model.choose(draw)
        model.launch()
        model.check(chosen)


def test_growth_waits_for_users_lets_nobody_in_and_makes_their_leases_stale(graphcore_driver):
    model, ownership = owned(graphcore_driver)
    steps(model, 6, seed=1)
    residents, serial = model.pool.residents(), model.pool.serial
    lease = ownership.lease("a step", ["first"])
    assert isinstance(lease, Lease)
    with in_thread(lambda: model.pool.grow({"first": SLOTS + 2})) as grown:
        until(lambda: isinstance(ownership.lease("another", ["first"]), Refusal))
        refusal = ownership.lease("another", ["first"])
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.MAINTENANCE
        # who has a lease may finish, and other groups go on
        assert isinstance(ownership.begin(lease), Transaction)
        model.launch()
        with ownership.held("the other group", ["second"]):
            pass
        assert not grown
        assert (model.pool.serial, model.pool.generation) == (serial, 0)
        ownership.release(lease)
    assert grown == [None]
    assert model.pool.serial > serial
    assert model.pool.generation == 1
    stale = ownership.begin(lease)
    assert isinstance(stale, Refusal)
    assert stale.reason is RefusalReason.EPOCH
    assert set(model.pool.residents()["first"]) >= set(residents["first"])
    with pytest.raises(LifecycleError, match="make another"):
        model.launch()
    with ownership.held("a step of afterwards", GROUPS):
        model.admit()
        model.launch()
    model.check_rows()


def test_users_that_stay_end_growth_and_nothing_changes(graphcore_driver):
    model, ownership = owned(graphcore_driver)
    steps(model, 3, seed=2)
    serial = model.pool.serial
    with in_thread(lambda: ownership.lease("stays", ["second"])) as given:
        pass
    with pytest.raises(LifecycleError, match="still in use after"):
        model.pool.grow(SLOTS + 1, timeout=0.01)
    assert (model.pool.serial, model.pool["first"].slots) == (serial, SLOTS)
    assert ownership.check(given[0]) is None
    steps(model, 3, seed=3)
    ownership.release(given[0])
    model.pool.grow(SLOTS + 1, timeout=0.01)
    assert model.pool["second"].slots == SLOTS + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: pool.grow(SLOTS + 1),
        lambda pool: pool.reset("first"),
        lambda pool: pool.pin("first", [0]),
        lambda pool: pool.close_admission("first"),
    ],
    ids=["grow", "reset", "pin", "close admission"],
)
def test_a_thread_that_uses_a_group_does_not_wait_for_itself(graphcore_driver, change):
    model, ownership = owned(graphcore_driver)
    with (
        ownership.held("me", ["first"]),
        pytest.raises(LifecycleError, match="would wait for itself"),
    ):
        change(model.pool)
    change(model.pool)


def test_growth_to_the_same_size_waits_for_nobody(graphcore_driver):
    model, ownership = owned(graphcore_driver)
    with ownership.held("me", GROUPS):
        model.pool.grow(SLOTS)
    assert ownership.epoch("first") == 1


def test_groups_that_do_not_grow_stay_in_use(graphcore_driver):
    model, ownership = owned(graphcore_driver)
    with ownership.held("me", ["second"]) as lease:
        model.pool.grow({"first": SLOTS + 1})
        assert ownership.check(lease) is None
    assert (ownership.epoch("first"), ownership.epoch("second")) == (2, 1)


def test_all_work_is_over_before_rows_are_copied_and_after(monkeypatch):
    driver = EmulatedDriver()
    model, _ = owned(driver)
    steps(model, 3, seed=4)
    calls: list[str] = []
    for name in ("synchronize", "copy"):
        real = getattr(driver, name)

        def log(*arguments, _real=real, _name=name):
            calls.append(_name)
            return _real(*arguments)

        monkeypatch.setattr(driver, name, log)
    model.pool.grow(SLOTS + 1)
    assert calls[0] == calls[-1] == "synchronize"
    assert calls[1:-1] == ["copy"] * 6


class Stepping:
    """Threads that step over one group, each with its own tensors, in any order.

    What they do is noted in the order in which the group's transactions allowed it, so that the
    oracle can be asked afterwards.
    """

    def __init__(self, model: Model, ownership: Ownership) -> None:
        self.model, self.ownership = model, ownership
        self.log: list[list[int] | int] = []
        self.stale = 0
        self._grow = model.pool._grow
        model.pool._grow = self._log_growth

    def _log_growth(self, slots: dict[str, int]) -> None:
        self._grow(slots)
        self.log.append(slots["first"])

    def replay(self) -> None:
        """The oracle does the same in the same order, and is what the pool is."""
        for entry in self.log:
            if isinstance(entry, int):
                extend(self.model, "first", 1)
            else:
                self.model.oracles["first"].plan(entry, TOP_K)
        oracle, totals = self.model.oracles["first"], self.model.pool.totals("first")
        assert self.model.pool.residents()["first"] == oracle.residents()
        assert (totals.steps, totals.hits, totals.misses) == (75, oracle.hits, oracle.misses)

    def run(self, owner: str, count: int) -> None:
        ids = Buffer.allocate((ROWS, TOP_K), "int32", driver=self.model.driver)
        draw, admission = random.Random(owner), None
        while count:
            with self.ownership.held(owner, ["first"], wait_seconds=SOON) as lease:
                if not isinstance(self.ownership.begin(lease), Transaction):
                    continue  # another thread steps
                if admission is None or admission.serial != self.model.pool.serial:
                    self.stale += admission is not None
                    admission = SlotAdmission(self.model.pool, "first", ids)
                chosen = [draw.randrange(EXPERTS) for _ in range(ROWS * TOP_K)]
                ids.write([chosen[:TOP_K], chosen[TOP_K:]])
                admission.launch()
                assert admission.outcome().is_ok
                self.log.append(chosen)
                slots = admission.outputs["route_slots"].read().reshape(-1).tolist()
                self._check(chosen, slots)
                count -= 1

    def _check(self, chosen: list[int], slots: list[int]) -> None:
        for bank, rows in self.model.pool["first"].rows.items():
            held, experts = rows.read(), self.model.experts["first"][bank]
            for expert, slot in zip(chosen, slots, strict=True):
                assert held[slot].tobytes() == experts[expert].tobytes(), (bank, expert)


def test_threads_step_while_the_pool_grows_and_no_step_is_lost_or_wrong(graphcore_driver):
    model, ownership = owned(graphcore_driver)
    stepping = Stepping(model, ownership)
    errors: list[BaseException] = []

    def run(owner: str) -> None:
        try:
            stepping.run(owner, 25)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f"thread {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for slots in range(SLOTS + 1, EXPERTS + 1):
        done = len(stepping.log)
        until(lambda done=done: len(stepping.log) > done or bool(errors)
              or not any(thread.is_alive() for thread in threads))  # fmt: skip
        with in_thread(lambda slots=slots: model.pool.grow({"first": slots})) as grown:
            pass
        assert grown == [None]
    for thread in threads:
        thread.join(SOON)
    assert not errors
    assert stepping.stale
    assert [entry for entry in stepping.log if isinstance(entry, int)] == [6, 7, 8, 9, 10]
    stepping.replay()
    model.check_rows()


def test_a_step_between_growths_is_what_the_oracle_says(graphcore_driver):
    model, _ = owned(graphcore_driver)
    for slots in range(SLOTS, EXPERTS):
        steps(model, 4, seed=slots)
        model.pool.grow(slots + 1)
        for name in GROUPS:
            extend(model, name, 1)
        model.admit()
    steps(model, 6, seed=0)


def test_ctrl_c_anywhere_in_growth_leaves_the_old_pool_or_the_new_one():
    sizes = set()
    for number in itertools.count(1):
        model, ownership = owned(EmulatedDriver(), ["first"])
        steps(model, 2, seed=5)
        _, where = press_at(
            number, lambda m=model: m.pool.grow({"first": SLOTS + 2}),
            ["moe/slots/slot_pool.py", "moe/slots/slot_group.py"],
        )  # fmt: skip
        if where is None:
            break
        slots, generation = model.pool["first"].slots, model.pool.generation
        assert (slots, generation) in {(SLOTS, 0), (SLOTS + 2, 1)}, where
        assert not ownership.is_changing(), where
        sizes.add(slots)
        if slots != SLOTS:
            extend(model, "first", 2)
        model.admit()
        steps(model, 1, seed=6)
    assert sizes == {SLOTS, SLOTS + 2}
