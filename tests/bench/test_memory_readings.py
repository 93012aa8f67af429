"""Readings of a device's memory: each byte has one place, and what torch holds idle has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model
from helpers.tensors import cuda_driver

from graphcore.bench.suites.memory_readings import PARTS, Reading
from graphcore.decode import DecodeBuckets

MIB = 1 << 20


class Device:
    """As much of a driver as a reading asks for."""

    is_emulated = False
    device = 0

    def synchronize(self) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        return 100 * MIB, 400 * MIB


def segment(total: int, allocated: int, pool: tuple[int, int], device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "total_size": total * MIB,
        "allocated_size": allocated * MIB,
        "segment_pool_id": pool,
    }


def test_each_byte_of_a_device_has_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        segment(20, 5, (0, 0)),  # 15 of it wait for torch's next tensors
        segment(60, 60, (0, 0)),
        segment(40, 32, (0, 7)),  # a private pool's are the graphs', used or not
        segment(2, 0, (3, 0)),
        segment(500, 500, (0, 0), device=1),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    before = Reading.of(Device())  # type: ignore[arg-type]
    assert before == Reading(tensors=65 * MIB, pools=42 * MIB, executables=178 * MIB)
    segments[0] = segment(20, 15, (0, 0))
    taken = Reading.of(Device()).since(before)  # type: ignore[arg-type]
    assert taken == {"tensors": 10 * MIB, "pools": 0, "executables": 0}
    assert tuple(taken) == PARTS


@pytest.mark.exclusive
@pytest.mark.gpu
def test_buckets_take_of_torch_what_their_report_says() -> None:
    driver = cuda_driver()
    model = make_model(device=device_of(driver))
    sizes: Any = {"max_seq_lens": [12, 32], "batch_sizes": [1, 4], "progress": False}
    with DecodeBuckets(model, **sizes, driver=driver, capture=False):
        pass  # the current stream has its workspace from now on
    for share_pool in (True, False):
        before = Reading.of(driver)
        with DecodeBuckets(model, **sizes, driver=driver, share_pool=share_pool) as buckets:
            taken = Reading.of(driver).since(before)
            parts = buckets.memory_report().parts
        # a stream that is lent again may have its workspace already
        workspaces = parts.get("workspaces", 0)
        pools = sum(size for name, size in parts.items() if name.startswith("memory pool"))
        assert pools <= taken["pools"] <= pools + workspaces
        named = parts["K and V, stored once"] + parts["static tensors"]
        assert named <= taken["tensors"] <= named + 512 * 200  # a block each
        del buckets
