"""RenewableCache: the half of a cache for whoever keeps entries in hand between launches.

Another graph can be put behind the executable of an entry, which keeps its key and its object, and
a use can be noted without a lookup.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from graphcore.errors import ConfigurationError
from graphcore.executable import Graph, GraphExec, UpdateOutcome, UpdateStatus
from graphcore.executable.handles import NotCopied
from graphcore.executable.memory_report import memory_report
from graphcore.reuse.budget import Incoming
from graphcore.reuse.decisions import Eviction
from graphcore.reuse.entries import Entry
from graphcore.reuse.holding import Holding
from graphcore.reuse.serving import Serving


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of an entry.

    Args:
        outcome: Of the update.
        former: The graph that it had, open, and the caller's to close; None where it has it still.
    """

    outcome: UpdateOutcome
    former: Graph | None


class EntryUse:
    """One entry in hand: its executable, and a way to say that it was used.

    It holds for as long as the executable is open.
    """

    __slots__ = ("_clock", "_entry", "_holding", "executable")

    def __init__(self, entry: Entry, holding: Holding, clock: Callable[[], float]) -> None:
        self.executable: GraphExec = entry.executable
        self._entry = entry
        self._holding = holding
        self._clock = clock

    @property
    def size(self) -> tuple[int, int, int]:
        """Nodes and bytes of its graph and executable, and how often it was used."""
        return self._entry.nodes, self._entry.bytes, self._entry.uses

    def note(self) -> float:
        """Notes a use, without a lookup; the time of the cache's clock."""
        entry, holding = self._entry, self._holding
        entry.uses += 1
        entry.last_time = now = self._clock()
        if entry is not holding.newest:
            holding.note(entry)
        return now


class RenewableCache(NotCopied):
    """What :class:`graphcore.GraphCache` does for entries that are kept in hand."""

    _holding: Holding
    _serving: Serving

    def tell(self, told: Callable[[Eviction], object]) -> None:
        """Has ``told`` called with each :class:`Eviction`, when the entry has gone."""
        self._serving.told = told

    def use(self, key: Hashable) -> EntryUse:
        """The entry of ``key``, to be kept in hand; counts as a lookup.

        Raises:
            ConfigurationError: There is none.
        """
        return EntryUse(self._known(key), self._holding, self._serving.clock)

    def renew(self, key: Hashable, graph: Graph) -> Renewal:
        """Makes the executable of ``key`` do what ``graph`` says, as :meth:`GraphExec.update`.

        The cache takes the graph over; the one it had is the caller's to close, at best behind the
        next launch. Bytes are measured again where the driver made another executable; an update in
        place has the same nodes.

        Raises:
            ConfigurationError: There is no such key.
            CudaError: Not a refusal, but a failure: the executable is as before, and ``graph`` the
                caller's.
        """
        entry, holding = self._known(key), self._holding
        outcome = entry.executable.update(graph)
        if not outcome.is_current:
            return Renewal(outcome, None)
        former, entry.graph = entry.graph, graph
        if outcome.status is UpdateStatus.REINSTANTIATED:
            report = memory_report(graph)
            entry.nodes, entry.bytes = report.nodes, report.total_bytes
            if holding.is_over():
                holding.make_room(Incoming(0, entries=0), frozenset({entry.identity}))
        return Renewal(outcome, former)

    def _known(self, key: Hashable) -> Entry:
        entry = self._find(key)
        if entry is None:
            raise ConfigurationError(f"key: expected one that is in the cache, got {key!r}")
        return entry

    @abstractmethod
    def _find(self, key: Hashable) -> Entry | None:
        """The usable entry of ``key``."""
