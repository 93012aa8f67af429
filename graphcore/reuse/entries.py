"""Entry: one executable in a cache, and whether it may be taken away now.

An entry is in flight from a launch until an event recorded behind it has happened. The event is
recorded when somebody wants the memory, not at the launch: launches cost what they cost without a
cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphcore.advice import instead
from graphcore.driver import Driver
from graphcore.errors import CacheTypeError, ConfigurationError, CudaError
from graphcore.executable import Graph, GraphExec
from graphcore.executable.fence import Fence
from graphcore.interop.drivers import same_driver
from graphcore.reuse.budget import EntryFacts
from graphcore.reuse.decisions import Cause

Place = tuple[str, int, int]
"""Driver name, device and context."""


class Identity(NamedTuple):
    """What an entry is found by: where its graph runs, and the user's key."""

    place: Place
    key: Hashable


def place_of(driver: Driver) -> Place:
    """Where the graphs of ``driver`` run."""
    return driver.name, driver.device, driver.context_id()


@dataclass(eq=False)
class Entry:
    """One executable and what the cache knows of it.

    Args:
        identity: Where it is kept.
        graph: The graph whose parameters the executable has; the cache owns it.
        executable: What users launch.
        family: Keys of one family take turns in one executable.
        shares_pool: Whether its graph lies in the pool of the cache.
        nodes: Of the graph, inner ones included.
        bytes: Measured: its own pool, graph allocations and nodes; not a shared pool.
        last_time: Of the cache's clock when it was last asked for.
        uses: How often it was found.
        pins: How many blocks forbid to take it away.
    """

    identity: Identity
    graph: Graph
    executable: GraphExec
    family: Hashable | None
    shares_pool: bool
    nodes: int = 0
    bytes: int = 0
    last_time: float = 0.0
    uses: int = 0
    pins: int = 0
    _fence: Fence | None = field(default=None, repr=False)

    @property
    def place(self) -> Place:
        """Where its graph runs."""
        return self.identity.place

    def unusable(self, is_full: bool) -> tuple[Cause, str] | None:
        """Why the executable must not be given out again; None where it may.

        Args:
            is_full: Whether every owner is looked at, or only what owners said themselves.
        """
        if self.executable.is_closed:
            return Cause.CLOSED, ""
        if is_full:
            found = self.executable.check()
            return (Cause.STALE, "; ".join(map(str, found))) if found else None
        marked = self.executable.marked
        return None if marked is None else (Cause.STALE, str(marked))

    def fence(self) -> Fence | None:
        """A fence behind the newest launch; None where there was none."""
        if not self.executable.is_fenced or self._fence is None:
            self._fence = self.executable.fence()
        return self._fence

    def is_in_flight(self) -> bool:
        """Whether a launch of it may still run; True where that cannot be asked just now."""
        try:
            fence = self.fence()
            return fence is not None and not self.executable.settle(fence)
        except CudaError as error:
            if "CAPTURE" in error.code:
                raise
            return False  # a lost context, or a closed driver: nothing runs any more

    def facts(self, *, with_flight: bool = True, must_stay: bool = False) -> EntryFacts:
        """What deciding about it needs; asking whether it is in flight costs about 2 us."""
        return EntryFacts(
            self.identity,
            self.bytes,
            self.last_time,
            self.place if self.shares_pool else None,
            is_pinned=must_stay or self.pins > 0,
            is_in_flight=with_flight and self.is_in_flight(),
        )


@dataclass(frozen=True, slots=True)
class Retired:
    """A graph that is out of use but may still run: its owners are kept until it does not."""

    graph: Graph
    fence: Fence
    bytes: int
    place: Place


def checked_graph(graph: Any, driver: Driver) -> Graph:
    """``graph``, if it is one of ``driver``'s."""
    if not isinstance(graph, Graph):
        raise CacheTypeError(
            f"build: expected it to give a Graph, got {type(graph).__name__}"
            f"{instead(graph, 'graph')}"
        )
    if not same_driver(graph.driver, driver):
        raise ConfigurationError(
            f"build: expected a graph of driver {driver.name}:{driver.device}, got one of "
            f"{graph.driver.name}:{graph.driver.device}; pass the same driver= everywhere"
        )
    return graph
