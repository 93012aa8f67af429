"""Touches: who touched which bytes of one resource, found by range.

What does not overlap in extent shares no byte, whatever its strides: only what does is held against
each other exactly. Finding it costs about as much as there is of it, not as much as there are
nodes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from graphcore.plan.accesses import Access
from graphcore.plan.shared_bytes import Region


class Touch:
    """An access of the node ``index``, and the bytes it reaches; None where it is of no buffer."""

    __slots__ = ("access", "index", "region")

    def __init__(self, index: int, access: Access) -> None:
        self.index = index
        self.access = access
        self.region = None if access.view is None else Region.of(access.view)

    def conflicts(self, other: Touch) -> bool:
        """Whether the order of the two matters; both must be of one resource."""
        if not (self.access.writes or other.access.writes):
            return False
        if self.region is None or other.region is None:
            return True
        return self.region.meets(other.region)


class Touches:
    """The touches of one resource; those of a buffer by range, all others one and all."""

    def __init__(self) -> None:
        self._reads, self._writes = _Ranges(), _Ranges()
        # by node, in the order in which they came
        self._by_node: dict[int, list[Touch]] = {}

    def add(self, touch: Touch) -> None:
        """Notes a touch."""
        self._by_node.setdefault(touch.index, []).append(touch)
        self._side(touch).add(touch)

    def of(self, index: int) -> list[Touch]:
        """The touches of one node."""
        return self._by_node.get(index, [])

    def near(self, touch: Touch) -> set[int]:
        """The nodes whose order to ``touch`` may matter: in reach of it, one of the two writing."""
        if touch.region is None:
            return {
                index
                for index, touches in self._by_node.items()
                if touch.access.writes or any(each.access.writes for each in touches)
            }
        low, high = touch.region.low, touch.region.high
        found = {each.index for each in self._writes.overlapping(low, high)}
        if touch.access.writes:
            found.update(each.index for each in self._reads.overlapping(low, high))
        return found

    def forget_behind(self, write: Touch) -> None:
        """Forgets the nodes of which ``write``, which comes after them all, hides everything.

        Whoever conflicts with one of them conflicts with it. It hides what lies in bytes that it
        touches without a gap, and the very view that it writes.
        """
        region = write.region
        if region is None:
            self._by_node.clear()
            return
        inside = {touch.index for touch in self._reads.overlapping(region.low, region.high)}
        inside.update(touch.index for touch in self._writes.overlapping(region.low, region.high))
        for index in inside:
            touches = self._by_node[index]
            if all(_is_hidden(touch, region) for touch in touches):
                del self._by_node[index]
                for touch in touches:
                    self._side(touch).remove(touch)

    def _side(self, touch: Touch) -> _Ranges:
        return self._writes if touch.access.writes else self._reads


_Key = tuple[int, int, int]  # low, high, a number that is the touch's alone


class _Ranges:
    """Touches by where they begin, sorted, apart by how long they are.

    Those of one size class that reach into a range begin at most a size before it.
    """

    def __init__(self) -> None:
        self._classes: dict[int, list[_Key]] = {}
        self._touches: dict[int, Touch] = {}

    def add(self, touch: Touch) -> None:
        """Adds a touch of some bytes."""
        region = touch.region
        if region is not None and region.low < region.high:
            insort(self._classes.setdefault(_size_class(region), []), _key(touch, region))
            self._touches[id(touch)] = touch

    def remove(self, touch: Touch) -> None:
        """Takes a touch away that was added."""
        region = touch.region
        if region is not None and region.low < region.high:
            keys = self._classes[_size_class(region)]
            del keys[bisect_left(keys, _key(touch, region))]
            del self._touches[id(touch)]

    def overlapping(self, low: int, high: int) -> Iterator[Touch]:
        """The touches that have a byte between ``low`` and ``high`` in their extent."""
        if low >= high:
            return
        for size, keys in self._classes.items():
            at = bisect_left(keys, (low - (1 << size),))
            while at < len(keys) and keys[at][0] < high:
                end, number = keys[at][1:]
                if end > low:
                    yield self._touches[number]
                at += 1


def _key(touch: Touch, region: Region) -> _Key:
    return region.low, region.high, id(touch)


def _size_class(region: Region) -> int:
    return (region.high - region.low).bit_length()


def _is_hidden(touch: Touch, region: Region) -> bool:
    """Whether a write of ``region`` writes all that was touched."""
    before = touch.region
    if before is None or not region.is_dense:
        return before == region
    return region.low <= before.low and before.high <= region.high
