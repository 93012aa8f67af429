"""Pools of slots: rows and tables at fixed addresses, pins, growth, faults, and their end."""

from __future__ import annotations

import random

import numpy
import pytest
from graphcore_kernels.route_layout import table_shapes
from helpers.every_fault import each_fault
from helpers.isolated import run_script
from helpers.slot_pools import BANKS, EXPERTS, SLOTS, Model, pinned_experts

import graphcore
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import (
    CacheTypeError,
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
)
from graphcore.moe import BankStatus, ExpertBank, ExpertGroup, Layout, Location, Role, SlotPool


@pytest.fixture
def model(graphcore_driver: Driver) -> Model:
    return Model(graphcore_driver)


def run(model: Model, steps: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    for _ in range(steps):
        chosen = model.choose(draw)
        model.launch()
        model.check(chosen)


def test_a_new_pool_has_no_residents_and_all_of_its_tensors_have_names(model):
    assert model.pool.residents() == {"first": {}, "second": {}}
    names = set(model.pool.named_tensors())
    tables = table_shapes(EXPERTS, SLOTS)
    assert names == {f"{group}.{each}" for group in ("first", "second")
                     for each in (*tables, *BANKS)}  # fmt: skip
    for name, (dtype, shape) in tables.items():
        tensor = model.pool.named_tensors()[f"first.{name}"]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert tensor.address % 16 == 0


def test_bytes_are_those_of_rows_and_tables(model):
    row = sum(4 * int(numpy.prod(shape)) for shape in BANKS.values())
    group = model.pool["first"]
    assert group.expert_nbytes == row
    assert group.nbytes == SLOTS * row + group.tables.nbytes
    assert model.pool.nbytes == 2 * group.nbytes


def test_bytes_that_were_copied_are_those_of_the_misses(model):
    run(model, 7)
    row = sum(4 * int(numpy.prod(shape)) for shape in BANKS.values())
    for name, oracle in model.oracles.items():
        assert model.pool.copied_nbytes(name) == oracle.misses * row > 0


def test_addresses_stay_through_steps_and_a_reset(model):
    before = {name: tensor.address for name, tensor in model.pool.named_tensors().items()}
    serial = model.pool.serial
    run(model, 5)
    model.pool.pin("first", [3])
    model.pool.reset()
    assert {name: tensor.address for name, tensor in model.pool.named_tensors().items()} == before
    assert model.pool.serial == serial
    assert model.pool.residents() == {"first": {}, "second": {}}
    assert model.pool.state("first").words["pinned"][3] == 1


def test_a_reset_of_one_group_leaves_the_others(model):
    run(model, 3)
    second = model.pool.residents()["second"]
    model.pool.reset("first")
    assert model.pool.residents() == {"first": {}, "second": second}


def test_growth_keeps_residents_and_changes_serial_and_addresses(model):
    run(model, 8)
    residents, serial = model.pool.residents(), model.pool.serial
    old = model.pool["first"]
    model.pool.grow({"first": SLOTS + 2})
    assert model.pool.serial > serial
    assert model.pool.generation == 1
    assert model.pool.residents() == residents
    assert model.pool["first"].slots == SLOTS + 2
    assert model.pool["second"].slots == SLOTS
    assert old.rows["down"].is_closed
    assert old.tables.tensors["clock"].is_closed
    model.check_rows()
    oracle = model.oracles["first"]
    for name, fresh in (("expert_for_slot", -1), ("last_used", 0), ("frequency", 0),
                        ("frequency_epoch", 0)):  # fmt: skip
        getattr(oracle, name).extend([fresh] * 2)
    model.admit()
    run(model, 12, seed=2)


def test_growth_to_the_same_size_is_nothing(model):
    serial = model.pool.serial
    model.pool.grow(SLOTS)
    assert (model.pool.serial, model.pool.generation) == (serial, 0)


def test_serials_are_given_once(graphcore_driver):
    first = Model(graphcore_driver, ["a"]).pool
    second = Model(graphcore_driver, ["a"]).pool
    serials = [first.serial, second.serial]
    first.grow(SLOTS + 1)
    assert first.serial == serials[1] + 1 > serials[0]


def test_a_guarded_executable_over_rows_of_before_growth_refuses(graphcore_driver):
    model = Model(graphcore_driver, ["layer"])
    model.choose(random.Random(1))
    with graphcore.capture(driver=graphcore_driver) as captured:
        model.launch()
    with captured.graph as graph, graph.instantiate(guard="owners") as made:
        made.launch()
        graphcore_driver.synchronize()
        model.pool.grow(SLOTS + 1)
        with pytest.raises(graphcore.StaleGraphError):
            made.launch()


def test_pins_are_counted(model):
    pool = model.pool
    pool.pin("first", [1, 1, 4])
    pool.unpin("first", [1, 4])
    assert pool.state("first").words["pinned"] == [0, 1] + [0] * (EXPERTS - 2)
    pool.unpin("first", [1])
    assert not any(pool.state("first").words["pinned"])
    with pytest.raises(LifecycleError, match="expert 1 of group first is not pinned"):
        pool.unpin("first", [1])
    with pytest.raises(ConfigurationError, match="expected 0 to 9, got 10"):
        pool.pin("first", [0, EXPERTS])
    assert not any(pool.state("first").words["pinned"])


def test_a_closed_pool_says_so(model):
    assert "first: 5 of 10" in repr(model.pool)
    with model.pool as pool:
        rows = pool["first"].rows["down"]
    pool.close()
    assert pool.is_closed
    assert rows.is_closed
    assert repr(pool) == "<SlotPool closed>"
    with pytest.raises(LifecycleError, match="closed"):
        pool.residents()


def test_a_pool_is_a_collection_of_its_groups(model):
    assert list(model.pool) == ["first", "second"]
    assert len(model.pool) == 2
    with pytest.raises(ConfigurationError, match="expected one of"):
        model.pool["third"]


@pytest.mark.parametrize(
    "action",
    [
        lambda pool: pool.residents(),
        lambda pool: pool.pin("first", [0]),
        lambda pool: pool.reset(),
        lambda pool: pool.grow(SLOTS + 1),
        lambda pool: SlotPool({"a": {"b": numpy.zeros((2, 2))}}, 1, driver=pool.driver),
    ],
    ids=["residents", "pin", "reset", "grow", "make"],
)
def test_the_host_touches_slots_outside_of_captures_only(model, action):
    serial = model.pool.serial
    with (
        pytest.raises(CaptureError, match="not while a graph is captured"),
        graphcore.capture(driver=model.driver),
    ):
        action(model.pool)
    assert model.pool.serial == serial
    run(model, 2)


# ---- what cannot be -----------------------------------------------------------------------------


def experts(*shape: int) -> numpy.ndarray:
    return numpy.zeros(shape, numpy.float32)


@pytest.mark.parametrize(
    ("groups", "slots", "says"),
    [
        ({}, 1, "at least one"),
        ({"a": {}}, 1, "one number of experts"),
        ({"a": {"x": experts(4, 2), "y": experts(5, 2)}}, 1, "'x': 4, 'y': 5"),
        ({"a": {"x": experts()}}, 1, "'x': None"),
        ({"a": {"x": experts(4, 2)}}, 0, "expected 1 to 4 slots for group a, got 0"),
        ({"a": {"x": experts(4, 2)}}, 5, "got 5"),
        ({"a": {"x": experts(4, 2)}}, True, "got True"),
        ({"a": {"x": experts(4, 2)}}, {}, "got None"),
        ({"a": {"x": experts(4, 2)}}, {"a": 1, "b": 1}, r"names of groups, got \['b'\]"),
        ({"a": {"x": experts(2, 4).T}}, 1, "expected rows"),
    ],
    ids=["no group", "no bank", "counts", "no axis", "none", "too many", "a bool", "missing",
         "unknown", "strided rows"],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(groups, slots, says):
    with pytest.raises(ConfigurationError, match=says):
        SlotPool(groups, slots, driver=EmulatedDriver())


def test_what_is_no_tensor_or_no_driver_is_refused():
    with pytest.raises(CacheTypeError, match=r"a\.x"):
        SlotPool({"a": {"x": [1, 2]}}, 1, driver=EmulatedDriver())
    with pytest.raises(ConfigurationError, match="driver"):
        SlotPool({"a": {"x": experts(4, 2)}}, 1, driver="emulated")


def test_slots_never_shrink(model):
    with pytest.raises(ConfigurationError, match="expected 5 to 10 slots for group first, got 4"):
        model.pool.grow({"first": SLOTS - 1})


# ---- of a manifest ------------------------------------------------------------------------------


def group_of(driver: Driver, **more) -> tuple[ExpertGroup, dict[str, object]]:
    up, _ = pinned_experts(driver, 4, 6, 8, seed=1)
    down, _ = pinned_experts(driver, 4, 8, 6, seed=2)
    banks = tuple(
        ExpertBank(role.value, role, "float32", ref.shape, ref.address, ref.nbytes, **more)
        for role, ref in ((Role.UP, up), (Role.DOWN, down))
    )
    owners = {"up": up.owner, "down": down.owner}
    return ExpertGroup("layer", Layout.UNGATED, banks, 4, 2, 1), owners


def test_a_pool_of_a_manifest_has_its_groups_that_have_slots(graphcore_driver):
    group, owners = group_of(graphcore_driver, expert_stride=192)
    bare = ExpertGroup("bare", Layout.UNGATED, (), 4, 0, 1)
    pool = SlotPool.of_manifest([group, bare], owners, driver=graphcore_driver)
    assert list(pool) == ["layer"]
    assert pool["layer"].rows["down"].shape == (2, 8, 6)
    assert pool["layer"].sources["up"].owner is owners["up"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"location": Location.PAGEABLE}, "pageable"),
        ({"status": BankStatus.ADAPTED}, "LoRA"),
        ({"expert_stride": 193}, "whole elements"),
    ],
    ids=["pageable", "adapted", "odd stride"],
)
def test_a_bank_that_slots_cannot_serve_is_refused(more, says):
    driver = EmulatedDriver()
    group, owners = group_of(driver, **more)
    with pytest.raises(ConfigurationError, match=says):
        SlotPool.of_manifest([group], owners, driver=driver)


