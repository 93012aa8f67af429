"""The two kinds of driver handles that graphcore owns here: one graph, one executable.

Each object owns exactly one handle and whatever must outlive it. Destroying waits until no capture
is under way, on any thread: a destroy inside one breaks it. Nothing raises from a finalizer.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, SupportsIndex

from graphcore.driver import Driver, active
from graphcore.driver.records import ExecHandle, GraphHandle
from graphcore.errors import CacheTypeError, GraphcoreError, GraphcoreWarning
from graphcore.resources.lifetime import OwnerSet


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

    __slots__ = ("__weakref__", "driver", "handle", "instantiations", "owned")

    def __init__(self, driver: Driver, handle: GraphHandle, *, owned: bool) -> None:
        self.driver = driver
        self.handle = handle
        self.owned = owned
        self.instantiations = 0
        if owned:
            closer = weakref.finalize(self, _later, "a graph", driver.destroy_graph, handle)
            closer.atexit = False  # the process's end gives everything back


class ExecResource:
    """One executable, with the graph it was made from and the owners of its operands."""

    __slots__ = ("__weakref__", "_closer", "driver", "handle", "source")

    def __init__(
        self, driver: Driver, handle: ExecHandle, source: GraphResource, owners: OwnerSet
    ) -> None:
        self.driver = driver
        self.handle = handle
        self.source = source
        # the owners go with the finalizer: they must live until the destroy has really happened
        self._closer = weakref.finalize(
            self, _later, "an executable", driver.destroy_exec, handle, owners
        )
        self._closer.atexit = False

    def replace_owners(self, owners: OwnerSet) -> None:
        """Swaps the owners as a whole, after the driver took the change they belong to."""
        self._closer.detach()
        self._closer = weakref.finalize(
            self, _later, "an executable", self.driver.destroy_exec, self.handle, owners
        )
        self._closer.atexit = False

    def close(self) -> None:
        """Destroys the executable now, or once no capture is under way."""
        self._closer()


def _later(what: str, destroy: Callable[[Any], None], handle: int, keep: object = None) -> None:
    active.when_idle(partial(_destroy, what, destroy, handle, keep))


def _destroy(what: str, destroy: Callable[[Any], None], handle: int, keep: object) -> None:
    del keep  # only had to live until now
    try:
        destroy(handle)
    except GraphcoreError as error:
        warnings.warn(f"while destroying {what}: {error}", GraphcoreWarning, stacklevel=2)
