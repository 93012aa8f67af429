"""What stands around a step where it is captured, and decides what the graph computes: autocast.

A graph keeps what autocast said at its capture. So that no prompt is followed by steps of another
precision, it is part of what selects a graph.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on the device now; None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What selects a graph beside its own key; () where nothing is out of the ordinary."""
    dtype = autocast_dtype(device)
    return () if dtype is None else (("autocast", str(dtype).removeprefix("torch.")),)
