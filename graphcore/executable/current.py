"""CurrentParameters: what an executable runs now: its version, and what was changed node by node.

CUDA knows the nodes of an executable by the handles of the graph it was made from, inner graphs'
too, also after an update brought the parameters of another graph. Here every node goes by that
handle, and node indices are those of the version: what ``GraphExec.graph`` shows. A version is read
when it is first asked about; it is assumed that nobody edits the graph behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from graphcore.driver import Driver
from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    GraphHandle,
    KernelParams,
    NodeHandle,
    NodeKind,
    NodeParams,
)
from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError
from graphcore.executable.handles import GraphResource
from graphcore.executable.known_versions import KnownVersions
from graphcore.executable.node_update import LiveArguments
from graphcore.executable.update import Version
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.pairing import pair_snapshots
from graphcore.graph.reading import read
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.lifetime import Owner, OwnerSet
from graphcore.resources.written import Piece, WrittenMemory

_UNCLONABLE = {NodeKind.ALLOC, NodeKind.FREE, NodeKind.CONDITIONAL}


class CurrentParameters:
    """The state of one executable: ``source`` is the graph it was made from.

    ``base_owners`` came with the version, ``owners`` with changes of single nodes, by node.
    ``disabled`` are the nodes that are switched off, ``live`` the prepared changes by node,
    ``known`` the graphs of rebinds.
    """

    __slots__ = (
        "_aliases", "_base", "_changes", "_index", "_written", "base_owners", "disabled",
        "is_fresh", "known", "live", "owners", "source", "version",
    )  # fmt: skip

    def __init__(self, source: GraphResource, version: Version, owners: OwnerSet) -> None:
        self.source = source
        self.disabled: set[NodeHandle] = set()
        self.live: dict[NodeHandle, LiveArguments] = {}
        self.known = KnownVersions()
        self._restart(version, owners)

    def _restart(self, version: Version, owners: OwnerSet) -> None:
        """Nothing was changed since ``version``."""
        self.version = version
        self.base_owners = owners
        self.owners: dict[NodeHandle, tuple[Owner, ...]] = {}
        self._changes: dict[NodeHandle, NodeParams] = {}
        self._base: GraphSnapshot | None = None
        self._index: dict[NodeHandle, NodeRecord] | None = None  # made when a node is named
        self._aliases: dict[NodeHandle, NodeHandle] | None = None
        self._written: WrittenMemory | None = None
        # nothing was asked or changed since the version came: another one may just take its place
        self.is_fresh = not (self.live or self.disabled)

    @property
    def driver(self) -> Driver:
        """The driver of both graphs."""
        return self.source.driver

    # ---- reading -------------------------------------------------------------------------------

    def snapshot(self) -> GraphSnapshot:
        """What the executable runs now; handles are those of the source's nodes."""
        base = self._read()
        changes = self.changes()
        return with_params(base, changes) if changes else base

    def changes(self) -> Mapping[NodeHandle, NodeParams]:
        """What differs from the version, by the source's node."""
        for handle, live in self.live.items():
            params = live.params_if_new()
            if params is not None:
                self._changes[handle] = params
        return self._changes

    def why_unwritten(self, memory: Sequence[Piece]) -> str | None:
        """Why no node writes there; as of :meth:`WrittenMemory.why_not`, read once a version."""
        # host memory is the emulated driver's device memory: its callbacks may write it
        host = self.driver.is_emulated
        if self._written is None:
            self._written = WrittenMemory(self._base or self.version.snapshot())
        why = self._written.why_not(memory, host_writes=host)
        if why is not None and self.changes():
            why = WrittenMemory(self.snapshot()).why_not(memory, host_writes=host)
        return why

    def find(self, node: Any, field: str = "node") -> NodeRecord:
        """The record, as it is now, of a node that a caller names.

        Args:
            node: A record, a handle (of the source, or of the graph of the last update), or an
                index of ``GraphExec.graph``.
            field: What errors call it.

        Raises:
            CacheTypeError: None of these.
            ConfigurationError: No node of this executable.
        """
        base = self._read()
        if isinstance(node, NodeRecord):
            handle, words = node.handle, f"{node} of another graph"
        elif isinstance(node, int) and not isinstance(node, bool):
            if 0 <= node < len(base.nodes):
                return self._now(base.nodes[node])
            handle, words = NodeHandle(node), f"{node:#x}" if node >= 1 << 20 else str(node)
        else:
            raise CacheTypeError(
                f"{field}: expected a NodeRecord, a node handle or an index, got "
                f"{type(node).__name__}"
                + ("; graph.plan_nodes[name] has the handles" if isinstance(node, str) else "")
            )
        found = self._record(handle) or self._record(self._alias(handle))
        if found is None or (isinstance(node, NodeRecord) and node.kind is not found.kind):
            raise ConfigurationError(
                f"{field}: expected a node of this executable (one of {len(base.nodes)}, or in the "
                f"graphs inside them), got {words}; nodes die with their graph"
            )
        return self._now(found)

    def _now(self, record: NodeRecord) -> NodeRecord:
        params = self.changes().get(record.handle)
        return record if params is None else record.with_params(params)

    def _alias(self, handle: NodeHandle) -> NodeHandle:
        """The source's node behind a node of the version; ``handle`` itself where there is none."""
        if self._aliases is None:
            mine = (node for node, _ in _walk(self.driver, self.version.resource.handle))
            known = (node.handle for node in self._read().walk())
            self._aliases = dict(zip(mine, known, strict=True))
        return self._aliases.get(handle, handle)

    def _read(self) -> GraphSnapshot:
        if self._base is None:
            base = self.version.snapshot()
            if self.version.resource is not self.source:
                source = read(self.driver, self.source.handle)
                base = _with_handles_of(source, base)
            self._remember(base)
        assert self._base is not None
        return self._base

    def _remember(self, base: GraphSnapshot) -> None:
        self._base = base
        self.is_fresh = False
        self._index = None

    def _record(self, handle: NodeHandle) -> NodeRecord | None:
        """The node with this handle, as the version has it."""
        if self._index is None:
            self._index = {node.handle: node for node in self._read().walk()}
        return self._index.get(handle)

    def all_owners(self) -> OwnerSet:
        """What the executable keeps alive."""
        return OwnerSet(chain(self.base_owners, *self.owners.values()))

    # ---- changing ------------------------------------------------------------------------------

    def note(self, handle: NodeHandle, params: NodeParams) -> None:
        """The driver has taken ``params`` for a node."""
        self.changes()  # what a prepared change did before
        self._changes[handle] = params
        live = self.live.get(handle)
        if live is not None:
            live.forget()

    def rebased(self, version: Version, snapshot: GraphSnapshot | None = None) -> None:
        """The version is another graph, nodes in the same order; it says what runs already.

        Args:
            version: The version.
            snapshot: What it says; None: what the changes up to now came to.
        """
        self._remember(self.snapshot() if snapshot is None else snapshot)
        self.version = version
        self._changes = {}
        self._aliases = self._written = None
        for live in self.live.values():
            live.forget()

    def restart(self, version: Version, owners: OwnerSet) -> None:
        """An update brought ``version``; prepared changes go on with it, nodes stay as they are."""
        for live in self.live.values():
            live.forget()
        self.known = KnownVersions()
        self._restart(version, owners)

    def successor(self, version: Version, owners: OwnerSet) -> CurrentParameters:
        """The state of a new executable of ``version``'s graph, which may not be there yet.

        Prepared changes go on with what runs then, and nodes stay switched off, where the new
        executable has the same nodes.
        """
        after = CurrentParameters(version.resource, version, owners)
        became = self._became(after) if self.live or self.disabled else {}
        after.disabled = {became[handle] for handle in self.disabled if handle in became}
        after.live = {became[node]: live for node, live in self.live.items() if node in became}
        return after

    def hand_over(self, after: CurrentParameters) -> None:
        """The new executable has taken the place of this one."""
        for live in self.live.values():
            live.forget()
            live.node = None
        for node, live in after.live.items():
            live.node = node

    def _became(self, after: CurrentParameters) -> dict[NodeHandle, NodeHandle]:
        """Which node of the new source takes the place of which of ours; empty where none does."""
        old, new = self._read(), after._read()
        try:
            twins = _with_handles_of(new, old)
        except LifecycleError:
            return {}
        pairs = zip(old.walk(), twins.walk(), strict=True)
        return {mine.handle: theirs.handle for mine, theirs in pairs}

    def close(self) -> None:
        """Lets go of every owner; no prepared change works any more."""
        self.base_owners = OwnerSet()
        self.owners = {}
        self.known = KnownVersions()
        for live in self.live.values():
            live.close()

    # ---- a graph of what runs now --------------------------------------------------------------

    def can_be_cloned(self) -> bool:
        """Whether CUDA clones the version: it holds no conditional and no memory node."""
        return not any(node.kind in _UNCLONABLE for node in self._read().walk())

    def clone_with(self, changes: Mapping[NodeHandle, NodeParams]) -> GraphHandle:
        """A new graph: the version, its own changes and ``changes`` (by the source's nodes).

        Raises:
            LifecycleError: CUDA does not clone it.
            CudaError: The driver's refusal; nothing is left.
        """
        if not self.can_be_cloned():
            raise LifecycleError(
                "graph: CUDA clones no graph with conditional or memory nodes, so that none says "
                "what the executable runs after changes of single nodes; snapshot() tells"
            )
        driver = self.driver
        handle = driver.clone_graph(self.version.resource.handle)
        try:
            wanted = {**self.changes(), **changes}
            arguments: list[tuple[NodeHandle, KernelParams]] = []
            twins = zip(_walk(driver, handle), self._read().walk(), strict=True)
            for (twin, params), record in twins:
                new = wanted.get(record.handle)
                if new is None:
                    continue
                _refuse_another(params, record)
                if _same_launch(params, new):
                    assert isinstance(new, KernelParams)
                    arguments.append((twin, new))
                else:
                    driver.set_node_params(twin, new)
            driver.set_arguments(arguments)
        except BaseException:
            driver.destroy_graph(handle)
            raise
        return handle


