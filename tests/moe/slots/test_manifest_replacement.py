"""Manifests and the slots of their groups replaced while steps run: nobody sees half of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy
import pytest
from helpers import moe_steps
from helpers.every_fault import each_fault
from helpers.slot_pools import pinned_experts
from helpers.threads import SOON, in_thread, until

import graphcore
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError, StaleGraphError
from graphcore.moe import (
    ExpertBank,
    ExpertGroup,
    Kind,
    Layout,
    Lease,
    Location,
    Manifest,
    ManifestRegistry,
    PublicationCode,
    Role,
    SlotAdmission,
    SlotPool,
    manifest_of,
    replace_manifest,
)
from graphcore.moe.manifests.ownership import Admission, Transaction
from graphcore.resources.buffer import Buffer
from graphcore.testing import inject

EXPERTS, SLOTS, ROWS, TOP_K, INNER, HIDDEN = 6, 4, 2, 2, 8, 4
LAYERS = ("layers.0", "layers.1")
ROW_BYTES = 4 * 2 * INNER * HIDDEN


class Weights:
    """One set of experts of every layer, in pinned memory."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.refs, self.values = {}, {}
        for at, layer in enumerate(LAYERS):
            for role, shape in ((Role.UP, (INNER, HIDDEN)), (Role.DOWN, (HIDDEN, INNER))):
                name = f"{layer}.{role.value}"
                made = pinned_experts(
                    driver, EXPERTS, *shape, seed=100 * seed + 10 * at + len(name)
                )
                self.refs[name], self.values[name] = made

    @property
    def owners(self) -> dict[str, object]:
        return {name: ref.owner for name, ref in self.refs.items()}

    def group(self, layer: str, slots: int = SLOTS) -> ExpertGroup:
        banks = tuple(
            ExpertBank(name, role, "float32", self.refs[name].shape, self.refs[name].address,
                       self.refs[name].nbytes)
            for role in (Role.UP, Role.DOWN)
            for name in [f"{layer}.{role.value}"]
        )  # fmt: skip
        return ExpertGroup(layer, Layout.UNGATED, banks, EXPERTS, slots, TOP_K)


