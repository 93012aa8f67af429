"""ChangeableExec: the half of an executable that changes what it runs, node by node.

It holds the state that such a change moves: the handle, the version with what was changed since,
and the owners. Everything that can fail comes before the driver's call; what is known about the
executable changes after it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.driver import Driver, active
from graphcore.driver.records import (
    ExecHandle,
    KernelParams,
    LaunchConfig,
    NodeHandle,
    NodeKind,
    NodeParams,
)
from graphcore.errors import ConfigurationError, CudaError, LifecycleError
from graphcore.executable.current import CurrentParameters, with_params
from graphcore.executable.handles import ExecResource, GraphResource, NotCopied
from graphcore.executable.node_changes import CHANGEABLE, NodeChange, change_of, explain
from graphcore.executable.node_update import BoundParams, LiveArguments, bound_params
from graphcore.executable.update import Version
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.lifetime import OwnerSet

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph
    from graphcore.resources.attribution import Attribution
    from graphcore.resources.fingerprint import Fingerprint
    from graphcore.resources.pools import Blocks


CLOSED = "closed"
_log = logging.getLogger("graphcore")


class ChangeableExec(NotCopied):
    """What :class:`GraphExec` does to its nodes."""

    __slots__ = (
        "_copy", "_current", "_graph", "_owners", "_refusal", "_resource", "driver",
    )  # fmt: skip

    driver: Driver
    _copy: Graph | None  # a graph that was made here and that nobody else has
    _current: CurrentParameters
    _graph: Graph | None
    _owners: OwnerSet
    _refusal: str | None  # None, or why launch has to look closer
    _resource: ExecResource

    # ---- reading -------------------------------------------------------------------------------

    def snapshot(self) -> GraphSnapshot:
        """What the executable runs now, changes of single nodes included.

        Its records name nodes for :meth:`set_params`, for the life of the executable or until an
        update has to build a new one.
        """
        self._refuse_closed("snapshot")
        return self._current.snapshot()

    def fingerprint(self, names: Mapping[str, Any] | None = None) -> Fingerprint:
        """The fingerprint of what runs now; as :meth:`Graph.fingerprint`."""
        from graphcore.resources.fingerprint import fingerprint

        return fingerprint(self, names)

    def attributions(self, names: Mapping[str, Any] | None = None) -> list[Attribution]:
        """What each pointer that runs now points into; as :meth:`Graph.attributions`."""
        from graphcore.executable.attributions import attributions

        private = self.private_memory()
        return attributions(self.snapshot(), self.driver, self._owners, private, names)

    def why_unwritten(self, memory: Sequence[tuple[int, int]]) -> str | None:
        """Why no node writes to these pieces (address, bytes), in words; None: one does, or may.

        What nodes wrote before they were changed one by one counts too.
        """
        self._refuse_closed("why_unwritten")
        return self._current.why_unwritten(memory)

    def private_memory(self) -> list[tuple[int, int]]:
        """(address, bytes) of memory that is this executable's alone."""
        return self._version_graph("private_memory").private_memory()

    def pool_blocks(self) -> Blocks | None:
        """As :meth:`Graph.pool_blocks`."""
        return self._version_graph("pool_blocks").pool_blocks()

    @property
    def graph(self) -> Graph:
        """The graph whose parameters the executable has: its source, or the last update's.

        After changes of single nodes a copy that has them too; LifecycleError where CUDA makes none
        (conditional and memory nodes): :meth:`snapshot` tells there as well.
        """
        self._refuse_closed("graph")
        return self._current_graph()

    @property
    def owners(self) -> OwnerSet:
        """What the executable keeps alive, of the version of parameters it has."""
        return self._owners

    @property
    def handle(self) -> ExecHandle:
        """The driver's handle; LifecycleError after :meth:`close`."""
        self._refuse_closed("handle")
        return self._resource.handle

    @property
    def outputs(self) -> Any:
        """What the captured function returned: static tensors that every launch writes again."""
        return self._version_graph("outputs").outputs

    # ---- one node ------------------------------------------------------------------------------

    def set_params(
        self,
        node: Any,
        arguments: Sequence[Any] | Mapping[str | int, Any] | None = None,
        config: LaunchConfig | None = None,
        **operands: Any,
    ) -> None:
        """Changes what one node does, from the next launch on; a running launch keeps the old.

        Costs some 10 us; :meth:`bind_params` makes repeated changes of a kernel cheap.

        Args:
            node: A record of :meth:`snapshot` or of the graph, its handle, or its index in
                :attr:`graph`. Nodes of child graphs and bodies by record or handle.
            arguments: Of a kernel: all in order, or some by name or index. Typed by the signature
                where it is known; otherwise bytes, or a tensor where 8 bytes are wanted. Tensors
                are kept alive until the node is changed again.
            config: Of a kernel: another grid, block or shared memory.
            operands: Of a copy (dst, src, width, height, depth) or fill (address, value,
                element_size, width, height, pitch): tensors or addresses, and ints.

        Raises:
            LifecycleError: Closed, or a capture is under way on this thread.
            CacheTypeError: ``node`` names no node, or an operand is no tensor.
            ConfigurationError: A node of another graph or kind, a wrong count, width or dtype,
                memory that is too small, on the host or of another driver; names the argument.
            UpdateRefused: CUDA does not change this in a single node; says what does.
            CudaError: Another failure. After any error the node is as before.
        """
        record = self._node("set_params", node)
        self._apply(change_of(record, self.driver, arguments, config, operands))

    def _apply(self, change: NodeChange) -> None:
        handle = change.record.handle
        owned = OwnerSet(change.owners).recorded(self.driver)
        self._resource.upload_first()
        try:
            self.driver.set_exec_node_params(self._resource.handle, handle, change.params)
        except CudaError as error:
            explained = explain(error, change)
            if explained is error:
                raise
            raise explained from error
        self._current.note(handle, change.params)
        if owned or handle in self._current.owners:
            self._current.owners[handle] = tuple(owned)
            self._own(self._current.all_owners())
            self._resource.replace_owners(self._owners)

    def bind_params(self, node: Any) -> BoundParams:
        """A prepared form of :meth:`set_params` for all arguments of one kernel node.

        ``bound = executable.bind_params(3)``, then ``bound(address, 2.0, 1024)`` as often as the
        arguments change: about the price of the driver's own call. It keeps working after updates
        that keep the node, and says so where one did not. Unlike :meth:`set_params` it is not
        refused inside a capture, as CUDA allows it there.

        Raises:
            LifecycleError, CacheTypeError: As :meth:`set_params`.
            ConfigurationError: No kernel node, or a node of another graph.
        """
        record = self._node("bind_params", node)
        if record.kind is not NodeKind.KERNEL:
            raise ConfigurationError(f"bind_params: expected a kernel node, got {record}")
        live = self._current.live.setdefault(record.handle, LiveArguments(record.handle))
        self._prepare(live, record)
        return bound_params(self, live)

    def _prepare(self, live: LiveArguments, record: NodeRecord) -> None:
        assert isinstance(record.params, KernelParams)
        self._resource.upload_first()
        update = self.driver.bind_exec_kernel_update(
            self._resource.handle, record.handle, record.params
        )
        live.prepare(update, record.kernel)

    def change_slowly(self, live: LiveArguments, values: tuple[Any, ...]) -> None:
        """A change that a bound call has no prepared form for; raises as set_params."""
        self._refuse_closed("set_params")
        if live.node is None:
            raise ConfigurationError(
                "bind_params: the node is gone: an update built a new executable of other nodes"
            )
        record = self._current.find(live.node)
        self._apply(change_of(record, self.driver, values, None, {}))
        self._prepare(live, self._current.find(live.node))

    # ---- switching nodes off -------------------------------------------------------------------

    def enable(self, node: Any, enabled: bool = True) -> None:
        """Switches a kernel, memcpy or memset node off (``False``) and on again.

        A node that is off does nothing and is waited for like an empty one. It stays off in
        updates, and in the executable that an update has to build, where that has the same nodes.
        """
        if not isinstance(enabled, bool):
            raise ConfigurationError(f"enabled: expected a bool, got {enabled!r:.40}")
        record = self._switchable("enable", node)
        self.driver.set_node_enabled(self._resource.handle, record.handle, enabled)
        disabled = self._current.disabled
        (disabled.discard if enabled else disabled.add)(record.handle)

    def is_enabled(self, node: Any) -> bool:
        """Whether a kernel, memcpy or memset node does its work at a launch."""
        record = self._switchable("is_enabled", node)
        return self.driver.node_enabled(self._resource.handle, record.handle)

    def _switchable(self, what: str, node: Any) -> NodeRecord:
        record = self._node(what, node)
        if record.kind not in CHANGEABLE:
            raise ConfigurationError(
                f"{what}: expected a kernel, memcpy or memset node, got {record}; CUDA switches no "
                "other kind off"
            )
        return record

    # ---- what an update leaves -----------------------------------------------------------------

    def _moved(self, version: Version, successor: CurrentParameters | None) -> None:
        """An update or a new executable brought ``version``: nodes stay off, bindings go on."""
        before = self._current
        if successor is None:
            before.restart(version, self._owners)
        else:
            before.hand_over(successor)
            self._current = successor
        lost = len(before.disabled) - len(self._current.disabled)
        if lost:
            _log.warning(
                "%r: %d nodes that were switched off do their work again: the new graph has other "
                "nodes",
                self,
                lost,
            )

    def _keep_disabled(self) -> None:
        """Switches nodes off that are to stay off, after the driver took a whole graph."""
        for handle in self._current.disabled:
            try:
                if self.driver.node_enabled(self._resource.handle, handle):
                    self.driver.set_node_enabled(self._resource.handle, handle, False)
            except CudaError as error:
                error.add_note(
                    "nodes that were switched off may do their work again (is_enabled tells)"
                )
                raise

    # ---- a graph of what runs now --------------------------------------------------------------

    def _copy_with(self, changes: Mapping[NodeHandle, NodeParams]) -> Graph:
        """A graph of what runs now, with ``changes``; raises as ``clone_with``."""
        handle = self._current.clone_with(changes)
        return self._copy_of(GraphResource(self.driver, handle, owned=True))

    def _copy_of(self, resource: GraphResource) -> Graph:
        """A graph of our own over ``resource``, like the version's in everything but parameters."""
        from graphcore.executable.graph import Graph

        now = self._version_graph("graph")
        made = Graph(
            self.driver, resource.handle, owners=self._owners, annotations=now.annotations,
            owned=False,
        )  # fmt: skip
        made._resource = resource
        made.inherit(now)
        return made

    def _take_copy(
        self,
        made: Graph,
        changes: Mapping[NodeHandle, NodeParams],
        snapshot: GraphSnapshot | None = None,
    ) -> None:
        """The executable runs now what ``made``, a copy of its graph with ``changes``, says.

        ``snapshot`` is what it says, by the source's nodes, where that is known.
        """
        if self._remembers_memory():
            for handle, params in changes.items():
                self._current.note(handle, params)
            self._changes_become_a_version()
        elif snapshot is None:
            snapshot = with_params(self._current.snapshot(), changes)
        # a copy has the launch attributes of its original: no need to read them
        version = replace(self._current.version, resource=made.resource)
        self._current.rebased(version, snapshot)
        self._graph = self._copy = made

    def _current_graph(self) -> Graph:
        """A graph that says what runs now: the version's own where no node was changed since."""
        if self._current.changes():
            self._take_copy(self._copy_with({}), {})
        graph = self._version_graph("graph")
        if graph is self._copy:  # from here on somebody has it: its owners stay
            self._copy = None
        return graph

    def _version_graph(self, what: str) -> Graph:
        """The graph of the version, without the changes of single nodes."""
        self._refuse_closed(what)
        assert self._graph is not None
        return self._graph

    # ---- what the half that launches has -------------------------------------------------------

    @abstractmethod
    def _unbind(self) -> None:
        """Lets the next launch bind its stream again."""

    @abstractmethod
    def _remembers_memory(self) -> bool:
        """Whether something is known of memory by the nodes that work on it."""

    @abstractmethod
    def _changes_become_a_version(
        self, became: Mapping[NodeHandle, NodeHandle] | None = None
    ) -> None:
        """What is known by changes of single nodes is about to be known by a graph of its own.

        ``became``: which node takes the place of which, where that has other nodes.
        """

    @abstractmethod
    def _look_at_new(self) -> None:
        """Looks at the memory that changed nodes point at now, where what was before is known."""

    @abstractmethod
    def close(self) -> None:
        """Destroys the executable."""

    # ---- helpers -------------------------------------------------------------------------------

    def _node(self, what: str, node: Any) -> NodeRecord:
        self._refuse_change(what)
        return self._current.find(node)

    def _refuse_change(self, what: str) -> None:
        self._refuse_closed(what)
        if active.current() is not None:
            raise LifecycleError(f"{what}: not while a capture is under way on this thread")

    def _own(self, owners: OwnerSet) -> None:
        """Keeps ``owners``; those before them go with ``replace_owners``, which asks the driver."""
        self._owners = owners
        if self._copy is not None and self._graph is self._copy:
            self._copy.keep(owners)

    @property
    def is_closed(self) -> bool:
        return self._refusal == CLOSED

    def _refuse_closed(self, what: str) -> None:
        if self._refusal == CLOSED:
            raise LifecycleError(f"{what}: expected an open executable, got a closed one")
