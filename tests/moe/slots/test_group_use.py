"""How a step uses a group: where its ids lie, and what they are a view of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.moe_steps import EXPERTS, LAYERS, TOP_K, Scene

from graphcore.driver.emulated import EmulatedDriver
from graphcore.moe import GroupUse, Location, Role
from graphcore.moe.slots.pool_bank import PoolBank, banks_of
from graphcore.moe.steps.pool_resources import Place, pool_resources
from graphcore.moe.steps.sighting import SightedGroup
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import describe


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_ids_that_are_a_view_say_how_far_into_their_memory_they_begin(dtype, first):
    memory = torch.arange(5 * TOP_K, dtype=dtype).reshape(5, TOP_K)
    whole, part = GroupUse("layer", memory), GroupUse("layer", memory[first : first + 2])
    assert whole.witness().view_offset == 0
    assert part.witness().view_offset == first * TOP_K * memory.itemsize
    assert part.witness().address - part.witness().view_offset == whole.witness().address


def test_ids_in_the_same_place_that_view_other_memory_are_told_apart():
    memory = torch.zeros(4, TOP_K, dtype=torch.int64)
    part = memory[2:]
    alone = torch.frombuffer(memory.numpy(), dtype=torch.int64, offset=2 * TOP_K * 8)
    use = GroupUse("layer", part)
    seen = GroupUse("layer", alone.reshape(2, TOP_K)).witness()
    assert seen.address == use.witness().address
    assert f"view_offset: expected {2 * TOP_K * 8}, got 0" in use.witness().differences(seen)


def test_a_buffer_of_ours_is_a_view_of_nothing():
    ids = Buffer.allocate((2, TOP_K), "int64", driver=EmulatedDriver())
    assert GroupUse("layer", ids).witness().view_offset == 0


@pytest.mark.parametrize("location", Location, ids=lambda each: each.name)
def test_scales_that_lie_on_the_device_as_a_whole_are_told_with_their_address(location):
    scene = Scene(EmulatedDriver())
    scales = describe(torch.ones(EXPERTS))
    scale = PoolBank("scale", Role.DOWN_SCALE, location, scales, None)
    use, name = scene.lane().uses()[0], LAYERS[0]
    group = scene.manifest.group(name)
    banks = (*banks_of(name, scene.pool[name], group), scale)
    sighted = SightedGroup(use, banks, places=None, group=group)  # type: ignore[arg-type]
    plan = SimpleNamespace(
        subject=SimpleNamespace(semantic_key=1, published=SimpleNamespace(generation=1)),
        groups=(SimpleNamespace(sighting=SimpleNamespace(capabilities=())),),
    )
    made = pool_resources(scene.pool, [sighted], plan, Place(0, 0, (0,)))  # type: ignore[arg-type]
    (found,) = made.groups[0].auxiliaries
    assert found.resident == (scales.address if location is Location.DEVICE else 0)
    assert (found.source, found.values) == (scales.address, 1)
