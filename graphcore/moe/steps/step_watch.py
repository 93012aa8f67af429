"""StepWatch: what may look at steps while they are done: spans of the host and of the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from graphcore.driver import Stream


class StepWatch(Protocol):
    """Told of spans; :class:`graphcore.moe.StepTrace` is one."""

    def host(self, name: str, step: int) -> AbstractContextManager[object]:
        """A block of host work for decode step ``step``."""

    def device(self, name: str, step: int, stream: Stream) -> AbstractContextManager[object]:
        """A block that puts the work of decode step ``step`` on ``stream``."""


class NoWatch:
    """Looks at nothing."""

    def host(self, name: str, step: int) -> AbstractContextManager[object]:
        return _NOTHING

    def device(self, name: str, step: int, stream: Stream) -> AbstractContextManager[object]:
        return _NOTHING


_NOTHING: AbstractContextManager[object] = nullcontext()
