"""A place for captures that fail: a driver, streams, a tensor, and what must hold afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernels import ONE_BLOCK, add_one
from helpers.tensors import filled, poisoned, replayed

import graphcore
from graphcore import CaptureError
from graphcore.driver import Driver, Stream, active
from graphcore.driver.records import CaptureState
from graphcore.executable import Capture


class Scene:
    """A driver, a stream to capture on and a tensor; says that nothing is left afterwards."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream(blocking=True)
        self.x = filled(driver, 1.0)
        self.function = driver.function(add_one)
        self.other = driver.stream()

    def launch(self, stream: Stream) -> None:
        arguments = add_one.pack(self.x.data_ptr(), 4)
        self.driver.launch(self.function, ONE_BLOCK, arguments, stream.handle)

    def capture(self, **options: Any) -> Capture:
        return graphcore.capture(self.stream, driver=self.driver, **options)

    def capture_with(self, *actions: Callable[[Scene], object], **options: Any) -> None:
        """Captures some work, then ``actions``."""
        with self.capture(**options):
            self.x.add_(1)
            for action in actions:
                action(self)

    def is_usable(self) -> bool:
        """Whether the stream works, and captures again with the right result."""
        self.driver.synchronize()
        assert self.driver.capture_status(self.stream.handle).state is CaptureState.NONE
        assert active.current() is None
        assert gc.isenabled()
        y = poisoned(self.driver)
        with self.capture() as capture:
            y.copy_(self.x * 2 + 1)
        self.x.fill_(3.0)
        return replayed(capture.graph, y) == [7.0] * 4

    def failure(self, *actions: Callable[[Scene], object], **options: Any) -> CaptureError:
        """The error of a capture of ``actions``; the stream works afterwards, no memory is kept."""
        free = free_memory(self.driver)
        with pytest.raises(CaptureError) as caught:
            self.capture_with(*actions, **options)
        assert free_memory(self.driver) >= free, "the failed capture keeps memory"
        assert "There is no graph; the stream is usable." in str(caught.value)
        assert self.is_usable()
        return caught.value


def free_memory(driver: Driver) -> int:
    """Free bytes; on a device those torch does not hold (other processes use the device too)."""
    if driver.is_emulated:
        return driver.memory_info()[0]
    gc.collect()
    torch.cuda.empty_cache()
    return -torch.cuda.memory_reserved()
