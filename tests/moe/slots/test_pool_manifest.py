"""The manifest of a pool, its banks as steps find them, and the kernels that serve them."""

from __future__ import annotations

import pytest
from helpers.moe_steps import EXPERTS, HIDDEN, INTER, LAYERS, ROWS, SLOTS, TOP_K, Scene
from helpers.slot_pools import pinned_experts

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import ConfigurationError
from graphcore.moe import (
    Layout,
    Location,
    Phase,
    Role,
    RowSemantics,
    SlotPool,
    examine,
    manifest_of,
)
from graphcore.moe.slots.pool_bank import banks_of, role_of
from graphcore.moe.steps.sighting import capability_of


def test_a_pool_whose_banks_are_called_by_their_roles_makes_its_manifest(
    graphcore_driver: Driver,
) -> None:
    scene = Scene(graphcore_driver)
    made = manifest_of(scene.pool, top_k=TOP_K)
    assert examine(made) == ()
    assert [group.name for group in made.groups] == list(LAYERS)
    group = made.groups[0]
    assert (group.layout, group.experts, group.slots, group.top_k) == (
        Layout.FUSED, EXPERTS, SLOTS, TOP_K,
    )  # fmt: skip
    assert [(bank.name, bank.role) for bank in group.banks] == [
        ("layers.0.gate_up", Role.GATE_UP), ("layers.0.down", Role.DOWN),
    ]  # fmt: skip
    for bank in group.banks:
        assert bank.location is Location.PINNED
        assert bank.nbytes == 4 * EXPERTS * bank.shape[1] * bank.shape[2]
    assert manifest_of(scene.pool, top_k=dict.fromkeys(LAYERS, TOP_K)) == made


def test_roles_are_told_by_names() -> None:
    assert role_of("gate_up") is Role.GATE_UP
    assert role_of("down_scale") is Role.DOWN_SCALE
    assert role_of("up_bias") is Role.UP_BIAS
    assert role_of("scale") is None
    assert role_of("w1") is None


WRONG = {
    "a bank of no role": ({"w1": (4, 4), "down": (4, 4)}, "expected the name of a role"),
    "no layout": ({"gate": (4, 4), "down": (4, 4)}, "expected banks fused gate_up, down"),
}


@pytest.mark.parametrize(("banks", "words"), WRONG.values(), ids=WRONG)
def test_a_pool_that_makes_no_manifest_is_refused(banks, words):
    driver = EmulatedDriver()
    made = {bank: pinned_experts(driver, 2, *row)[0] for bank, row in banks.items()}
    pool = SlotPool({"layer": made}, 2, driver=driver)
    with pytest.raises(ConfigurationError, match=words):
        manifest_of(pool, top_k=1)
    with pytest.raises(ConfigurationError, match="top_k"):
        manifest_of(pool, top_k={"another": 1})


def test_banks_are_found_in_the_pool_else_in_the_manifest() -> None:
    scene = Scene(EmulatedDriver())
    group = scene.manifest.groups[0]
    in_pool = banks_of(group.name, scene.pool[group.name], group)
    in_manifest = banks_of(group.name, None, group)
    assert [bank.weights for bank in in_pool] == [bank.weights for bank in in_manifest]
    rows = in_pool[0].rows
    assert rows is not None
    assert in_pool[0].has_rows_at(rows.address, rows.address + 1)
    assert not in_pool[0].has_rows_at(rows.address - 4, rows.address)
    assert not in_manifest[0].has_rows_at(rows.address, rows.address + 1)
    with pytest.raises(ConfigurationError, match="'other'"):
        banks_of("other", None, None)


def test_a_capability_says_all_by_which_its_kernel_is_chosen(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    lane, group = scene.lane(), scene.manifest.groups[0]
    use = lane.uses()[0]
    bank = banks_of(group.name, scene.pool[group.name], group)[0]
    claim = scene.reuse.certificate(lane.step)
    device = graphcore_driver.device_info()
    found = capability_of(use, bank, group, Phase.DECODE, claim, device)
    assert found is not None
    assert (found.role, found.phase, found.row_semantics) == (
        Role.GATE_UP, Phase.DECODE, RowSemantics.INDEPENDENT,
    )  # fmt: skip
    assert (found.tokens, found.routes, found.top_k) == (ROWS, ROWS * TOP_K, TOP_K)
    assert (found.experts, found.slots) == (EXPERTS, SLOTS)
    assert found.source_extents == (EXPERTS, 2 * INTER, HIDDEN)
    assert found.slot_extents == (SLOTS, 2 * INTER, HIDDEN)
    assert found.slot_strides == (4 * 2 * INTER * HIDDEN, 4 * HIDDEN, 4)
    assert found.row_stride == 4 * TOP_K
    assert found.shared_memory_limit == device.shared_bytes >= 48 * 1024
    assert found.compute_capability == 10 * device.capability[0] + device.capability[1]
