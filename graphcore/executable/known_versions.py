"""KnownVersions: the graphs that rebinds of one executable have led to, so that returns are cheap.

Two requests that take turns on one executable exchange the same buffers again and again: the second
time the graph is there, and the exchange is one prepared update. The graphs own nothing else, and
all go with the next :meth:`GraphExec.update`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from graphcore.driver.records import ExecHandle
from graphcore.executable.handles import GraphResource
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.repointing import Repointing

MOST_VERSIONS = 8


class KnownVersion:
    """A graph, and what it says, by the source's nodes."""

    __slots__ = ("_update", "resource", "snapshot")

    def __init__(self, resource: GraphResource, snapshot: GraphSnapshot) -> None:
        self.resource = resource
        self.snapshot = snapshot
        self._update: tuple[ExecHandle, Callable[[], object]] | None = None

    def is_taken_by(self, executable: ExecHandle) -> bool:
        """Updates ``executable`` to the graph by one prepared call; whether the driver took it."""
        if self._update is None or self._update[0] != executable:
            driver, graph = self.resource.driver, self.resource.handle
            self._update = executable, driver.bind_update(executable, graph)
        return not self._update[1]()


class KnownVersions:
    """The newest few, and which exchange leads from which to which."""

    __slots__ = ("_made", "_switches")

    def __init__(self) -> None:
        self._made: OrderedDict[int, KnownVersion] = OrderedDict()
        self._switches: dict[tuple[int, Hashable], tuple[KnownVersion, Repointing]] = {}

    def switch(
        self, before: GraphResource, exchange: Hashable
    ) -> tuple[KnownVersion, Repointing] | None:
        """Where ``exchange`` led from ``before``, where that is known."""
        return self._switches.get((before.handle, exchange))

    def find(self, snapshot: GraphSnapshot) -> KnownVersion | None:
        """The graph that says exactly this."""
        return next((made for made in self._made.values() if made.snapshot == snapshot), None)

    def keep(self, version: KnownVersion) -> None:
        """Keeps ``version`` as the newest; the oldest goes where there are too many."""
        handle = version.resource.handle
        self._made.setdefault(handle, version)
        self._made.move_to_end(handle)
        while len(self._made) > MOST_VERSIONS:
            gone, _ = self._made.popitem(last=False)
            self._switches = {
                key: (to, how)
                for key, (to, how) in self._switches.items()
                if gone not in (key[0], to.resource.handle)
            }

    def remember(
        self,
        before: GraphResource,
        exchange: Hashable,
        after: KnownVersion,
        found: Repointing,
    ) -> None:
        """Notes that ``exchange`` leads from ``before`` to ``after``, which is kept."""
        self.keep(after)
        if before.handle in self._made:  # of another graph the handle may come back
            self._switches[before.handle, exchange] = (after, found)
