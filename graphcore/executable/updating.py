"""UpdatableExec: the half of an executable that takes over whole graphs.

In place where the driver can, else by a new executable behind the same object; with a reason, and
with advice where it repeats. Which is to be done is decided in update.py, and counted.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from graphcore.errors import UpdateRefused
from graphcore.executable.changing import ChangeableExec
from graphcore.executable.handles import MEMORY_KINDS
from graphcore.executable.update import (
    UPDATED,
    Refusal,
    UpdateOutcome,
    UpdateStatus,
    Version,
    check_new_graph,
    try_in_place,
)
from graphcore.executable.update_history import UpdateHistory

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph, Guard

_log = logging.getLogger("graphcore")


class UpdatableExec(ChangeableExec):
    """What :class:`GraphExec` does with whole graphs."""

    __slots__ = ("_auto_free", "_guard", "_history")

    _auto_free: bool
    _guard: Guard | None
    _history: UpdateHistory

    def update(
        self, graph: Graph, reinstantiate: bool = True, strict: bool = False
    ) -> UpdateOutcome:
        """Makes the executable do what ``graph`` says, in place where the driver can.

        A change the driver accepts and does not apply (cluster sizes) is found before. A running
        launch is not disturbed. Owners are swapped as a whole, after the change was accepted.

        Args:
            graph: A graph of the same driver.
            reinstantiate: Where an update in place is impossible, build a new executable behind
                this object; the old one goes after the new one stands. Where CUDA makes no further
                executable of the graph either, the outcome is REFUSED and says so.
            strict: A refusal is an exception.

        Returns:
            The outcome: status, reason, node, field and rule; advice where it repeats.

        Raises:
            LifecycleError: Closed, or a capture is under way on this thread, or, where a new
                executable is needed, on another one in mode "global". Updates in place are allowed
                beside captures of other threads.
            CacheTypeError: ``graph`` is no :class:`Graph`.
            ConfigurationError: ``graph`` is of another driver, device or context.
            UpdateRefused: ``strict``, and the update was refused; nothing changed.
            CudaError: Not a refusal, but a failure; the executable is as before.
        """
        self._refuse_closed("update")
        check_new_graph(self.driver, graph)
        if self._guard == "full" and not graph.is_watched:
            graph.watch()
        version = Version.of(graph, read_again=graph.resource is self._version.resource)
        refusal = try_in_place(
            self.driver, self._resource.handle, self._version, version, self._current.snapshot
        )
        if refusal is None:
            self._resource.replace_owners(graph.owners)
            self._history.note_success()
            outcome = UPDATED
        else:
            outcome = self._without_place(graph, refusal, reinstantiate=reinstantiate)
            if strict and not outcome.is_current:
                raise UpdateRefused(f"update: {outcome.reason}")
        if outcome.is_current:
            self._take(graph, version)
        _log.info("update of %r: %s", self, outcome)
        return outcome

    @property
    def updates(self) -> UpdateHistory:
        """How many updates were in place, re-instantiated and refused."""
        return self._history

    def _without_place(
        self, graph: Graph, refusal: Refusal, *, reinstantiate: bool
    ) -> UpdateOutcome:
        """What becomes of an update that cannot be done in place."""
        is_own = self._resource.source is graph.resource
        why_not = graph.resource.why_not_instantiated(without=int(is_own))
        is_built = reinstantiate and why_not is None
        if is_built:
            self._replace(graph)
        elif reinstantiate:
            refusal = replace(refusal, reason=f"{refusal.reason}; re-instantiation: {why_not}")
        advice = self._history.note(refusal, is_built=is_built)
        status = UpdateStatus.REINSTANTIATED if is_built else UpdateStatus.REFUSED
        return refusal.outcome(status, advice)

    def _replace(self, graph: Graph) -> None:
        """Puts a new executable of ``graph`` in the place of the old one."""
        old = self._resource
        goes_first = old.source is graph.resource and graph.has(*MEMORY_KINDS)
        if goes_first:  # CUDA allows one live executable of a graph that allocates
            old.close()
        try:
            self._resource = graph.make_executable(self._auto_free)
        except BaseException:
            if goes_first:
                self.close()
            raise
        self._unbind()
        old.close()

    # ---- what the half that launches has -------------------------------------------------------

    @abstractmethod
    def _take(self, graph: Graph, version: Version) -> None:
        """Makes ``graph`` what the executable is known to run."""
