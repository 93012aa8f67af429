"""Validity: what one version of an executable's parameters depends on, and whether that holds.

Three kinds of memory, each with what can be known of it: owners that the graph keeps (compared with
their records), tensors that are watched without being kept, and everything else that the nodes'
addresses point into (the footprint). The footprint is read once, when a full guard or
``Graph.watch`` asks for it, else at the first check.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from graphcore.driver.records import NodeHandle, NodeParams
from graphcore.errors import StaleGraphError
from graphcore.executable.current import CurrentParameters
from graphcore.executable.handles import GraphResource
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.interop.torch import MemoryPool
from graphcore.interop.torch_memory import blocks_of
from graphcore.resources.buffer import Buffer
from graphcore.resources.footprint import Footprint, find_changed, record, touches
from graphcore.resources.lifetime import Owner, OwnerSet
from graphcore.resources.pools import Blocks
from graphcore.resources.spans import Span, extent
from graphcore.resources.staleness import StaleResource, find_replaced, find_stale
from graphcore.resources.tensors import TensorRef
from graphcore.resources.watching import Alarm, Watch


class Validity:
    """Watches and footprint of one graph; the footprint may come later."""

    def __init__(
        self,
        resource: GraphResource,
        watches: tuple[Watch, ...] = (),
        footprint: Footprint | None = None,
    ) -> None:
        self._resource = resource
        self._watches = watches
        self._footprint = footprint
        # changes of single nodes that the footprint has, and nodes whose change it has not
        self._changes: dict[NodeHandle, NodeParams] = {}
        self._unread: set[NodeHandle] = set()
        self._torch = blocks_of(resource.driver)
        self._alarm: Alarm | None = None

    def look(
        self,
        snapshot: GraphSnapshot,
        owners: OwnerSet,
        changed: frozenset[NodeHandle] = frozenset(),
    ) -> Footprint:
        """The footprint of ``snapshot``, read now; what is known of unchanged nodes stays."""
        self._footprint = record(
            snapshot,
            self._resource.driver,
            names={watch.name: watch.extent for watch in self._watches},
            own=[*own_memory(self._resource, owners), *_kept(owners)],
            blocks=self._blocks(),
            before=self._footprint or Footprint(),
            changed=changed,
        )
        return self._footprint

    def find(
        self, owners: OwnerSet, current: CurrentParameters, *, everything: bool = True
    ) -> list[StaleResource]:
        """What is no longer what it was.

        Args:
            owners: What the executable keeps now.
            current: What it runs now.
            everything: Also what the footprint says, read now where it was not before; False
                leaves out what only the footprint would tell.
        """
        driver = self._resource.driver
        found = find_stale(owners, driver)
        if found and current.changes():  # it may be that no node works on it any more
            found = find_stale(_used(owners, current.snapshot()), driver)
        watched = (watch.stale(driver) for watch in self._watches)
        found += [stale for stale in watched if stale is not None]
        if everything or self._footprint is not None:
            footprint = self._look_again(owners, current)
            more = [
                *find_replaced(owners, footprint.touched),
                *find_changed(footprint, driver, self._blocks()),
            ]
            told = {stale.label for stale in found}
            found += [stale for stale in more if stale.label not in told]
        return found

    def _look_again(self, owners: OwnerSet, current: CurrentParameters) -> Footprint:
        """The footprint, with the changes of single nodes since it was read."""
        changes = dict(current.changes())
        if self._footprint is not None and changes == self._changes and not self._unread:
            return self._footprint
        footprint = self.look(current.snapshot(), owners, frozenset(self._new_in(current)))
        self._changes, self._unread = changes, set()
        return footprint

    def _new_in(self, current: CurrentParameters) -> set[NodeHandle]:
        """The nodes that may point elsewhere since the footprint was read."""
        changes = current.changes().items()
        return {
            node for node, params in changes if self._changes.get(node) != params
        } | self._unread

    def rebase(
        self, current: CurrentParameters, became: Mapping[NodeHandle, NodeHandle] | None = None
    ) -> None:
        """The changes of single nodes up to now are about to be a version of their own.

        ``became`` says which node takes the place of which, where a new executable has others.
        """
        nodes = self._new_in(current)
        self._unread = nodes if became is None else {became[node] for node in nodes}
        self._changes = {}

    def catch_up(self, owners: OwnerSet, current: CurrentParameters) -> None:
        """Looks at what nodes point at since, where there was a look before; asks the driver."""
        if self._footprint is not None:
            self._look_again(owners, current)

    @property
    def has_looked(self) -> bool:
        """Whether the footprint is known."""
        return self._footprint is not None

    def names(self) -> dict[str, TensorRef]:
        """The memory that is watched, by name, as it was."""
        return {watch.name: watch.record.tensor for watch in self._watches}

    def forget(self, spans: Sequence[Span]) -> None:
        """Watches nothing in ``spans`` any more: nothing points there."""
        watched = ((watch, Span(watch.name, *watch.extent)) for watch in self._watches)
        self._watches = tuple(
            watch for watch, memory in watched if not any(span.covers(memory) for span in spans)
        )

    def listen(self, ring: Callable[[], None], owners: OwnerSet) -> None:
        """Lets ``ring`` hear when an owner closes, or memory that is watched goes."""
        self._alarm = Alarm(ring)
        for watch in self._watches:
            self._alarm.hear(*watch.living())
        self.hear(owners)

    def hear(self, owners: OwnerSet) -> None:
        """Listens to owners that a change of single nodes brought, too."""
        if self._alarm is not None:
            # an owner is kept alive: only what can be closed by hand says anything
            for owner in owners:
                if isinstance(owner.object, Buffer):
                    owner.object.when_closed(self._alarm)

    def close(self) -> None:
        """Nothing is heard any more, and nothing kept."""
        self._watches = ()
        if self._alarm is not None:
            self._alarm.close()

    def _blocks(self) -> Blocks | None:
        return None if self._torch is None else self._torch.read()


def stale_error(found: list[StaleResource]) -> StaleGraphError:
    """What a guarded launch raises, naming each thing that was found."""
    return StaleGraphError(
        "launch: the graph is stale, nothing was launched: "
        + "; ".join(map(str, found))
        + ". Capture again, or update the executable with a graph of the new buffers."
    )


def own_memory(resource: GraphResource, owners: OwnerSet) -> list[tuple[int, int]]:
    """(address, bytes) of memory that is a graph's alone: its torch pool's, temporaries."""
    pools = (owner.object for owner in owners)
    return resource.driver.private_memory(resource.handle) + [
        segment for pool in pools if isinstance(pool, MemoryPool) for segment in pool.segments()
    ]


def _kept(owners: OwnerSet) -> Iterator[tuple[int, int]]:
    """What the graph keeps alive, or compares with its record anyway."""
    for owner in owners:
        if owner.record is not None:
            yield extent(owner.label, owner.record.tensor)


def _used(owners: OwnerSet, snapshot: GraphSnapshot) -> OwnerSet:
    """The owners that a node may point into."""
    addresses = sorted({touch.address for touch in touches(snapshot)})

    def is_used(owner: Owner) -> bool:
        if owner.record is None:
            return True
        start, size = extent(owner.label, owner.record.tensor)
        index = bisect_left(addresses, start)
        return index < len(addresses) and addresses[index] < start + size

    return OwnerSet(filter(is_used, owners))
