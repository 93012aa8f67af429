"""Decode steps that take their time on a device, so that a generation still runs when asked."""

from __future__ import annotations

from typing import Any

from helpers.kernels import ONE_BLOCK
from helpers.spinning import MILLISECOND, spin

from graphcore.decode import CUDAGraphAR
from graphcore.driver import active
from graphcore.resources.buffer import Buffer


def add_spin(runner: CUDAGraphAR, milliseconds: int) -> Any:
    """Makes each captured step as slow as that on a device; returns what must be kept alive."""
    scratch = Buffer.allocate(1, driver=runner.driver)
    arguments = spin.pack(scratch.address, 0.0, milliseconds * MILLISECOND)
    function = runner.driver.function(spin)

    def wait_in_the_graph(*_: Any) -> None:
        capture = active.current()
        if capture is not None:
            runner.driver.launch(function, ONE_BLOCK, arguments, capture.stream)

    runner.model.lm_head.register_forward_pre_hook(wait_in_the_graph)
    return scratch
