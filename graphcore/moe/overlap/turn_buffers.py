"""TurnBuffers: pinned buffers of int64 words that take turns, each with an event behind its copy.

The host never touches a buffer that a copy on the device may still be reading or writing.
"""

from __future__ import annotations

import ctypes

from graphcore.driver import Driver, Stream, active
from graphcore.driver.records import CopyOperand, MemcpyParams, MemoryKind
from graphcore.moe.decisions.decode_overlap import INPUT_BUFFERS
from graphcore.resources.pinned import PinnedMemory

_WORD = 8  # bytes


class TurnBuffer:
    """One buffer.

    Attributes:
        words: Its contents, while no copy is under way.
    """

    def __init__(self, driver: Driver, count: int) -> None:
        self._driver = driver
        self._memory = PinnedMemory(driver, count * _WORD)
        self.words = (ctypes.c_int64 * count).from_address(self._memory.address)
        self._event = driver.event()
        self._is_copying = False
        self._is_recorded = False

    def copy_to(self, address: int, stream: Stream) -> None:
        """Copies it to ``address`` on the device.

        Raises:
            CudaError: The driver refused.
        """
        self._copy(CopyOperand(address), self._host, stream)

    def copy_from(self, address: int, stream: Stream) -> None:
        """Copies what lies at ``address`` on the device into it; errors as of :meth:`copy_to`."""
        self._copy(self._host, CopyOperand(address), stream)

    @property
    def is_free(self) -> bool:
        """Whether no copy is under way; asks the driver, and waits for nothing."""
        if self._is_copying and self._is_recorded and self._event.query():
            self._is_copying = False
        return not self._is_copying

    def wait(self) -> None:
        """Waits until no copy is under way.

        Raises:
            CudaError: Work before the copy failed.
        """
        if self._is_copying:
            # without its event nobody knows where the copy stands
            if self._is_recorded:
                self._event.synchronize()
            else:
                with active.outside_captures():
                    self._driver.synchronize()
            self._is_copying = False

    @property
    def _host(self) -> CopyOperand:
        return CopyOperand(self._memory.address, MemoryKind.HOST)

    def _copy(self, target: CopyOperand, source: CopyOperand, stream: Stream) -> None:
        assert not self._is_copying
        self._is_copying, self._is_recorded = True, False
        self._driver.copy(MemcpyParams(target, source, self._memory.size), stream.handle)
        stream.record(self._event)
        self._is_recorded = True


class TurnBuffers:
    """Two of them.

    Args:
        driver: Whose pinned memory.
        count: Words of each.

    Raises:
        CudaError: Out of pinned memory.
    """

    def __init__(self, driver: Driver, count: int) -> None:
        self._buffers = [TurnBuffer(driver, count) for _ in range(INPUT_BUFFERS)]

    @property
    def free(self) -> int:
        """How many have no copy under way."""
        return sum(buffer.is_free for buffer in self._buffers)

    def take(self, kept: TurnBuffer | None = None) -> TurnBuffer:
        """The one whose turn it is, but not ``kept``; waits for its last copy.

        Raises:
            CudaError: Work before that copy failed.
        """
        buffer = next(each for each in self._buffers if each is not kept)
        buffer.wait()
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer
