"""KnownVersions: the graphs that rebinds of one executable have made, so that going back is cheap.

Two requests that take turns on one executable exchange the same buffers again and again: the second
time the graph is there, and the exchange costs one whole update. The graphs own nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from graphcore.executable.handles import GraphResource
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.repointing import Repointing

_MOST = 4


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A graph that was made, and what it says, by the source's nodes."""

    resource: GraphResource
    snapshot: GraphSnapshot


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

    def remember(
        self,
        before: GraphResource,
        exchange: Hashable,
        after: KnownVersion,
        found: Repointing,
    ) -> None:
        """Notes that ``exchange`` leads from ``before`` to ``after``."""
        self._made[after.resource.handle] = after
        self._made.move_to_end(after.resource.handle)
        if before.handle in self._made:  # of another graph the handle may come back
            self._switches[before.handle, exchange] = (after, found)
        while len(self._made) > _MOST:
            gone, _ = self._made.popitem(last=False)
            self._switches = {
                key: (to, how)
                for key, (to, how) in self._switches.items()
                if gone not in (key[0], to.resource.handle)
            }
