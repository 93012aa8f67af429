"""GraphUids: numbers by which a graph is known to be unchanged, without looking at its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from weakref import WeakKeyDictionary

from graphcore.errors import CacheTypeError

_numbers = itertools.count(1)  # of the process: no two graphs ever have one number


class GraphUids:
    """Gives a graph another uid whenever it was changed.

    A uid never comes back: not for a graph that is changed and changed back, and not for another
    graph at the same address. 0 is nobody's.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[object, tuple[Hashable, int]] = WeakKeyDictionary()

    def of(self, graph: object, revision: Hashable) -> int:
        """The uid of ``graph`` as it is now.

        Args:
            graph: Compared by identity; not kept alive.
            revision: Another one after each change of it, for instance a count of changes.

        Raises:
            CacheTypeError: ``graph`` cannot be referred to weakly, or compares by content.
        """
        if type(graph).__eq__ is not object.__eq__:
            raise CacheTypeError(
                f"graph: expected an object that compares by identity, got {type(graph).__name__}"
            )
        try:
            known = self._known.get(graph)
        except TypeError as error:
            message = f"graph: expected an object that weak references take: {error}"
            raise CacheTypeError(message) from None
        if known is not None and known[0] == revision:
            return known[1]
        uid = next(_numbers)
        self._known[graph] = (revision, uid)
        return uid
