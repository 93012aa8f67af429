"""Handover: what an executable remembers of a graph it took over, as one value, made once.

A graph keeps its handover as long as nothing of it changes, so that an executable which comes back
to the graph needs to ask for nothing. What the graph learns later is in its next handover. It holds
no owner: an executable may let go of some of them while it remembers the rest.
"""

from __future__ import annotations

import itertools

from graphcore.executable.runs import Runs
from graphcore.executable.update import Version
from graphcore.resources.footprint import Footprint
from graphcore.resources.watching import Watch

_stamps = itertools.count(1)


class Handover:
    """What was handed over; never changed.

    Args:
        version: The parameters.
        runs: What a launch counts for: the graph's runs, and those of graphs embedded in it.
        watches: Memory that is watched.
        footprint: The memory that the nodes work on, where it was looked at.

    Attributes:
        stamp: A number that no other handover has, or ever will have.
    """

    __slots__ = ("footprint", "runs", "stamp", "version", "watches")

    def __init__(
        self,
        version: Version,
        runs: tuple[Runs, ...],
        watches: tuple[Watch, ...] = (),
        footprint: Footprint | None = None,
    ) -> None:
        self.version = version
        self.runs = runs
        self.watches = watches
        self.footprint = footprint
        self.stamp = next(_stamps)
