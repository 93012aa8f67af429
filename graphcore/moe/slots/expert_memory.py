"""ExpertMemory: weights of experts in pinned host memory, where the device reads them, and back.

The parameters stay the same objects; only where their contents lie changes. On the emulated driver
device and host are one, and nothing moves.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from graphcore.driver import Driver
from graphcore.resources.pinned import PinnedMemory


class ExpertMemory:
    """Parameters whose contents were moved to pinned memory of ``driver``. Not locked."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._moved: list[tuple[torch.nn.Parameter, torch.device]] = []

    def take(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The contents of ``weight``, in pinned memory from now on.

        Raises:
            CudaError: Out of pinned memory; the weight is where it was.
        """
        if self._driver.is_emulated:
            return weight.detach()
        host = _pinned_like(weight, self._driver)
        host.copy_(weight.detach())
        home = weight.device
        weight.data = host
        self._moved.append((weight, home))
        return host

    def give_back(self) -> None:
        """Moves all contents to where they came from.

        Raises:
            torch.OutOfMemoryError: The device has no room; what was moved back is, and the rest can
                be by another call.
        """
        while self._moved:
            weight, home = self._moved[-1]
            weight.data = weight.detach().to(home, copy=True)
            self._moved.pop()


def _pinned_like(weight: torch.Tensor, driver: Driver) -> torch.Tensor:
    # not torch's own pinned memory: its allocator rounds up to a power of two
    memory = PinnedMemory(driver, weight.numel() * weight.element_size())
    kind: Any = type("PinnedBytes", (ctypes.c_ubyte * memory.size,), {})
    content = kind.from_address(memory.address)
    content.memory = memory  # the tensor keeps the array alive, and that the memory
    return torch.frombuffer(content, dtype=weight.dtype).view(weight.shape)
