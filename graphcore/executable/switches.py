"""Switch: a whole update that an executable has done before, so that it may be done by one call.

Two graphs that take turns on one executable (two sets of buffers, a prompt and a step) make it
change at every step. What has to be looked at before an update is accepted, and whether the driver
would accept it and not apply it, was looked at the first time; graphs of ours stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable

from graphcore.executable.handover import Handover
from graphcore.executable.retired import Held


class Switch:
    """From the version an executable has to another one.

    It keeps neither graph alive: who asks for it has the other one, by whose stamp it is found.

    Attributes:
        bound: The bound launch that is known to do for the other version too.
        call: The driver's prepared update; falsy where it was accepted.
        held: What the executable keeps alive.
        turn: The object there for as long as the owners of both may take turns.
        onward: The switches from the other version on.
    """

    __slots__ = ("bound", "call", "held", "onward", "turn")

    def __init__(
        self, call: Callable[[], object], held: Held, turn: object, onward: Switches
    ) -> None:
        self.bound: Callable[[], object] | None = None
        self.call = call
        self.held = held
        self.turn = turn
        self.onward = onward


Switches = dict[int, Switch]
"""The switches from one version on, by the stamp of the handover they lead to."""

_MOST_VERSIONS = 16


class KnownSwitches:
    """The switches of one executable, from the versions that it came to know."""

    __slots__ = ("_from",)

    def __init__(self) -> None:
        self._from: dict[int, Switches] = {}

    def know(self, taken: Handover | None) -> bool:
        """Whether the executable has had this version before."""
        return taken is not None and taken.stamp in self._from

    def after(self, stamp: int) -> Switches:
        """Those from the version with this stamp on; past a bound all others are forgotten."""
        if stamp not in self._from and len(self._from) >= _MOST_VERSIONS:
            self.forget()
        return self._from.setdefault(stamp, {})

    def forget(self) -> None:
        """Forgets them all: they are of an executable that is gone, or too many."""
        for switches in self._from.values():
            switches.clear()
        self._from.clear()
