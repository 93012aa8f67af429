"""Weights in pinned memory and back: the same objects, the same bits."""

from __future__ import annotations

import pytest
import torch
from helpers.moe_models import device_of

from graphcore.driver import Driver
from graphcore.moe.slots.expert_memory import ExpertMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contents_come_back_to_where_they_were_bit_for_bit(
    graphcore_driver: Driver, dtype: torch.dtype
) -> None:
    device = device_of(graphcore_driver)
    values = torch.randn(3, 5, 7).to(dtype)
    weight = torch.nn.Parameter(values.to(device))
    memory = ExpertMemory(graphcore_driver)
    host = memory.take(weight)
    assert host.device.type == "cpu"
    assert torch.equal(host, values)
    assert weight.data_ptr() == host.data_ptr(), "one copy of it exists"
    if not graphcore_driver.is_emulated:
        found = graphcore_driver.allocation_of(host.data_ptr())
        assert found is not None
        assert found.memory.name != "DEVICE"
    memory.give_back()
    assert str(weight.device) == device
    assert torch.equal(weight.detach().cpu(), values)
    memory.give_back()


@pytest.mark.gpu
def test_pinned_memory_lives_as_long_as_a_tensor_over_it(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("needs memory of a device")
    weight = torch.nn.Parameter(torch.arange(64.0, device=device_of(graphcore_driver)))
    memory = ExpertMemory(graphcore_driver)
    host = memory.take(weight)[8:]
    memory.give_back()
    del memory
    assert host.tolist() == list(range(8, 64))
