"""The two kinds of driver handles that graphcore owns here: one graph, one executable.

Each object owns exactly one handle and whatever must outlive it. Destroying waits until no capture
is under way, on any thread: a destroy inside one breaks it. Nothing raises from a finalizer.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, SupportsIndex

from graphcore.driver import Driver, active
from graphcore.driver.records import ExecHandle, GraphHandle, NodeKind, StreamHandle
from graphcore.errors import CacheTypeError, CudaError, GraphcoreError, GraphcoreWarning
from graphcore.executable.retired import Held
from graphcore.resources.lifetime import OwnerSet

_log = logging.getLogger("graphcore")

MEMORY_KINDS = (NodeKind.ALLOC, NodeKind.FREE)


class NotCopied:
    """A base of what owns driver handles: a copy would use them after they were destroyed."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CacheTypeError(
            f"{type(self).__name__}: cannot be copied or pickled, it owns handles of a driver "
            "(Graph.clone copies a graph)"
        )


class GraphResource:
    """One ``CUgraph``, destroyed when the last holder drops this (a borrowed one never is).

    A graph and the executables made from it share one, so that node handles and explanations stay
    valid after the graph was closed.
    """

    __slots__ = ("__weakref__", "_closer", "driver", "handle", "instantiations", "live", "owned")

    def __init__(self, driver: Driver, handle: GraphHandle, *, owned: bool) -> None:
        self.driver = driver
        self.handle = handle
        self.owned = owned
        self.instantiations = 0
        self.live = 0  # executables made from it and not destroyed
        self._closer: Callable[[], object] | None = None
        if owned:
            closer = weakref.finalize(self, _later, "a graph", driver.destroy_graph, handle)
            closer.atexit = False  # the process's end gives everything back
            self._closer = closer

    def close(self) -> None:
        """Destroys an owned graph now, or once no capture is under way, whoever holds it still."""
        if self._closer is not None:
            self._closer()

    def has(self, *kinds: NodeKind) -> bool:
        """Whether the graph itself (not one inside it) has a node of one of ``kinds``."""
        return any(self.driver.node_kind(node) in kinds for node in self.driver.nodes(self.handle))

    def why_not_instantiated(self, *, without: int = 0) -> str | None:
        """Why CUDA makes no further executable of the graph, whatever the capture state; or None.

        Args:
            without: How many of its live executables will be gone by then.
        """
        if self.instantiations and self.has(NodeKind.CONDITIONAL):
            return (
                "expected a first instantiation, got a second one of a graph with a "
                "conditional node, which CUDA allows once; capture or build it again"
            )
        if self.live > without and self.has(*MEMORY_KINDS):
            return (
                "expected no other executable of a graph that owns memory (allocation nodes), got "
                f"{self.live - without}: CUDA allows one at a time; close it, or build the graph "
                "again"
            )
        return None


class ExecResource:
    """One executable, with the graph it was made from and the owners of its operands.

    The owners outlive it until the launches that use them have run (retired.py).

    Attributes:
        is_on_device: Whether something has put it there: an upload, or a launch.
    """

    __slots__ = (
        "__weakref__", "_closer", "driver", "handle", "held", "is_on_device", "source",
    )  # fmt: skip

    def __init__(
        self, driver: Driver, handle: ExecHandle, source: GraphResource, owners: OwnerSet
    ) -> None:
        self.driver = driver
        self.handle = handle
        self.source = source
        self.is_on_device = False
        self.held = Held(driver, owners)
        source.live += 1
        # what is held goes with the finalizer: it must live until the destroy has really happened
        self._closer = weakref.finalize(
            self, _later, "an executable", driver.destroy_exec, handle, (self.held, source)
        )
        self._closer.atexit = False

    def launches_on(self, stream: Any, handle: StreamHandle) -> None:
        """Notes where the next launches go; ``stream`` is held, to be asked about them."""
        self.is_on_device = True
        self.held.launches_on(stream, handle)

    def upload_first(self) -> None:
        """Puts the executable on the device ahead of its first change; nothing where it is there.

        CUDA gives one whose parameters are changed before that a form that stays slow for life: 5
        to 18 % longer launches (docs/driver-notes.md). Where it cannot be uploaded it is changed
        all the same, and the log says so.
        """
        if self.is_on_device:
            return
        try:
            self.driver.upload_aside(self.handle)
        except CudaError as error:
            _log.warning(
                "executable %#x: not uploaded ahead of its first change, so that its launches may "
                "stay some 5 to 18 %% slower than those of a new one: %s",
                self.handle,
                error,
            )
        self.is_on_device = True

    def launches_have_run(self) -> None:
        """Notes that nothing launched up to now runs any more: owners need not wait for it."""
        self.held.stream = self.held.handle = None

    def replace_owners(self, owners: OwnerSet, *, takes_turns: bool = False) -> object:
        """Swaps the owners as a whole, after the driver took the change they belong to.

        Arguments and result as of :meth:`Held.replace`.
        """
        return self.held.replace(owners, takes_turns=takes_turns)

    def close(self) -> None:
        """Destroys the executable now, or once no capture is under way."""
        self._closer()


Keep = tuple[Held, GraphResource]


def _later(
    what: str, destroy: Callable[[Any], None], handle: int, keep: Keep | None = None
) -> None:
    active.when_idle(partial(_destroy, what, destroy, handle, keep))


def _destroy(what: str, destroy: Callable[[Any], None], handle: int, keep: Keep | None) -> None:
    try:
        destroy(handle)
    except GraphcoreError as error:
        warnings.warn(f"while destroying {what}: {error}", GraphcoreWarning, stacklevel=2)
    finally:  # also after Ctrl-C, or where a filter makes the warning an error
        if keep is not None:
            held, source = keep
            source.live -= 1
            held.drop()