class Scene:
    """A registry, a pool, and two sets of weights."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.old, self.new = Weights(driver, 1), Weights(driver, 2)
        self.registry = ManifestRegistry()
        self.manifest = self.manifest_with()
        self.pool = SlotPool.of_manifest(self.manifest.groups, self.old.owners, driver=driver)
        assert self.registry.replace(self.manifest).is_accepted
        self.ids = Buffer.allocate((ROWS, TOP_K), "int32", driver=driver)

    def manifest_with(self, **weights: Weights) -> Manifest:
        """The manifest in which layers have the old weights, or those that are named: ``l1=``."""
        return Manifest(tuple(weights.get(f"l{at}", self.old).group(layer)
                              for at, layer in enumerate(LAYERS)))  # fmt: skip

    def replace(self, manifest: Manifest, *weights: Weights, **more: Any) -> Any:
        owners = {
            bank.name: each.owners[bank.name]
            for each in weights
            for _, bank in manifest.banks()
            if each.refs[bank.name].address == bank.address
        }
        return replace_manifest(self.registry, self.pool, manifest, owners, **more)

    def step(self, layer: str, weights: Weights, seed: int = 0) -> SlotAdmission:
        """One admission over a layer, whose slots hold these weights afterwards."""
        admission = SlotAdmission(self.pool, layer, self.ids)
        chosen = random.Random(seed).choices(range(EXPERTS), k=ROWS * TOP_K)
        self.ids.write(numpy.reshape(chosen, (ROWS, TOP_K)))
        admission.launch()
        slots = admission.outputs["route_slots"].read().reshape(-1).tolist()
        self.check_slots(layer, weights, zip(chosen, slots, strict=True))
        return admission

    def check_slots(self, layer: str, weights: Weights, pairs: Iterable[tuple[int, int]]) -> None:
        pairs = list(pairs)
        for bank, rows in self.pool[layer].rows.items():
            held = rows.read()
            for expert, slot in pairs:
                assert held[slot].tobytes() == weights.values[bank][expert].tobytes(), bank

    def residents_are_of(self, layer: str, weights: Weights) -> None:
        self.check_slots(layer, weights, self.pool.residents()[layer].items())


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    made = Scene(graphcore_driver)
    for layer in LAYERS:
        for seed in range(3):
            made.step(layer, made.old, seed)
    return made


def test_layers_with_other_weights_begin_empty_and_the_others_keep_who_is_resident(scene):
    pool, before = scene.pool, scene.pool.residents()
    pool.pin(LAYERS[0], [2])
    pool.pin(LAYERS[1], [3])
    rows = {layer: pool[layer].rows for layer in LAYERS}
    serial, generation = pool.serial, pool.generation
    publication = scene.replace(scene.manifest_with(l1=scene.new), scene.new)
    assert (publication.code, publication.generation) == (PublicationCode.ACCEPTED, 2)
    assert pool.residents() == {LAYERS[0]: before[LAYERS[0]], LAYERS[1]: {}}
    assert pool[LAYERS[0]].rows is rows[LAYERS[0]]
    assert all(each.is_closed for each in rows[LAYERS[1]].values())
    assert pool.serial > serial
    assert pool.generation == generation + 1
    # pins go with the experts that they were of
    assert pool.state(LAYERS[0]).words["pinned"][2] == 1
    assert not any(pool.state(LAYERS[1]).words["pinned"])
    with pytest.raises(LifecycleError, match=r"expert 3 of group layers\.1 is not pinned"):
        pool.unpin(LAYERS[1], [3])
    pool.unpin(LAYERS[0], [2])
    scene.step(LAYERS[0], scene.old, 4)
    scene.step(LAYERS[1], scene.new, 4)
    scene.residents_are_of(LAYERS[0], scene.old)
    scene.residents_are_of(LAYERS[1], scene.new)


def test_a_manifest_that_says_the_same_changes_no_slot(scene):
    before, serial = scene.pool.residents(), scene.pool.serial
    assert scene.replace(scene.manifest).is_accepted
    assert (scene.pool.residents(), scene.pool.serial) == (before, serial)
    assert scene.registry.current.generation == 2


def test_other_memory_at_the_same_address_is_other_experts(scene):
    # the owner says so, where an address cannot
    owners = {**scene.old.owners, f"{LAYERS[0]}.up": object()}
    assert replace_manifest(scene.registry, scene.pool, scene.manifest, owners).is_accepted
    residents = scene.pool.residents()
    assert residents[LAYERS[0]] == {}
    assert residents[LAYERS[1]]


def test_another_number_of_slots_is_another_group(scene):
    groups = (scene.old.group(LAYERS[0], slots=5), scene.old.group(LAYERS[1]))
    assert scene.replace(Manifest(groups), scene.old).is_accepted
    assert [scene.pool[layer].slots for layer in LAYERS] == [5, SLOTS]
    assert scene.pool.residents()[LAYERS[0]] == {}
    scene.step(LAYERS[0], scene.old)


def test_an_adapted_layer_leaves_the_slots_and_comes_back_empty(scene):
    before = scene.pool.residents()[LAYERS[0]]
    adapted = scene.manifest.adapted("lora", [f"{LAYERS[1]}.down"])
    assert scene.replace(adapted).is_accepted
    assert list(scene.pool) == [LAYERS[0]]
    assert scene.pool.residents() == {LAYERS[0]: before}
    with pytest.raises(ConfigurationError, match="expected one of"):
        SlotAdmission(scene.pool, LAYERS[1], scene.ids)
    scene.step(LAYERS[0], scene.old, 5)
    assert scene.replace(scene.manifest, scene.old).is_accepted
    assert list(scene.pool) == list(LAYERS)
    assert scene.pool.residents()[LAYERS[1]] == {}
    scene.step(LAYERS[1], scene.old, 6)


def test_adapters_on_every_layer_leave_a_pool_without_groups(scene):
    names = [f"{layer}.up" for layer in LAYERS]
    assert scene.replace(scene.manifest.adapted("lora", names)).is_accepted
    assert len(scene.pool) == scene.pool.nbytes == 0
    assert scene.replace(scene.manifest, scene.old).is_accepted
    scene.step(LAYERS[0], scene.old)


def test_layers_in_pageable_memory_or_without_slots_have_no_place(scene):
    first, second = scene.manifest.groups
    pageable = replace(first, banks=tuple(replace(bank, location=Location.PAGEABLE)
                                          for bank in first.banks))  # fmt: skip
    assert scene.replace(Manifest((pageable, replace(second, slots=0)))).is_accepted
    assert len(scene.pool) == 0


def test_a_pool_of_short_names_keeps_them(graphcore_driver):
    weights = Weights(graphcore_driver, 3)
    banks = {layer: {name: weights.refs[f"{layer}.{name}"] for name in ("up", "down")}
             for layer in LAYERS}  # fmt: skip
    pool, registry = SlotPool(banks, SLOTS, driver=graphcore_driver), ManifestRegistry()
    manifest = manifest_of(pool, top_k=TOP_K)
    assert registry.replace(manifest).is_accepted
    ids = Buffer.allocate((ROWS, TOP_K), "int32", driver=graphcore_driver)
    ids.write([[0, 1], [2, 3]])
    for layer in LAYERS:
        SlotAdmission(pool, layer, ids).launch()
    adapted = manifest.adapted("lora", [f"{LAYERS[1]}.down"])
    assert replace_manifest(registry, pool, adapted, {}).is_accepted
    assert len(pool.residents()[LAYERS[0]]) == 4
    assert replace_manifest(registry, pool, manifest, weights.owners).is_accepted
    assert list(pool[LAYERS[0]].rows) == ["up", "down"]


# ---- who uses them ------------------------------------------------------------------------------


def test_the_old_slots_serve_whoever_has_a_lease_to_the_end(scene):
    ownership = scene.registry.ownership
    lease = ownership.lease("a step")
    assert isinstance(lease, Lease)
    rows = scene.pool[LAYERS[1]].rows[f"{LAYERS[1]}.up"]
    with in_thread(lambda: scene.replace(scene.manifest_with(l1=scene.new), scene.new)) as done:
        until(lambda: ownership.admission is Admission.REPLACING)
        assert isinstance(ownership.begin(lease), Transaction)
        scene.step(LAYERS[1], scene.old, 7)
        assert not rows.is_closed
        assert not done
        ownership.release(lease)
    assert done[0].is_accepted
    assert rows.is_closed
    assert not isinstance(ownership.begin(lease), Transaction)
    scene.step(LAYERS[1], scene.new, 8)


def test_users_that_stay_leave_everything_as_it_was(scene):
    before, serial = scene.pool.residents(), scene.pool.serial
    with in_thread(lambda: scene.registry.ownership.lease("stays")) as given:
        pass
    publication = scene.replace(scene.manifest_with(l0=scene.new), scene.new, timeout=0.01)
    assert (publication.code, publication.generation) == (PublicationCode.BUSY, 1)
    assert (scene.pool.residents(), scene.pool.serial) == (before, serial)
    scene.registry.ownership.release(given[0])
    assert scene.replace(scene.manifest_with(l0=scene.new), scene.new, timeout=0.01).is_accepted


def test_threads_step_while_manifests_are_replaced_and_each_uses_the_weights_of_its_lease(scene):
    """Each step looks up manifest, slots and weights under one lease, and none sees a mixture."""
    by_address = {weights.refs[f"{LAYERS[0]}.up"].address: weights
                  for weights in (scene.old, scene.new)}  # fmt: skip
    ownership, errors = scene.registry.ownership, []
    seen: list[int] = []

    def steps(owner: str, count: int) -> None:
        ids = Buffer.allocate((ROWS, TOP_K), "int32", driver=scene.driver)
        draw = random.Random(owner)
        while count:
            with ownership.held(owner, wait_seconds=SOON) as lease:
                if not isinstance(ownership.begin(lease), Transaction):
                    continue
                manifest, generation = scene.registry.current
                assert generation == lease.generation
                bank = manifest.groups[0].banks[0]
                admission = SlotAdmission(scene.pool, LAYERS[0], ids)
                chosen = [draw.randrange(EXPERTS) for _ in range(ROWS * TOP_K)]
                ids.write(numpy.reshape(chosen, (ROWS, TOP_K)))
                admission.launch()
                slots = admission.outputs["route_slots"].read().reshape(-1).tolist()
                pairs = zip(chosen, slots, strict=True)
                scene.check_slots(LAYERS[0], by_address[bank.address], pairs)
                seen.append(generation)
                count -= 1

    def run(owner: str) -> None:
        try:
            steps(owner, 20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f"thread {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(12):
        weights = scene.new if turn % 2 == 0 else scene.old
        with in_thread(lambda w=weights: scene.replace(scene.manifest_with(l0=w), w)) as done:
            pass
        assert done[0].is_accepted
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
    assert not errors
    assert len(seen) == 60
    assert len(set(seen)) > 1
    assert scene.registry.current.generation == 13
    scene.residents_are_of(LAYERS[1], scene.old)


def test_graphs_of_before_refuse_where_their_slots_have_gone(scene):
    def captured(layer: str) -> Any:
        admission = SlotAdmission(scene.pool, layer, scene.ids)
        with graphcore.capture(driver=scene.driver) as capture:
            admission.launch()
        return capture.graph.instantiate(guard="owners")

    stays, goes = captured(LAYERS[0]), captured(LAYERS[1])
    for made in (stays, goes):
        made.launch()
    scene.driver.synchronize()
    assert scene.replace(scene.manifest_with(l1=scene.new), scene.new).is_accepted
    with pytest.raises(StaleGraphError):
        goes.launch()
    stays.launch()
    scene.driver.synchronize()
    scene.residents_are_of(LAYERS[0], scene.old)


def test_a_replacement_inside_a_capture_is_refused(scene):
    capture = graphcore.capture(driver=scene.driver)
    with pytest.raises(CaptureError, match="replace_manifest: not while"), capture:
        scene.replace(scene.manifest)
    assert scene.registry.current.generation == 1


def test_new_weights_without_an_owner_change_nothing_but_the_generation(scene):
    before = scene.pool.residents()
    with pytest.raises(ConfigurationError, match=r"one of bank layers\.1\.up, got none"):
        scene.replace(scene.manifest_with(l1=scene.new))
    assert scene.pool.residents() == before
    assert scene.registry.current == (scene.manifest, 2)
    scene.step(LAYERS[1], scene.old, 9)


def test_steps_go_on_through_graphs_with_the_weights_of_the_new_manifest(graphcore_driver):
    scene = moe_steps.Scene(graphcore_driver)
    lane, layer = scene.lane(), moe_steps.LAYERS[1]
    assert lane.kinds(3) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]
    before = scene.pool.residents()[moe_steps.LAYERS[0]]
    banks = {bank.name: bank for bank in scene.manifest.group(layer).banks}
    refs = {
        name: pinned_experts(graphcore_driver, *bank.shape, seed=50 + at)[0]
        for at, (name, bank) in enumerate(banks.items())
    }
    manifest = scene.manifest.with_banks(
        {name: replace(banks[name], address=ref.address) for name, ref in refs.items()}
    )
    owners = {name: ref.owner for name, ref in refs.items()}
    assert replace_manifest(scene.manifests, scene.pool, manifest, owners).is_accepted
    assert scene.pool.residents()[moe_steps.LAYERS[0]] == before
    # whoever has admissions of before makes others; the step is the same one
    everything = SlotPool({name: scene.pool[name].sources for name in moe_steps.LAYERS},
                          moe_steps.EXPERTS, driver=graphcore_driver)  # fmt: skip
    given = lane.rows, lane.x, lane.ids, lane.weights
    lane.layers = moe_steps.Layers(scene.pool, *given)
    lane._expected = moe_steps.Layers(everything, *given)
    lane.step.set_groups(lane.uses())
    scene.reuse.certify(lane.step)  # its products multiply by other weights
    results = [lane.run() for _ in range(4)]
    assert Kind.REPLAY not in [result.kind for result in results[:2]], results
    assert results[-1].kind is Kind.REPLAY, results


# ---- no memory ----------------------------------------------------------------------------------


def test_where_both_do_not_fit_the_old_slots_go_first():
    driver = EmulatedDriver(total_memory=24 * 1024)
    scene = Scene(driver)
    scene.step(LAYERS[1], scene.old)
    filler = Buffer.allocate(driver.memory_info()[0] - 512, "uint8", driver=driver)
    assert scene.replace(scene.manifest_with(l1=scene.new), scene.new).is_accepted
    filler.close()
    scene.step(LAYERS[1], scene.new, 3)


@pytest.mark.parametrize("refused", [1, 2], ids=["beside the old", "in their place too"])
def test_a_driver_without_memory_leaves_slots_that_work(refused):
    scene = Scene(EmulatedDriver())
    for layer in LAYERS:
        scene.step(layer, scene.old)
    first = scene.pool.residents()[LAYERS[0]]
    with inject(scene.driver, "alloc", code="OUT_OF_MEMORY", count=refused):
        publication = scene.replace(scene.manifest_with(l1=scene.new), scene.new)
    is_accepted = refused == 1
    assert publication.is_accepted is is_accepted
    manifest, generation = scene.registry.current
    assert generation == 2
    assert (manifest is scene.manifest) is not is_accepted
    assert scene.pool.residents() == {LAYERS[0]: first, LAYERS[1]: {}}
    scene.step(LAYERS[1], scene.new if is_accepted else scene.old, 3)
    scene.step(LAYERS[0], scene.old, 3)


def test_where_not_even_the_old_slots_find_memory_again_the_others_go_on():
    scene = Scene(EmulatedDriver())
    scene.step(LAYERS[0], scene.old)
    with inject(scene.driver, "alloc", code="OUT_OF_MEMORY", count=3):
        publication = scene.replace(scene.manifest_with(l1=scene.new), scene.new)
    assert publication.code is PublicationCode.ERROR
    assert list(scene.pool) == [LAYERS[0]]
    scene.step(LAYERS[0], scene.old, 2)
    assert scene.replace(scene.manifest, scene.old).is_accepted
    scene.step(LAYERS[1], scene.old, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_a_fault_at_any_call_manifest_and_slots_agree():
    def prepare(driver: Driver) -> Scene:
        scene = Scene(driver)
        for layer in LAYERS:
            scene.step(layer, scene.old)
        return scene

    def operate(scene: Scene) -> None:
        scene.publication = scene.replace(scene.manifest_with(l1=scene.new), scene.new)

    seen = set()
    for _, fault in each_fault(prepare, operate):
        scene = fault.state
        # what cannot be given back is told in a warning, and nothing else
        assert fault.error is None, fault.where
        assert scene.registry.current.generation == 2, fault.where
        weights = scene.new if scene.publication.is_accepted else scene.old
        scene.residents_are_of(LAYERS[0], scene.old)
        scene.residents_are_of(LAYERS[1], weights)
        for seed in range(3):
            scene.step(LAYERS[0], scene.old, seed)
            scene.step(LAYERS[1], weights, seed)
        seen.add(fault.where.split()[0])
    assert {"alloc", "write"} <= seen
