"""Place: which device of which machine a rank works on; two ranks on one device are refused."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphcore.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank works.

    Args:
        host: Name of the machine.
        device: "cpu", or what no other GPU of the machine is called.
    """

    host: str
    device: str

    def told(self) -> dict[str, str]:
        """As JSON has it."""
        return asdict(self)


def place_of(device: Any) -> Place:
    """The place of a ``torch.device``."""
    import torch

    if device.type != "cuda":
        return Place(socket.gethostname(), device.type)
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return Place(socket.gethostname(), str(torch.cuda.get_device_properties(ordinal).uuid))


def check_places(places: Sequence[Place]) -> None:
    """Refuses two ranks on one GPU: their collectives would wait for each other for ever.

    Raises:
        ConfigurationError: Names the ranks.
    """
    seen: dict[Place, int] = {}
    for rank, place in enumerate(places):
        if place.device == "cpu":
            continue
        first = seen.setdefault(place, rank)
        if first != rank:
            raise ConfigurationError(
                f"device: expected one of its own for each rank, got {place.device} of "
                f"{place.host} for ranks {first} and {rank}; choose it by LOCAL_RANK "
                "(torch.cuda.set_device)"
            )
