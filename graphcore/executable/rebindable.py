"""RebindableExec: the half of an executable that is made to work on other buffers.

What is to be done is decided in rebinding.py; here is what it does to the executable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.driver.records import NodeHandle, NodeParams
from graphcore.executable.handles import ExecResource
from graphcore.executable.rebind_request import checked_names
from graphcore.executable.rebinding import RebindOutcome, rebind
from graphcore.executable.updating import UpdatableExec

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph


class RebindableExec(UpdatableExec):
    """What :class:`GraphExec` does with buffers."""

    __slots__ = ()

    def rebind(
        self,
        buffers: Mapping[str, Any] | Iterable[tuple[Any, Any]],
        names: Mapping[str, Any] | None = None,
        reinstantiate: bool = True,
        allow_unused: bool = False,
    ) -> RebindOutcome:
        """Makes the executable work on other buffers, all of them or none.

        Kernel arguments (also inside structures of other libraries), copies and fills, in child
        graphs and conditional bodies too; pointers into the middle of a buffer keep their offset.
        All pointers are exchanged at once, so that two buffers may trade places. A running launch
        keeps what it has.

        Args:
            buffers: (old, new) pairs, or name -> new. Tensors, buffers, or (address, bytes) for
                raw memory. An old one that the graph keeps counts as it was at capture: where a
                tensor got other memory since, that is mended by ``{"its label": tensor}``. The new
                one has the same element type and strides, and is at least as large.
            names: Name -> old, for names that were not given at capture or to ``Graph.watch``. A
                word that lies in one of these as well as in an old buffer is ambiguous.
            reinstantiate: Build a new executable behind this object where CUDA takes the new
                pointers no other way (copies of several rows).
            allow_unused: An old buffer that no node points into is let go, and the new one kept in
                its place.

        Returns:
            What was changed, and how: node by node where that is cheaper, else by a whole update.

        Raises:
            LifecycleError: Closed, a capture is under way on this thread, or a closed buffer.
            CacheTypeError: What is no tensor.
            ConfigurationError: No pairs, an unknown name, old is new, old buffers or new ones that
                overlap, a new one that is smaller, of another dtype or strides, less aligned, on
                the host or of another driver; a word that is ambiguous (names node, argument and
                byte); an old one that no node points into, unless ``allow_unused``.
            UpdateRefused: CUDA refuses, and nothing may be built anew.
            CudaError: Another failure. After any error the executable is as before, or the notes
                say which nodes are not.
        """
        self._refuse_change("rebind")
        known = {**self._watched(), **checked_names(names)}
        return rebind(self, buffers, known, reinstantiate=reinstantiate, allow_unused=allow_unused)

    def _take_anew(self, made: Graph, changes: Mapping[NodeHandle, NodeParams]) -> ExecResource:
        """As :meth:`_take_copy`, by a new executable behind this object; returns the old one."""
        version = replace(self._current.version, resource=made.resource)
        successor = self._current.successor(version, self._owners)
        nodes = zip(self._current.snapshot().walk(), successor.snapshot().walk(), strict=True)
        became = {mine.handle: theirs.handle for mine, theirs in nodes}  # a copy keeps their order
        replaced = self._replace(made, successor)
        for handle, params in changes.items():
            self._current.note(handle, params)
        self._changes_become_a_version(became)
        self._graph = self._copy = made
        self._moved(version, successor)
        return replaced
