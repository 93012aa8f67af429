"""NvtxRanges: names for the parts of steps in a profiler's timeline, through torch's NVTX.

Nothing is loaded or called unless somebody makes one and gives it as ``watch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphcore.driver import Stream
from graphcore.errors import ConfigurationError
from graphcore.moe.steps.step_watch import NoWatch, StepWatch


class NvtxRanges:
    """A :class:`graphcore.moe.steps.step_watch.StepWatch` whose spans are ranges of the host.

    Args:
        watch: Told of the same spans; None: nobody.

    Raises:
        ConfigurationError: torch was built without CUDA, and so without NVTX.
    """

    def __init__(self, watch: StepWatch | None = None) -> None:
        import torch

        self._nvtx: Any = torch.cuda.nvtx
        self._watch: StepWatch = NoWatch() if watch is None else watch
        try:
            self._nvtx.mark("graphcore")
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"NVTX: expected a torch that was built with CUDA: {error}"
            ) from error

    @contextmanager
    def host(self, name: str, step: int) -> Iterator[None]:
        """A range with the name of the block."""
        with self._range(f"{name} {step}"), self._watch.host(name, step):
            yield

    @contextmanager
    def device(self, name: str, step: int, stream: Stream) -> Iterator[None]:
        """A range around the launch: profilers relate the device's work to it."""
        with self._range(f"{name} {step}"), self._watch.device(name, step, stream):
            yield

    @contextmanager
    def _range(self, text: str) -> Iterator[None]:
        self._nvtx.range_push(text)
        try:
            yield
        finally:
            self._nvtx.range_pop()
