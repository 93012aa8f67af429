"""GuardedExec: the half of an executable that knows what it depends on, and whether that holds.

What it depends on is looked at when somebody asks, or where a guard has to listen to owners: an
executable without a guard takes over other graphs without a thought about it.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from graphcore.driver.records import NodeHandle
from graphcore.executable.changing import CLOSED, ChangeableExec
from graphcore.executable.handover import Handover
from graphcore.executable.validity import Validity, stale_error
from graphcore.resources.lifetime import OwnerSet
from graphcore.resources.spans import Span
from graphcore.resources.staleness import StaleResource

if TYPE_CHECKING:
    from graphcore.executable.graph import Guard

CHECK_FIRST = "check first"


class GuardedExec(ChangeableExec):
    """What :class:`GraphExec` tells of what it depends on."""

    __slots__ = ("__weakref__", "_guard", "_marked", "_taken", "_validity")

    _guard: Guard | None
    _marked: StaleResource | None
    _taken: Handover  # of the graph it took over last
    _validity: Validity | None  # made when it is asked for, or where it has to listen

    def check(self) -> list[StaleResource]:
        """What the graph depends on and is no longer what it was; empty where it is valid.

        Compares every tensor the graph keeps or watches (address, bytes, element type, allocation)
        and all other memory its nodes point into, as it was at the first look (a full guard,
        :meth:`Graph.watch`, else the first call of this); reports what :meth:`mark_stale` said.
        """
        self._refuse_closed("check")
        return self._found(everything=True)

    def mark_stale(self, reason: str, label: str = "") -> None:
        """Says that a buffer the graph uses has changed; owners of buffers call this.

        With guard "owners" or "full" every later launch raises StaleGraphError until an update
        brings a graph of the new buffers; without a guard only :meth:`check` tells.
        """
        if self._refusal == CLOSED:
            return
        self._marked = StaleResource(label, "marked", "as captured", reason)
        if self._guard is not None:
            self._refusal = CHECK_FIRST
            self._forget_stream()

    @property
    def marked(self) -> StaleResource | None:
        """What :meth:`mark_stale` said since the last update; None where nothing was said."""
        return self._marked

    def _look_closer(self) -> None:
        """Raises what the flag means; returns where a guard finds nothing."""
        self._refuse_closed("launch")
        found = self._found(everything=self._guard == "full")
        if not found and self._guard == "owners":
            self._refusal = None  # what rang meant nothing: a view holds the memory still
        if found:
            raise stale_error(found)

    def _found(self, *, everything: bool) -> list[StaleResource]:
        found = self._depends().find(self._owners, self._current, everything=everything)
        return found if self._marked is None else [self._marked, *found]

    def _depends(self) -> Validity:
        """What the version depends on, by what was known of it when it was taken over."""
        if self._validity is None:
            taken = self._taken
            self._validity = Validity(taken.version.resource, taken.watches, taken.footprint)
        return self._validity

    def _listen(self) -> None:
        """Begins anew with what the version depends on; with a guard, its owners can ring."""
        self._stop_listening()
        if self._guard is not None:
            ring = partial(_look_again, weakref.ref(self))
            self._depends().listen(ring, self._owners)

    def _stop_listening(self) -> None:
        if self._validity is not None:
            self._validity.close()
            self._validity = None

    def _forgive(self) -> None:
        """What was said to be stale is so no more."""
        self._marked = None
        self._refusal = CHECK_FIRST if self._guard == "full" else None

    # ---- what a change does to it --------------------------------------------------------------

    def _own(self, owners: OwnerSet) -> None:
        super()._own(owners)
        if self._validity is not None:
            self._validity.hear(owners)

    def _remembers_memory(self) -> bool:
        if self._validity is None:
            return self._taken.footprint is not None
        return self._validity.has_looked

    def _changes_become_a_version(
        self, became: Mapping[NodeHandle, NodeHandle] | None = None
    ) -> None:
        self._depends().rebase(self._current, became)

    def _look_at_new(self) -> None:
        if self._validity is not None:
            self._validity.catch_up(self._owners, self._current)

    def _watched(self) -> Mapping[str, Any]:
        """Memory that is watched under a name."""
        return self._depends().names() if self._taken.watches else {}

    def _exchanged(self, old: Sequence[Span]) -> None:
        """Nothing of the executable points into ``old`` any more."""
        if self._taken.watches:
            self._depends().forget(old)
        marked = self._marked
        if marked is not None and marked.label in ("", *(span.name for span in old)):
            self._forgive()

    # ---- what the half that launches has -------------------------------------------------------

    @abstractmethod
    def _forget_stream(self) -> None:
        """Lets the next launch look closer before it launches."""


def _look_again(executable: weakref.ref[GuardedExec]) -> None:
    """Lets an executable look at its owners before its next launch; called from anywhere."""
    found = executable()
    if found is not None and found._refusal is None:
        found._refusal = CHECK_FIRST
        found._forget_stream()
