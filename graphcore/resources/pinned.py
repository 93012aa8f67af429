"""PinnedMemory: page-locked host memory of a driver, at one address for host and device.

Given back when the last who holds it lets go; a graph whose kernels use it must be among those.
"""

from __future__ import annotations

import warnings
import weakref
from functools import partial

from graphcore.driver import Driver, active
from graphcore.errors import GraphcoreError, GraphcoreWarning


class PinnedMemory:
    """``size`` bytes; their contents are undefined.

    Attributes:
        address: On the host and on the device alike (unified addressing).
        size: Bytes.

    Raises:
        CudaError: Out of memory, or inside a capture that does not allow it.
    """

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver = driver
        self.size = size
        self.address = driver.alloc_pinned(size)
        release = weakref.finalize(self, _free_when_idle, driver, self.address)
        release.atexit = False  # the process's end gives everything back

    def __repr__(self) -> str:
        return f"<PinnedMemory {self.size} bytes at {self.address:#x} {self.driver.name}>"


def _free_when_idle(driver: Driver, address: int) -> None:
    # freeing may wait for the device, which a capture does not allow
    active.when_idle(partial(_free, driver, address))


def _free(driver: Driver, address: int) -> None:
    try:
        driver.free_pinned(address)
    except GraphcoreError as error:
        warnings.warn(f"while freeing pinned memory: {error}", GraphcoreWarning, stacklevel=2)
