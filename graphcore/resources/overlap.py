"""Whether strided memory overlaps, decided exactly: what a copy and what a plan must know.

An element's place is a sum of steps taken so many times; two places meet where a bounded linear
equation has a solution. The search prunes by reach and by divisibility, so ordinary views are
decided in a few steps; one that would take more than ``_MOST_STEPS`` counts as overlapping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

Sides = Sequence[tuple[int, int]]
"""(size, stride) of each dimension, in one unit for size and stride alike."""

_MOST_STEPS = 20_000


def span(sides: Sides) -> tuple[int, int]:
    """(lowest, highest) offset that these dimensions reach; both 0 for one element."""
    reaches = [(size - 1) * stride for size, stride in sides]
    return sum(min(0, reach) for reach in reaches), sum(max(0, reach) for reach in reaches)


def overlaps_itself(sides: Sides) -> bool:
    """Whether two different indices name the same place."""
    steps = sorted(((abs(stride), size - 1) for size, stride in sides if size > 1), reverse=True)
    if _is_nested(steps):
        return False
    # two indices whose first difference (at least 1) is in dimension k, the rest being free
    for k, (step, most) in enumerate(steps):
        rest = steps[k + 1 :]
        target = sum(inner * count for inner, count in rest) - step
        if _is_reached(target, [(step, most - 1), *((inner, 2 * count) for inner, count in rest)]):
            return True
    return False


@lru_cache(maxsize=1024)
def overlap(
    first: tuple[tuple[int, int], ...],
    second: tuple[tuple[int, int], ...],
    distance: int,
    itemsize: int,
    other_itemsize: int = 0,
) -> bool:
    """Whether two views share a byte.

    Args:
        first: (size, stride in bytes) of each dimension.
        second: The same of the other view.
        distance: Address of ``second`` less address of ``first``, bytes.
        itemsize: Bytes of an element of the first.
        other_itemsize: Of the second; 0 where it is the same.
    """
    width = other_itemsize or itemsize
    lowest, highest = span(first)
    other_lowest, other_highest = span(second)
    if distance + other_lowest >= highest + itemsize:
        return False
    if distance + other_highest + width <= lowest:
        return False
    terms = [(stride, size - 1) for size, stride in first]
    terms += [(-stride, size - 1) for size, stride in second]
    # which byte of the one element is which of the other
    terms.append((1, itemsize + width - 2))
    return _is_reached(distance + width - 1, terms)


def _is_nested(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether each step, largest first, is longer than all smaller ones together."""
    reach = 0
    for step, most in reversed(steps):
        if step <= reach:
            return False
        reach += step * most
    return True


def _is_reached(target: int, terms: Iterable[tuple[int, int]]) -> bool:
    """Whether ``target`` is a sum of step * count, 0 <= count <= most, over (step, most)."""
    counts: dict[int, int] = {}
    for step, most in terms:
        # a negative step taken n times is a positive one not taken (most - n) times
        target -= min(0, step) * most
        if step and most:
            counts[abs(step)] = counts.get(abs(step), 0) + most
    return _Search(sorted(counts.items(), reverse=True)).finds(target)


class _Search:
    """One search, largest step first."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        self._steps = steps
        self._reaches = [0]
        self._divisors = [0]
        for step, most in reversed(steps):
            self._reaches.insert(0, self._reaches[0] + step * most)
            self._divisors.insert(0, math.gcd(self._divisors[0], step))
        self._seen: set[tuple[int, int]] = set()
        self._left = _MOST_STEPS

    def finds(self, target: int, depth: int = 0) -> bool:
        if target == 0:
            return True
        if not 0 <= target <= self._reaches[depth] or target % self._divisors[depth]:
            return False
        if depth + 1 == len(self._steps):
            return True
        if (depth, target) in self._seen:
            return False
        self._seen.add((depth, target))
        return any(
            self._left < 0 or self.finds(rest, depth + 1) for rest in self._rests(target, depth)
        )

    def _rests(self, target: int, depth: int) -> Iterable[int]:
        """What can be left of ``target`` for the smaller steps to make up."""
        step, most = self._steps[depth]
        fewest = max(0, -(-(target - self._reaches[depth + 1]) // step))
        most = min(most, target // step)
        # only every ``period``-th count leaves something the smaller steps divide
        divisor = self._divisors[depth + 1]
        shared = math.gcd(step, divisor)
        period = divisor // shared
        if period > 1:
            wanted = (target // shared) * pow(step // shared, -1, period) % period
            fewest += (wanted - fewest) % period
        for count in range(fewest, most + 1, period):
            self._left -= 1
            yield target - step * count