def test_a_bank_without_an_owner_is_refused():
    driver = EmulatedDriver()
    group, owners = group_of(driver)
    with pytest.raises(ConfigurationError, match="bank down"):
        SlotPool.of_manifest([group], {"up": owners["up"]}, driver=driver)


# ---- faults -------------------------------------------------------------------------------------


def test_a_fault_at_any_call_of_making_a_pool_leaves_nothing():
    def prepare(driver):
        source, _ = pinned_experts(driver, 4, 8)
        return {"driver": driver, "source": source}

    def operate(state):
        banks = {"x": state["source"]}
        state["pool"] = SlotPool({"a": banks, "b": banks}, 2, driver=state["driver"])

    count = 0
    for driver, fault in each_fault(prepare, operate):
        assert isinstance(fault.error, CudaError), fault.where
        assert fault.leaves_nothing(driver), fault.where
        count += 1
    assert count >= 5


def warmed_up(driver: Driver) -> Model:
    model = Model(driver)
    run(model, 4)
    return model


@pytest.mark.parametrize(
    "operate",
    [
        lambda model: model.pool.grow(SLOTS + 2),
        lambda model: model.pool.reset(),
        lambda model: model.pool.pin("second", [1, 2]),
        lambda model: model.pool.close_admission("second"),
        lambda model: model.pool.residents(),
    ],
    ids=["grow", "reset", "pin", "close admission", "residents"],
)
def test_a_fault_at_any_call_leaves_the_pool_usable(operate):
    count = 0
    for _, fault in each_fault(warmed_up, operate):
        model = fault.state
        assert isinstance(fault.error, CudaError), fault.where
        assert model.pool.generation == 0
        assert not model.pool._pins["second"]
        model.pool.reset()
        for name, oracle in model.oracles.items():
            model.oracles[name] = type(oracle)(EXPERTS, SLOTS)
        run(model, 4, seed=5)
        count += 1
    assert count >= 1


def test_a_fault_of_growth_leaves_residents_addresses_and_no_memory():
    for driver, fault in each_fault(warmed_up, lambda model: model.pool.grow(SLOTS + 2)):
        model = fault.state
        assert fault.leaves_nothing(driver), fault.where
        run(model, 4, seed=6)  # the oracle goes on too


def test_a_pool_works_without_torch():
    script = """
import sys
sys.modules["torch"] = None
import numpy
from graphcore import open_driver
from graphcore.moe import SlotAdmission, SlotPool
driver = open_driver("emulated")
pool = SlotPool({"a": {"x": numpy.ones((4, 8), "float32")}}, 2, driver=driver)
admission = SlotAdmission(pool, "a", numpy.array([[3], [1]], "int32"))
admission.launch()
print(pool.residents(), admission.outcome().reason)
"""
    done = run_script(script)
    assert done.stdout.strip() == "{'a': {1: 1, 3: 0}} every route has a slot", done.stderr
