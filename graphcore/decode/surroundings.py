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


def holds(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``buffer`` takes ``values`` as they are.

    What autocast made narrower fits a wider buffer, so that prompts under autocast and without it
    may take turns: a buffer of its own for each would have all graphs captured again every time.
    """
    if buffer.shape != values.shape:
        return False
    if buffer.dtype == values.dtype:
        return True
    is_wider = torch.promote_types(buffer.dtype, values.dtype) == buffer.dtype
    return is_wider and autocast_dtype(buffer.device) is not None


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What selects a graph beside its own key; () where nothing is out of the ordinary."""
    dtype = autocast_dtype(device)
    return () if dtype is None else (("autocast", str(dtype).removeprefix("torch.")),)
