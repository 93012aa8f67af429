"""Runs: how often the executables of a graph have run; counted only where an output is guarded.

All executables of a graph and of its clones write the same outputs, so they share one counter, and
so does a graph in which one of them was embedded. A launch of unguarded executables is not touched:
the counter wraps the bound call, and only once somebody asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from graphcore.driver.records import StreamHandle
from graphcore.resources.lifetime import OwnerSet

_stamps = itertools.count(1)


class Runs:
    """The runs of one graph.

    ``count`` and ``stamp`` mean something while ``is_counting``: how many runs there were since
    then, and when the newest one was by :func:`now`, 0 where there was none. ``stream`` is where it
    went; ``holder`` keeps that stream alive, as far as an object does.
    """

    __slots__ = ("__weakref__", "count", "has_run", "holder", "is_counting", "stamp", "stream")

    def __init__(self) -> None:
        self.count = 0
        self.stamp = 0
        self.has_run = False
        self.is_counting = False
        self.stream: StreamHandle | None = None
        self.holder: Any = None

    def start_counting(self) -> None:
        """From the next binding on, launches count; what ran before is run 0."""
        self.is_counting = True

    def note(self, stream: StreamHandle | None, holder: Any) -> None:
        """One run more, on ``stream``."""
        self.count += 1
        self.stamp = now()
        self.stream, self.holder = stream, holder


def now() -> int:
    """The time by which runs of all graphs are ordered: later than every run noted so far."""
    return next(_stamps)


def runs_of(own: Runs, owners: OwnerSet) -> tuple[Runs, ...]:
    """What a launch of a graph counts for: its own runs, and those of graphs embedded in it."""
    embedded = [owner.object for owner in owners if isinstance(owner.object, Runs)]
    return tuple(dict.fromkeys((own, *embedded))) if embedded else (own,)


def are_noted(runs: Iterable[Runs], stream: StreamHandle | None) -> bool:
    """Whether a binding for ``runs`` would be the plain call and would note nothing new."""
    return not [1 for each in runs if each.is_counting or not each.has_run or each.stream != stream]


def bind_counted(
    call: Callable[[], Any], runs: Iterable[Runs], stream: StreamHandle, holder: Any
) -> Callable[[], Any]:
    """``call``, which launches on ``stream``, as it is, or counting where somebody asked for it."""
    counting = []
    for each in runs:
        each.has_run = True
        each.stream, each.holder = stream, holder
        if each.is_counting:
            counting.append(each)
    if not counting:
        return call

    def counted() -> Any:
        result = call()
        if not result:  # as the launch itself tells success
            for each in counting:
                each.note(stream, holder)
        return result

    return counted
