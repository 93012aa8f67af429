"""Graph: a CUDA graph, owned or borrowed, with the owners of what it touches.

It can be read, compared, drawn and instantiated; it does nothing by itself. Not locked: one thread
at a time for a graph, its clones and its executables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from graphcore.advice import advises
from graphcore.drawing.model import node_count
from graphcore.driver import Driver
from graphcore.driver.records import GraphHandle, NodeHandle, NodeKind
from graphcore.errors import ConfigurationError, CudaError, LifecycleError
from graphcore.executable.adopting import raw_handle, refuse_gone
from graphcore.executable.capture_options import refuse_instantiation
from graphcore.executable.communicating import note_graph
from graphcore.executable.handles import ExecResource, GraphResource, NotCopied
from graphcore.executable.handover import Handover
from graphcore.executable.retired import release_finished
from graphcore.executable.runs import Runs, runs_of
from graphcore.executable.update import Version
from graphcore.executable.validity import Validity, own_memory
from graphcore.graph.attributes import LaunchAttributes
from graphcore.graph.reading import Annotation, read
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.interop import choose_driver
from graphcore.interop.torch_memory import blocks_of
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.exhaustion import telling_need
from graphcore.resources.footprint import Footprint
from graphcore.resources.lifetime import OwnerSet
from graphcore.resources.pools import Blocks
from graphcore.resources.watching import Watch, watch_all

if TYPE_CHECKING:
    from graphcore.drawing import Drawing
    from graphcore.executable.graph_exec import GraphExec
    from graphcore.executable.memory_report import MemoryReport
    from graphcore.resources.attribution import Attribution
    from graphcore.resources.fingerprint import Fingerprint

Guard = Literal["owners", "full"]


@advises
class Graph(NotCopied):
    """A graph. Made by :func:`capture`, :meth:`adopt`, :meth:`clone`, or from a driver's handle.

    Args:
        driver: The driver the handle belongs to.
        handle: The graph.
        owners: What the graph keeps alive; tensors in it are recorded as they are now.
        annotations: (first node, past the last node, label) in creation order.
        owned: Whether closing destroys the handle.
    """

    def __init__(
        self,
        driver: Driver,
        handle: GraphHandle,
        *,
        owners: OwnerSet | None = None,
        annotations: tuple[Annotation, ...] = (),
        owned: bool = True,
    ) -> None:
        self.driver = driver
        self._annotations = annotations
        self.outputs: Any = None
        """What the captured function returned (:func:`capture_function`), else None."""
        self.plan_nodes: dict[str, tuple[NodeHandle, ...]] = {}
        """Of a plan's graph: its nodes by the names they have in the plan (a captured call may be
        several); else empty."""
        self.runs = Runs()
        """The runs of its executables, for guards of its outputs; clones share them."""
        self._resource: GraphResource | None = GraphResource(driver, handle, owned=owned)
        self._owners = (owners or OwnerSet()).recorded(driver)
        note_graph(self, self._resource, self._owners)
        self._version: Version | None = None
        self.handover: Handover | None = None
        """What the last executable took over; None before, and after anything of it changed."""
        self._watches: tuple[Watch, ...] = ()
        self._footprint: Footprint | None = None
        self._adopted: Any = None

    @classmethod
    def adopt(cls, obj: Any, driver: Driver | None = None) -> Graph:
        """A borrowed view of another library's graph; keeps ``obj`` alive, destroys nothing.

        torch's random operators take their numbers from where torch's own ``replay()`` puts them:
        launched through graphcore, such a graph draws the same numbers every time.

        Args:
            obj: A captured ``torch.cuda.CUDAGraph(keep_graph=True)``, a cuda.core
                ``GraphDefinition`` or finished ``GraphBuilder``, a ``CUgraph``, a handle as int,
                or a :class:`Graph` (given back as it is).
            driver: The driver of its device; None is the default one.

        Raises:
            CacheTypeError: Not a graph.
            ConfigurationError: A graph that cannot be read: an executable, one still being built,
                or a torch graph without ``keep_graph=True``.
        """
        if isinstance(obj, Graph):
            return obj
        handle = raw_handle(obj)
        chosen = choose_driver() if driver is None else checked_driver(driver)
        owners = OwnerSet().with_(obj, label=f"adopted {type(obj).__name__}")
        graph = cls(chosen, handle, owners=owners, owned=False)
        graph._adopted = obj
        return graph

    # ---- reading -------------------------------------------------------------------------------

    @property
    def handle(self) -> GraphHandle:
        """The driver's handle; LifecycleError after :meth:`close`."""
        return self.resource.handle

    @property
    def owned(self) -> bool:
        """Whether closing destroys the handle; False for adopted graphs."""
        return self.resource.owned

    @property
    def is_closed(self) -> bool:
        return self._resource is None

    @property
    def annotations(self) -> tuple[Annotation, ...]:
        """(first node, past the last node, label) in creation order."""
        return self._annotations

    @annotations.setter
    def annotations(self, annotations: tuple[Annotation, ...]) -> None:
        self._annotations = annotations
        self._version = self.handover = None

    @property
    def owners(self) -> OwnerSet:
        """What the graph keeps alive."""
        return self._owners

    def keep(self, owners: OwnerSet) -> None:
        """Keeps alive ``owners`` instead of what it kept."""
        self._owners = owners.recorded(self.driver)
        self.handover = None

    @property
    def launch_attributes(self) -> LaunchAttributes:
        """Cluster, cooperative flag and priority of every kernel node.

        Read once from a graph of our own (about 1 us a node); an adopted one may change under us
        and is read each time.
        """
        return self.version.attributes

    @property
    def version(self) -> Version:
        """What an executable that takes the graph's parameters remembers; kept as they are."""
        resource = self.resource
        if self._version is not None:
            return self._version
        attributes = LaunchAttributes.read(self.driver, resource.handle)
        version = Version(resource, attributes, self.annotations)
        if resource.owned:
            self._version = version
        return version

    def renew(self, version: Version) -> None:
        """Takes ``version`` for what it is now: it was edited in place."""
        if version.resource.owned:
            self._version = version
        self.handover = None

    def hand_over(self, version: Version | None = None) -> Handover:
        """What an executable takes over from the graph; ``version`` where it was read just now."""
        if self.handover is not None:
            return self.handover
        version = version or self.version
        runs = runs_of(self.runs, self._owners)
        made = Handover(version, runs, self._watches, self._footprint)
        if version.resource.owned:
            self.handover = made
        return made

    def snapshot(self) -> GraphSnapshot:
        """Everything about the graph as plain data: nodes, parameters, edges, labels."""
        return read(self.driver, self.handle, annotations=self.annotations)

    def attributions(self, names: Mapping[str, Any] | None = None) -> list[Attribution]:
        """What each pointer of the graph points into: "arg 2 = layer 4 keys + 8192 bytes".

        By ``names``, else by the tensors that the graph keeps, by their labels, else by the graph's
        own memory, else by torch's allocator, else by the driver's allocation; "ambiguous" where
        two of one kind hold the address. CuPy's pool tells no ranges: its memory is told by
        allocation.

        Args:
            names: Name -> tensor, buffer or (address, bytes).

        Raises:
            CacheTypeError: A named object is no tensor, no buffer and no (address, bytes).
            ConfigurationError: ``names`` is no mapping.
        """
        from graphcore.executable.graph_page import graph_attributions

        return graph_attributions(self, self.snapshot(), names)

    def fingerprint(self, names: Mapping[str, Any] | None = None) -> Fingerprint:
        """What the graph depends on, as ordered fields and a digest.

        Args:
            names: Name -> tensor, buffer or (address, bytes): pointers into these count by name.
        """
        from graphcore.resources.fingerprint import fingerprint

        return fingerprint(self, names, private=self.private_memory())

    def private_memory(self) -> list[tuple[int, int]]:
        """(address, bytes) of memory that is this graph's alone: its torch pool's, temporaries."""
        return own_memory(self.resource, self._owners)

    def pool_blocks(self) -> Blocks | None:
        """The pieces of memory that torch has handed out on the device; None where it has none."""
        torch_blocks = blocks_of(self.driver)
        return None if torch_blocks is None else torch_blocks.read()

    def watch(self, names: Mapping[str, Any] | None = None) -> None:
        """Notes which memory the graph works on, so that a later check sees what became of it.

        A full guard does this when it is made, else the first ``GraphExec.check``; call it right
        after a capture where memory may be freed before. Reads every node (some us each) and asks
        the driver once about each allocation. Executables made before do not learn of it.

        Args:
            names: Name -> tensor, buffer or (address, bytes): what messages call the memory.
                Tensors are watched, not kept alive: a guarded executable hears when one goes.

        Raises:
            LifecycleError: Closed.
            CacheTypeError: A named object is no tensor, no buffer and no (address, bytes).
            ConfigurationError: ``names`` is no mapping.
        """
        watches = self._watches if names is None else watch_all(names, self.driver)
        footprint = Validity(self.resource, watches).look(self.snapshot(), self._owners)
        self._watches, self._footprint = watches, footprint
        self.handover = None

    @property
    def is_watched(self) -> bool:
        """Whether the memory was noted, by :meth:`watch` or a full guard."""
        return self._footprint is not None

    def memory_report(self) -> MemoryReport:
        """What the graph takes or would take, in bytes: pool, allocations, nodes, owners."""
        from graphcore.executable.memory_report import memory_report

        return memory_report(self)

    def drawing(self, names: Mapping[str, Any] | None = None) -> Drawing:
        """The graph as a neutral drawing, its pointers told by the buffers they point into.

        Args:
            names: Name -> tensor, buffer or (address, bytes). None: the tensors that the graph
                keeps alive, by their labels. Other memory is told by allocation.

        Raises:
            LifecycleError: Closed.
            ConfigurationError, CacheTypeError: As of :func:`graphcore.fingerprint`.
        """
        from graphcore.executable.graph_page import graph_drawing

        return graph_drawing(self, names)

    def to_html_page(
        self, title: str = "Graph", names: Mapping[str, Any] | None = None, *, full: bool = False
    ) -> str:
        """One self-contained page: summary, memory, dependencies, picture and tables.

        Args:
            title: The heading.
            names: As of :meth:`drawing`.
            full: Draw every node, however many there are.

        Raises:
            As :meth:`drawing`; ConfigurationError where ``title`` is no text.
        """
        from graphcore.executable.graph_page import graph_page

        return graph_page(self, title, names, full)

    def _repr_html_(self) -> str:
        return self.drawing().to_html()

    def __repr__(self) -> str:
        if self._resource is None:
            return "<Graph closed>"
        try:
            nodes = node_count(len(self.driver.nodes(self._resource.handle)))
        except CudaError:  # a lost context or a closed driver: logs and debuggers still show it
            nodes = "? nodes"
        kind = "" if self._resource.owned else " borrowed"
        return f"<Graph {nodes} {self.driver.name}:{self.driver.device}{kind}>"

    # ---- making others -------------------------------------------------------------------------

    def clone(self) -> Graph:
        """An owned copy with the same owners, labels and outputs."""
        handle = self.driver.clone_graph(self.handle)
        copy = Graph(self.driver, handle, owners=self._owners, annotations=self.annotations)
        copy.inherit(self)
        copy._footprint = self._footprint
        return copy

    def inherit(self, original: Graph) -> None:
        """Takes over what a copy shares with its original: outputs, runs, watched memory."""
        self.outputs, self.runs = original.outputs, original.runs
        self._watches = original._watches
        self.handover = None

    def instantiate(self, guard: Guard | None = None, auto_free: bool = False) -> GraphExec:
        """An executable of the graph as it is now.

        Args:
            guard: What ``launch`` tests. None: only that the executable is open. "owners": also
                a flag that owners set, at no cost: a buffer that was closed, memory watched by
                :meth:`watch` that went, ``GraphExec.mark_stale``. "full": everything, by
                :meth:`GraphExec.check`, before each launch.
            auto_free: Lets a launch free what the launch before it left allocated.

        Raises:
            ConfigurationError: An unknown guard.
            LifecycleError: Closed, a second executable of a graph with a conditional node, or a
                capture under way on this thread that is not relaxed.
            CudaError: The driver's refusal, with the node it blames; out of memory, with a note of
                what the executable needs.
        """
        from graphcore.executable.graph_exec import GraphExec

        if guard is not None and not (isinstance(guard, str) and guard in get_args(Guard)):
            raise ConfigurationError(
                f"guard: expected one of {get_args(Guard)} or None, got {guard!r}"
            )
        if guard == "full" and not self.is_watched:
            self.watch()
        return GraphExec(self, self.make_executable(auto_free), guard=guard, auto_free=auto_free)

    def make_executable(self, auto_free: bool) -> ExecResource:
        """The bare executable behind a :class:`GraphExec`; raises as :meth:`instantiate`."""
        source = self.resource
        refuse_instantiation(self.driver)
        why_not = source.why_not_instantiated()
        if why_not is not None:
            raise LifecycleError(f"graph: {why_not}")
        release_finished()
        with telling_need(self._need):
            handle = self.driver.instantiate(source.handle, auto_free=auto_free)
        source.instantiations += 1
        return ExecResource(self.driver, handle, source, self._owners)

    def _need(self) -> str:
        from graphcore.executable.memory_report import need_of

        return need_of(self.driver, self.handle)

    def has(self, *kinds: NodeKind) -> bool:
        """Whether the graph itself (not one inside it) has a node of one of ``kinds``."""
        return self.resource.has(*kinds)

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of the graph; a second call does nothing. Executables made from it live on."""
        self._resource = self._adopted = self._version = self.handover = None
        self._owners = OwnerSet()
        self.outputs = None

    @property
    def resource(self) -> GraphResource:
        """The handle that executables of this graph share.

        LifecycleError after :meth:`close`, and where the library it was adopted from has destroyed
        it since.
        """
        if self._resource is None:
            raise LifecycleError("graph: expected an open graph, got a closed one")
        if self._adopted is not None:
            refuse_gone(self._adopted, self._resource.handle)
        return self._resource

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
