"""Pieces of torch memory: by its allocator's own words, read again only where it did something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.tensors import filled

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.interop import torch_memory
from graphcore.interop.torch_memory import TorchBlocks, blocks_of

SEGMENT = 0x7F0000000000


def piece(
    size: int, requested: int, state: str = "active_allocated", **more: Any
) -> dict[str, Any]:
    return {"size": size, "requested_size": requested, "state": state, **more}


def segment(*pieces: dict[str, Any], device: int = 0, pool: Any = (0, 0)) -> dict[str, Any]:
    return {
        "device": device,
        "address": SEGMENT + device * 2**30,
        "segment_pool_id": pool,
        "blocks": list(pieces),
    }


class FakeTorch:
    """As much of torch as is asked."""

    def __init__(self, *segments: dict[str, Any], allocated: int | None = 5) -> None:
        self.segments = list(segments)
        self.snapshots = 0
        self.freed = 0
        self.allocated = allocated
        self.cuda = SimpleNamespace(
            is_initialized=lambda: True,
            memory_snapshot=self._snapshot,
            memory_stats=lambda device: (
                {}
                if self.allocated is None
                else {
                    "allocation.all.allocated": self.allocated,
                    "allocation.all.freed": self.freed,
                }
            ),
        )

    def _snapshot(self) -> list[dict[str, Any]]:
        self.snapshots += 1
        return self.segments


def reading(monkeypatch: pytest.MonkeyPatch, torch: FakeTorch, device: int = 0) -> TorchBlocks:
    monkeypatch.setattr(torch_memory, "_begun", lambda: torch)
    return TorchBlocks(device)


def test_pieces_lie_one_behind_the_other_in_their_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = FakeTorch(
        segment(
            piece(512, 16), piece(1024, 600, "inactive"), piece(512, 500, address=SEGMENT + 1536)
        )
    )
    blocks = reading(monkeypatch, torch).read()
    assert len(blocks) == 3
    first, middle, last = (blocks.find(SEGMENT + at) for at in (511, 512, 1600))
    assert first is not None
    assert middle is not None
    assert last is not None
    assert (first.address, first.size, first.requested, first.is_live) == (SEGMENT, 512, 16, True)
    assert not middle.is_live
    assert (last.address, last.is_live) == (SEGMENT + 1536, True)
    assert blocks.find(SEGMENT - 1) is None
    assert blocks.find(SEGMENT + 2048) is None


def test_other_devices_and_private_pools_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(
        segment(piece(512, 16), device=1), segment(piece(512, 16), pool=(0, 1)), segment()
    )
    assert len(reading(monkeypatch, torch).read()) == 0
    assert len(reading(monkeypatch, torch, 1).read()) == 1


def test_a_piece_waiting_for_another_stream_is_already_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = FakeTorch(segment(piece(512, 16, "active_awaiting_free")))
    found = reading(monkeypatch, torch).read().find(SEGMENT)
    assert found is not None
    assert not found.is_live


def test_the_snapshot_is_taken_again_only_after_torch_allocated_or_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = FakeTorch(segment(piece(512, 16)))
    blocks = reading(monkeypatch, torch)
    first = blocks.read()
    assert blocks.read() is first
    assert torch.snapshots == 1
    torch.freed += 1
    torch.segments = [segment(piece(512, 16, "inactive"))]
    found = blocks.read().find(SEGMENT)
    assert found is not None
    assert not found.is_live
    assert torch.snapshots == 2


def test_where_torch_does_not_count_every_reading_is_fresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = FakeTorch(allocated=None)
    blocks = reading(monkeypatch, torch)
    blocks.read()
    blocks.read()
    assert torch.snapshots == 2


def test_the_emulated_driver_has_no_pieces() -> None:
    assert blocks_of(EmulatedDriver()) is None


@pytest.mark.gpu
def test_a_tensors_piece_is_live_until_it_is_dropped(graphcore_driver: Driver) -> None:
    blocks = blocks_of(graphcore_driver)
    if blocks is None:
        pytest.skip("torch hands out pieces only on a device")
    tensor = filled(graphcore_driver, 1.0, 300)
    address = tensor.data_ptr()
    found = blocks.read().find(address)
    assert found is not None
    assert (found.address, found.requested, found.is_live) == (address, 1200, True)
    del tensor
    found = blocks.read().find(address)
    assert found is None or not found.is_live or found.requested != 1200
