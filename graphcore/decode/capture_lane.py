"""CaptureLane: the stream and the pool that all captures of one runner share.

Graphs of one runner never run at the same time, so that they may work in the same workspace of
cuBLAS, which torch keeps for each stream. Runners over one storage share a lane for the same
reason.
"""

from __future__ import annotations

from graphcore.driver import Driver, Stream
from graphcore.driver.lent_streams import is_given_up
from graphcore.executable import Capture, capture
from graphcore.executable.capture_options import LegacyWork
from graphcore.interop.torch import MemoryPool


class CaptureLane:
    """Where steps are captured.

    Args:
        driver: Which captures.
        on_legacy_work: As of :func:`graphcore.capture`.
        pool: The torch memory pool to share, whose stream is taken then; None: one for each graph.
    """

    def __init__(
        self, driver: Driver, on_legacy_work: LegacyWork = "error", pool: MemoryPool | None = None
    ) -> None:
        self.driver = driver
        self._on_legacy_work: LegacyWork = on_legacy_work
        self._pool = pool
        self._stream: Stream | None = None
        self._leader: CaptureLane | None = None

    def follow(self, leader: CaptureLane) -> None:
        """Takes the stream of ``leader`` from now on; graphs of neither run while the other's do.

        Args:
            leader: Of the same driver and choice of ``on_legacy_work``.
        """
        self._leader = leader

    def capture(self) -> Capture:
        """A capture of a step that multiplies, to be entered."""
        capturing = capture(
            self._current_stream(),
            driver=self.driver,
            on_legacy_work=self._on_legacy_work,
            pool=self._pool,
        )
        capturing.expect_products()
        return capturing

    def close(self) -> None:
        """Lets go of the stream; the graphs captured on it hold it as long as they live."""
        self._stream = self._leader = None

    def _current_stream(self) -> Stream:
        blocking = self._on_legacy_work == "error"
        if self._pool is not None:
            return self._pool.capture_stream(self.driver, blocking=blocking, products=True)
        if self._leader is not None:
            return self._leader._current_stream()
        if self._stream is None or is_given_up(self._stream):
            self._stream = self.driver.capture_stream(blocking=blocking, products=True)
        return self._stream
