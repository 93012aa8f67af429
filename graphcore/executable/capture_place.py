"""CapturePlace: the stream and the memory that one capture and its warm-up work with.

The stream is lent, or given; the pool is the capture's own, or shared. What libraries keep for the
stream stays with it, so that it outlives every graph captured there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from graphcore.driver import Driver, Stream
from graphcore.driver.lent_streams import give_up, give_up_unless_ended, lane_of
from graphcore.executable.branches import Fork
from graphcore.executable.capture_options import LegacyWork, fitting_stream, stream_for_pool
from graphcore.interop import choose_driver, use_stream
from graphcore.interop.torch import MemoryPool, without_cached_casts
from graphcore.interop.torch_workspaces import keep_workspaces, prepare_workspaces
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.lifetime import Owner, OwnerSet, collect


class CapturePlace:
    """Where a capture records.

    Args:
        stream: The given one; None: one is lent, or the shared pool's is taken.
        driver: None: that of the stream, else the default one.
        pool: The pool shared with other captures; None: a new one.
        on_legacy_work: As of :func:`capture`.

    Raises:
        ConfigurationError, CacheTypeError, CaptureError: As :func:`capture` says of its stream.
    """

    def __init__(
        self,
        stream: Any,
        driver: Driver | None,
        pool: MemoryPool | None,
        on_legacy_work: LegacyWork,
    ) -> None:
        chosen = choose_driver(stream) if driver is None else checked_driver(driver)
        if pool is not None:
            stream = stream_for_pool(chosen, stream, pool, on_legacy_work)
        self.driver = chosen
        self.stream: Stream = fitting_stream(chosen, stream, on_legacy_work)
        self.pool: MemoryPool | None = None  # what is recorded keeps its memory by itself
        if not chosen.is_emulated:
            self.pool = MemoryPool(chosen.device) if pool is None else pool
        self._is_prepared = False

    @contextmanager
    def surroundings(self, *, multiplies: bool) -> Iterator[None]:
        """Sends the work of the block to the stream, and its allocations to the pool.

        Args:
            multiplies: It is known to multiply through torch: the workspaces are made before.
        """
        with use_stream(self.driver, self.stream), without_cached_casts():
            if self.pool is None:
                yield
                return
            self._is_prepared = prepare_workspaces(
                self.driver, self.stream, self.pool, wanted=multiplies
            )
            with self.pool.use():
                yield

    def keep_workspaces(self, forks: Iterable[Fork] = ()) -> None:
        """Keeps the workspaces that the step has made in the pool."""
        streams = [fork.stream for fork in forks]
        if self.pool is not None and (streams or not self._is_prepared):
            keep_workspaces(self.driver, [self.stream, *streams], self.pool)

    def give_up_stream(self) -> None:
        """Lets no other capture have the stream, on which something may still run."""
        give_up(self.stream)

    def leave_streams(self, forks: Iterable[Fork] = ()) -> None:
        """Lets other captures have the streams of one that was broken, as far as it has ended.

        What was recorded of it is gone, a workspace that it made is not: torch keeps it for the
        stream, and the next capture there works in it.
        """
        forks = tuple(forks)
        for stream in (self.stream, *(fork.stream for fork in forks)):
            give_up_unless_ended(stream)
        self.keep_workspaces(forks)

    def owners(self, kept: Iterable[tuple[object, str]]) -> OwnerSet:
        """What a graph captured here keeps alive: stream, pool, and what is ``kept``, labelled."""
        owners = [Owner(self.stream, "capture stream")]
        lane = lane_of(self.stream)
        if lane is not None:  # with what it keeps, also where the stream itself is closed
            owners.append(Owner(lane))
        if self.pool is not None:
            owners.append(Owner(self.pool, "torch memory pool"))
        for obj, label in kept:
            owners.extend(collect(obj, label))
        return OwnerSet(owners)