def _same_launch(params: NodeParams, new: NodeParams) -> bool:
    """Whether a kernel node keeps all but its arguments."""
    if not isinstance(params, KernelParams) or not isinstance(new, KernelParams):
        return False
    return params.function == new.function and params.config == new.config


def _refuse_another(params: NodeParams, record: NodeRecord) -> None:
    """LifecycleError where a copy's node is not the one that was read: the graph was edited."""
    same = params.kind is record.kind
    if same and isinstance(params, KernelParams) and isinstance(record.params, KernelParams):
        same = params.function == record.params.function
    if not same:
        raise LifecycleError(
            f"graph: expected {record} as it was read, got another node: the graph was edited "
            "since; instantiate it again"
        )


def with_params(snapshot: GraphSnapshot, changes: Mapping[NodeHandle, NodeParams]) -> GraphSnapshot:
    """``snapshot`` with the parameters of some nodes replaced, inner graphs' too."""
    nodes = []
    for node in snapshot.nodes:
        params = changes.get(node.handle)
        if params is not None:
            node = node.with_params(params)  # noqa: PLW2901
        elif node.child is not None:
            node = replace(node, child=with_params(node.child, changes))  # noqa: PLW2901
        elif node.bodies:
            bodies = tuple(with_params(body, changes) for body in node.bodies)
            node = replace(node, bodies=bodies)  # noqa: PLW2901
        nodes.append(node)
    return replace(snapshot, nodes=tuple(nodes))


