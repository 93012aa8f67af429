"""What a kernel node of the emulated driver runs: an operation over argument bytes.

A recorded torch call and a loaded :class:`graphcore.driver.Kernel` are both operations. A node, its
clones and the executables made from it keep their operation alive; the operation keeps alive what
it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from graphcore.driver.records import LaunchConfig


@runtime_checkable
class Operation(Protocol):
    """Work that a kernel node can hold.

    ``run`` must take every address from ``arguments``: an update may have re-pointed them since
    the operation was recorded.
    """

    @property
    def name(self) -> str:
        """What node names show, for example ``"aten::mm.default"``."""

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) in bytes of each argument."""

    def run(self, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
        """Does the work of one launch."""


@runtime_checkable
class MakesMemory(Protocol):
    """An operation for which the capture made memory: a recorded torch call with temporaries."""

    @property
    def private_memory(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of each piece of that memory that the operation touches, in order."""
