"""What torch's caching allocator says of its memory, for checks of what a graph works on.

Nothing is asked where torch is not loaded or has not begun with CUDA. A torch block that was freed
and given out again for the same number of bytes looks the same: only its owner could tell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from graphcore.driver import Driver
from graphcore.resources.pools import Block, Blocks

_FREE = frozenset({"inactive", "active_awaiting_free", "active_pending_free"})


class TorchBlocks:
    """torch's pieces on one device; read again only after torch allocated or freed something."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._known: tuple[tuple[int, int] | None, Blocks] = (None, Blocks())

    def read(self) -> Blocks:
        """The pieces as they are now (about 20 us where nothing changed, else some ms)."""
        torch = _begun()
        if torch is None:
            return Blocks()
        count = _allocation_count(torch, self._device)
        if count is None or count != self._known[0]:
            blocks = Blocks(_pieces(torch.cuda.memory_snapshot(), self._device))
            self._known = (count, blocks)
        return self._known[1]


def blocks_of(driver: Driver) -> TorchBlocks | None:
    """The pieces of torch on the driver's device; None on the emulated driver, which has none."""
    return None if driver.is_emulated else _of_device(driver.device)


@cache
def _of_device(device: int) -> TorchBlocks:
    """One for all who ask, as torch has one allocator."""
    return TorchBlocks(device)


def _begun() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _allocation_count(torch: Any, device: int) -> tuple[int, int] | None:
    """How often torch has allocated and freed; None where it does not say."""
    stats = torch.cuda.memory_stats(device)
    keys = ("allocation.all.allocated", "allocation.all.freed")
    return (stats[keys[0]], stats[keys[1]]) if all(key in stats for key in keys) else None


def _pieces(segments: list[dict[str, Any]], device: int) -> Iterator[Block]:
    for segment in segments:
        # pieces of a private pool go free while a graph still works on them: their pool is what
        # keeps them, and its segments are the driver's to watch
        is_private = any(segment.get("segment_pool_id") or ())
        if segment["device"] != device or is_private:
            continue
        address = segment["address"]
        for piece in segment["blocks"]:
            address = piece.get("address", address)
            size = piece["size"]
            requested = piece.get("requested_size", size)
            yield Block(address, size, requested, piece["state"] not in _FREE)
            address += size
