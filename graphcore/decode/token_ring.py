"""TokenRing: where a running generation leaves its tokens for the host, in pinned memory.

The device writes a token, then the number of tokens; so the host may read while the launch runs,
without asking the driver. The ring holds a token for every slot of the cache, more than one
generation can make: it never wraps, and the device never waits for a slow reader.
"""

from __future__ import annotations

import ctypes

import torch
from graphcore_kernels.decode_loop import BUDGET, CONTROL_WORDS, OVER, PUBLISHED, STOP

from graphcore.driver import Driver
from graphcore.driver.kernel import Pointer
from graphcore.resources.pinned import PinnedMemory

_WORD = 8  # bytes


class TokenRing:
    """Room for ``capacity`` tokens of ``rows`` rows, and the control block of their loop.

    Args:
        driver: Whose pinned memory.
        capacity: Tokens of a row.
        rows: Ids of one step.

    Raises:
        CudaError: The driver has no pinned memory left.
    """

    def __init__(self, driver: Driver, capacity: int, rows: int) -> None:
        self.capacity = capacity
        self._memory = PinnedMemory(driver, (CONTROL_WORDS + capacity * rows) * _WORD)
        self.control = self._memory.address
        self.address = self.control + CONTROL_WORDS * _WORD
        self._words = (ctypes.c_int64 * CONTROL_WORDS).from_address(self.control)
        self._words[:] = [0] * CONTROL_WORDS
        self._words[OVER] = 1
        self._tokens = torch.from_numpy(Pointer(self.address, "int64").array((capacity, rows)))

    def begin(self, budget: int) -> None:
        """Empties the ring for a loop of at most ``budget`` tokens; none may be running."""
        assert budget <= self.capacity, (budget, self.capacity)
        for word, value in ((BUDGET, budget), (STOP, 0), (PUBLISHED, 0), (OVER, 0)):
            self._words[word] = value

    def stop(self) -> None:
        """Ends the loop after the token that it works on; nothing where it is over."""
        self._words[STOP] = 1

    @property
    def budget(self) -> int:
        """Most tokens of this loop."""
        return int(self._words[BUDGET])

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the token that the loop works on is its last one."""
        return bool(self._words[STOP])

    @property
    def published(self) -> int:
        """How many tokens the host may read."""
        return int(self._words[PUBLISHED])

    @property
    def is_over(self) -> bool:
        """Whether the device has published the last token; asked before :attr:`published`."""
        return bool(self._words[OVER])

    def token(self, index: int) -> torch.Tensor:
        """A copy of token ``index``, int64 ``[rows]`` on the host."""
        assert index < self.published, (index, self.published)
        return self._tokens[index].clone()
