"""EagerExec: what a cache gives out where graphs are off: each launch calls the function."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from graphcore.driver import Driver
from graphcore.errors import LifecycleError
from graphcore.interop import use_stream
from graphcore.resources.staleness import StaleResource


class EagerExec:
    """Stands in for a :class:`graphcore.GraphExec`: launch, upload, check, outputs, close.

    ``outputs`` is what the last launch returned: new tensors at each launch, where a graph writes
    the same ones again.
    """

    def __init__(self, driver: Driver, fn: Callable[[], Any], reason: str) -> None:
        self.driver = driver
        self.reason = reason
        self._fn: Callable[[], Any] | None = fn
        self._outputs: Any = None

    def launch(self, stream: Any = None) -> None:
        """Calls the function, with ``stream`` as the current one where it is given."""
        if self._fn is None:
            raise LifecycleError("launch: expected an open executable, got a closed one")
        if stream is None:
            self._outputs = self._fn()
            return
        with use_stream(self.driver, stream):
            self._outputs = self._fn()

    def upload(self, stream: Any = None) -> None:
        """Nothing is to be moved."""

    def check(self) -> list[StaleResource]:
        """Nothing is baked in: always empty."""
        return []

    @property
    def outputs(self) -> Any:
        """What the last launch returned; None before the first."""
        return self._outputs

    @property
    def is_closed(self) -> bool:
        return self._fn is None

    def close(self) -> None:
        """Lets go of the function; a second call does nothing."""
        self._fn = None
        self._outputs = None

    def __enter__(self) -> EagerExec:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EagerExec {self.driver.name}:{self.driver.device}, no graph: {self.reason}>"
