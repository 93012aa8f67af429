"""Capturing a decode step: warm-up that leaves no trace, capture, an executable that is launched.

The warm-up runs on the capture stream (a library's first call inside a capture invalidates it) at a
real slot of the cache, so that slot and everything else a step writes is saved before and put back
after. Nothing a replay depends on is made inside the capture except temporaries, whose memory the
graph owns.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.step import DecodeStep
from graphcore.driver import Driver
from graphcore.executable import Graph, GraphExec, capture
from graphcore.interop import use_stream
from graphcore.interop import torch as torch_interop

_warmup_steps = 2


class CapturedStep:
    """Graph and executable of one decode step; owns both."""

    def __init__(self, graph: Graph, executable: GraphExec) -> None:
        self.graph = graph
        self.executable = executable

    def close(self) -> None:
        """Gives both back."""
        self.executable.close()
        self.graph.close()


def capture_step(
    step: DecodeStep, model: Any, cache: StaticKVCache, driver: Driver
) -> CapturedStep:
    """Warms up and captures one step of ``step`` at the cache's position.

    Cache, mirror and the step's tensors are afterwards as they were, also when this raises.

    Raises:
        CaptureError: The step does something a capture does not allow; names the Python line.
    """
    held = cache.seen_tokens
    at = min(held, cache.max_seq_len - 1)  # a full cache has no free slot to warm up in
    slot = cache.saved_slot(at)
    saved = step.saved()
    with driver.stream(blocking=True) as stream:
        driver.synchronize()  # the warm-up reads what the current stream has written
        try:
            with use_stream(driver, stream), torch.no_grad():
                for _ in range(_warmup_steps):
                    cache.seek(at)
                    step.run()
                cache.seek(at)
            stream.synchronize()
            with (
                capture(stream, driver=driver) as capturing,
                torch_interop.annotate_modules(capturing, model),
                torch.no_grad(),
            ):
                step.run()
        finally:
            driver.synchronize()
            step.restore(saved)
            cache.restore_slot(at, slot)
            cache.seek(held)
    return CapturedStep(capturing.graph, capturing.graph.instantiate())