def _with_handles_of(source: GraphSnapshot, other: GraphSnapshot) -> GraphSnapshot:
    """``other`` with the handles of the nodes of ``source`` that an update pairs with its own."""
    pairs = pair_snapshots(source, other)
    if not isinstance(pairs, tuple):
        raise LifecycleError(f"node: the graph of the last update has other nodes: {pairs.rule}")
    twins = {new: source.nodes[old] for old, new in pairs}
    nodes = []
    for node in other.nodes:
        twin = twins[node.index]
        inner = tuple(map(_with_handles_of, twin.inner, node.inner))
        is_child = node.child is not None
        nodes.append(
            replace(
                node,
                handle=twin.handle,
                child=inner[0] if is_child else None,
                bodies=() if is_child else inner,
            )
        )
    return replace(other, nodes=tuple(nodes))


def _walk(driver: Driver, graph: GraphHandle) -> Iterator[tuple[NodeHandle, NodeParams]]:
    """All nodes with their parameters, in the order of ``GraphSnapshot.walk``."""
    for node, params in driver.all_params(graph):
        yield node, params
        if isinstance(params, ChildParams):
            yield from _walk(driver, params.graph)
        elif isinstance(params, ConditionalParams):
            for body in params.bodies:
                yield from _walk(driver, body)
