"""Conditional handles: the values that decide what conditional nodes run, and who may set them.

A kernel's Python reference gets the handle as a u64 argument, as the kernel on a device does, and
calls :func:`set_conditional`, the twin of ``cudaGraphSetConditional``. Handles are never used twice
in a process, so the function needs no driver.
"""

from __future__ import annotations

import weakref

from graphcore.driver.emulated.calls import invalid
from graphcore.driver.emulated.handles import draw_handle
from graphcore.driver.records import ConditionalHandle

_live: weakref.WeakValueDictionary[int, Conditional] = weakref.WeakValueDictionary()


class Conditional:
    """One handle's value; alive as long as its graph, a node with it, or an executable of it is."""

    def __init__(self, default: int, *, assign_at_launch: bool) -> None:
        self.handle = ConditionalHandle(draw_handle())
        self.default = default
        self.assign_at_launch = assign_at_launch
        self.value = default
        _live[self.handle] = self

    def start_launch(self) -> None:
        """What each launch of an executable does first."""
        if self.assign_at_launch:
            self.value = self.default


def set_conditional(handle: int, value: int) -> None:
    """Sets the value of a conditional handle from a kernel's Python reference.

    Raises:
        CudaError: INVALID_VALUE where no live handle has this number, or ``value`` is no u32.
    """
    conditional = _live.get(handle)
    call = "cudaGraphSetConditional"
    if conditional is None:
        raise invalid(f"no conditional has handle {handle:#x}").as_error(call)
    if not 0 <= value < 2**32:
        raise invalid(f"value: expected a 32-bit unsigned integer, got {value}").as_error(call)
    conditional.value = value
