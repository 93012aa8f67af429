"""Readings of a device's memory by part, and what was taken between two of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphcore.driver import Driver

PARTS = ("tensors", "pools", "executables")


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of a device in use, by who has them.

    Attributes:
        tensors: Live blocks of torch's own pool: K/V, static tensors, weights, the workspace of the
            stream that is not captured.
        pools: Segments of torch's private pools, used or not: temporaries of graphs, workspaces of
            the streams they were captured on.
        executables: What torch knows nothing of: executables, loaded code, other processes.
    """

    tensors: int
    pools: int
    executables: int

    @classmethod
    def of(cls, driver: Driver) -> Reading:
        """Reads ``driver``'s device, nothing running; what torch keeps for later is not in use."""
        gc.collect()
        driver.synchronize()
        if not driver.is_emulated:
            torch.cuda.empty_cache()
        segments = [] if driver.is_emulated else _segments(driver.device)
        free, total = driver.memory_info()
        own = [each for each in segments if not any(each.get("segment_pool_id") or ())]
        held = sum(each["total_size"] for each in segments)
        pools = held - sum(each["total_size"] for each in own)
        return cls(
            tensors=sum(each["allocated_size"] for each in own),
            pools=pools,
            executables=total - free - held,
        )

    def since(self, before: Reading) -> Mapping[str, int]:
        """Bytes taken by part."""
        return {part: getattr(self, part) - getattr(before, part) for part in PARTS}


def _segments(device: int) -> list[dict[str, Any]]:
    snapshot: Any = torch.cuda.memory_snapshot
    return [each for each in snapshot() if each["device"] == device]
