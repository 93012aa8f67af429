"""UpdatableExec: the half of an executable that takes over whole graphs.

In place where the driver can, else by a new executable behind the same object; with a reason, and
with advice where it repeats. Which is to be done is decided in update.py, and counted.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.driver.active import UNDER_WAY
from graphcore.errors import CudaError, UpdateRefused
from graphcore.executable.guarded import GuardedExec
from graphcore.executable.handles import MEMORY_KINDS, ExecResource
from graphcore.executable.handover import Handover
from graphcore.executable.switches import KnownSwitches, Switch, Switches
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
from graphcore.resources.lifetime import OwnerSet

if TYPE_CHECKING:
    from graphcore.executable.current import CurrentParameters
    from graphcore.executable.graph import Graph

_log = logging.getLogger("graphcore")


class UpdatableExec(GuardedExec):
    """What :class:`GraphExec` does with whole graphs."""

    __slots__ = ("_auto_free", "_history", "_known_switches", "_switches")

    _auto_free: bool
    _history: UpdateHistory
    _known_switches: KnownSwitches
    _switches: Switches  # from the version it has
    _call: Callable[[], Any]  # the bound launch

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
            CudaError: Not a refusal, but a failure; the executable is as before, unless the notes
                say what it is.
        """
        try:
            taken = graph.handover
        except AttributeError:  # no graph
            taken = None
        # what is known to be no more than a switch costs no more than the driver's call
        if taken is not None and self._refusal is None and self._current.is_fresh:
            switch = self._switches.get(taken.stamp)
            if (
                switch is not None
                and switch.turn is switch.held.turn
                and not UNDER_WAY
                and not switch.call()
            ):
                # as _take, where nothing but the version is another one
                current, history = self._current, self._history
                self._graph = graph
                self._taken = taken
                self._switches = switch.onward
                self._marked = None
                current.version = taken.version
                self._owners = current.base_owners = switch.held.owners = graph._owners
                history.updated += 1
                history.in_a_row = 0
                if switch.bound is not self._call or self._validity is not None:
                    self._follow(switch)
                if _log.isEnabledFor(logging.INFO):
                    _log.info("update of %r: %s", self, UPDATED)
                return UPDATED
        return self._update(graph, reinstantiate=reinstantiate, strict=strict)

    def _update(self, graph: Graph, *, reinstantiate: bool, strict: bool) -> UpdateOutcome:
        """An update that is not known to be a plain switch."""
        self._refuse_closed("update")
        check_new_graph(self.driver, graph)
        if self._guard == "full" and not graph.is_watched:
            graph.watch()
        before = self._current.version
        is_own = graph.resource is before.resource
        version = Version.of(graph, read_again=is_own)
        # the switch from here on to this graph is known where both are what they always are
        is_plain = not is_own and not self._current.changes()
        refusal = try_in_place(self.driver, self._resource, before, version, self._current.snapshot)
        replaced = successor = None
        if refusal is None:
            self._history.note_success()
            outcome = UPDATED
        else:
            why_not = self._why_not_replaced(graph)
            if reinstantiate and why_not is None:
                successor = self._current.successor(version, graph.owners)
                replaced = self._replace(graph, successor)
            elif reinstantiate:
                refusal = replace(refusal, reason=f"{refusal.reason}; re-instantiation: {why_not}")
            outcome = self._outcome_of(refusal, is_built=replaced is not None)
            if strict and not outcome.is_current:
                raise UpdateRefused(f"update: {outcome.reason}")
        if outcome.is_current:
            if is_own:
                graph.renew(version)
            taken = graph.hand_over(version)
            before_it = self._switches if is_plain and replaced is None else {}
            comes_back = self._known_switches.know(taken)
            self._take(taken, graph, successor)
            turn = self._let_go(replaced, graph.owners, takes_turns=comes_back)
            self._remember(before_it, taken, turn, is_lasting=graph.owned)
        _log.info("update of %r: %s", self, outcome)
        return outcome

    def _remember(
        self, before: Switches, taken: Handover, turn: object, *, is_lasting: bool
    ) -> None:
        """Notes how the executable came to ``taken`` from the version that has ``before``.

        Args:
            before: The switches from the version it had.
            taken: What it took over.
            turn: In which the owners of before wait.
            is_lasting: Whether it is of a graph of ours; a borrowed one may change.
        """
        if not is_lasting:
            self._switches = {}
            return
        self._switches = self._known_switches.after(taken.stamp)
        executable, graph = self._resource.handle, taken.version.resource.handle
        call = self.driver.bind_update(executable, graph)
        before[taken.stamp] = Switch(call, self._resource.held, turn, self._switches)

    @property
    def updates(self) -> UpdateHistory:
        """How many updates were in place, re-instantiated and refused."""
        return self._history

    def _why_not_replaced(self, graph: Graph) -> str | None:
        """Why no executable of ``graph`` can take the place of this one; or None."""
        is_own = self._resource.source is graph.resource
        return graph.resource.why_not_instantiated(without=int(is_own))

    def _outcome_of(self, refusal: Refusal, *, is_built: bool) -> UpdateOutcome:
        """The outcome of an update that could not be done in place."""
        advice = self._history.note(refusal, is_built=is_built)
        status = UpdateStatus.REINSTANTIATED if is_built else UpdateStatus.REFUSED
        return refusal.outcome(status, advice)

    def _replace(self, graph: Graph, successor: CurrentParameters) -> ExecResource:
        """Puts a new executable of ``graph`` in the place of the old one, which it returns."""
        old = self._resource
        goes_first = old.source is graph.resource and graph.has(*MEMORY_KINDS)
        if goes_first:  # CUDA allows one live executable of a graph that allocates
            old.close()
        try:
            made = self._make(graph, successor)
        except BaseException as error:
            if goes_first:
                self.close()
                error.add_note(
                    "the executable is closed: CUDA allows one of a graph that allocates, so that "
                    "the old one went before the new one was made"
                )
            raise
        self._resource = made
        self._known_switches.forget()
        self._switches = {}
        self._unbind()
        return old

    def _make(self, graph: Graph, successor: CurrentParameters) -> ExecResource:
        """An executable of ``graph``, its nodes switched off as ``successor`` says."""
        made = graph.make_executable(self._auto_free)
        try:
            for handle in successor.disabled:
                self.driver.set_node_enabled(made.handle, handle, False)
        except BaseException:
            made.close()
            raise
        return made

    def _let_go(
        self, replaced: ExecResource | None, owners: OwnerSet, *, takes_turns: bool = False
    ) -> object:
        """Gives up what ran before, once everything here says what runs now.

        It asks the driver, which may fail or be interrupted. Returns the turn in which the owners
        of before wait.

        Raises:
            CudaError: The driver's, noting that the change was made.
        """
        self._switches = {}
        try:
            if replaced is not None:
                replaced.close()
            turn = self._resource.replace_owners(owners, takes_turns=takes_turns)
            if replaced is None:
                self._keep_disabled()
            self._look_at_new()
        except CudaError as error:
            error.add_note("the change was made: the executable runs the new parameters")
            raise
        return turn

    # ---- what the half that launches has -------------------------------------------------------

    @abstractmethod
    def _take(self, taken: Handover, graph: Graph, successor: CurrentParameters | None) -> None:
        """Makes ``graph``, which handed over ``taken``, what the executable is known to run.

        ``successor`` is what is known of a new executable of it; None: it was an update in place.
        """

    @abstractmethod
    def _follow(self, switch: Switch) -> None:
        """The rest of a switch: what listens to owners, and whether the bound launch will do."""
