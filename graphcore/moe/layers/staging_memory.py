"""StagingMemory: device memory of a fixed size that experts pass through, and their rows with them.

One for all layers of a model: what lies there is nobody's once a layer's products are done, so all
work through it runs in one order (one stream, or events between streams).
"""

from __future__ import annotations

from types import TracebackType

from graphcore.driver import Driver, active
from graphcore.driver.kept import default_driver
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.executable.memory_report import in_words
from graphcore.resources.buffer import Buffer
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.exhaustion import telling_need

EXPERT_BYTES = 256 * 2**20
ROW_BYTES = 512 * 2**20


class StagingMemory:
    """Scratch memory on one device; nothing more is allocated, whatever passes through it.

    Args:
        expert_bytes: For chunks of experts; more of them make fewer chunks.
        row_bytes: For what lies between the products of a step: about top_k * (4 * columns of out
            + 2 * inner) bytes a row. Steps with more rows are done in parts, and read each expert
            once for each part.
        driver: Where; None is what :func:`graphcore.open_driver` would open.

    Raises:
        CaptureError: Inside a capture.
        ConfigurationError: Sizes below one byte.
        CudaError: Out of memory.
    """

    def __init__(
        self,
        *,
        expert_bytes: int = EXPERT_BYTES,
        row_bytes: int = ROW_BYTES,
        driver: Driver | None = None,
    ) -> None:
        if active.current() is not None:
            raise CaptureError("StagingMemory: not while a graph is captured; make it before")
        for name, size in (("expert_bytes", expert_bytes), ("row_bytes", row_bytes)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigurationError(f"{name}: expected at least 1, got {size!r}")
        self.driver = default_driver() if driver is None else checked_driver(driver)
        self.expert_bytes, self.row_bytes = expert_bytes, row_bytes
        with telling_need(self._need):
            self._experts = Buffer.allocate(expert_bytes, "uint8", driver=self.driver)
            self._rows = Buffer.allocate(row_bytes, "uint8", driver=self.driver)

    @property
    def experts(self) -> Buffer:
        """uint8 [expert_bytes]; LifecycleError once it is closed."""
        return _open(self._experts)

    @property
    def rows(self) -> Buffer:
        """uint8 [row_bytes]; LifecycleError once it is closed."""
        return _open(self._rows)

    @property
    def nbytes(self) -> int:
        return self.expert_bytes + self.row_bytes

    @property
    def is_closed(self) -> bool:
        return self._rows.is_closed

    def close(self) -> None:
        """Lets go of the memory; steps that are planned and graphs keep it."""
        self._experts.close()
        self._rows.close()

    def _need(self) -> str:
        return (
            f"expert_bytes={self.expert_bytes} and row_bytes={self.row_bytes} take "
            f"{in_words(self.nbytes)} in all; smaller ones make more chunks, and more parts of a "
            "step"
        )

    def __enter__(self) -> StagingMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<StagingMemory {self.expert_bytes} + {self.row_bytes} bytes{state}>"


def _open(buffer: Buffer) -> Buffer:
    if buffer.is_closed:
        raise LifecycleError("staging memory: expected it open, got it closed")
    return buffer
