"""Layered layout: boxes on ranks, links that go down, long pictures cut into columns.

Every box gets a place, no two overlap, and inside one column every link goes down. The steps are
the classic ones: longest-path ranks, stand-ins for links that skip ranks, barycenter ordering, and
positions that are as near to their neighbours as the order allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from graphcore.drawing.crossings import order_ranks
from graphcore.drawing.model import Drawing
from graphcore.drawing.order import ranks, topological
from graphcore.drawing.positions import place

GAP_X, GAP_Y, MARGIN = 22, 30, 18
COLUMN_GAP = 54
# a picture higher than this is cut into columns
_TALL = 900
# and gets as many as keep its height below this part of its width
_ASPECT = 0.8
_WIDEST = 1500
# boxes on one rank; what does not fit goes on the next
_PER_RANK = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box is: its left upper corner and size in pixels, its rank and its column."""

    x: float
    y: float
    width: float
    height: float
    rank: int
    column: int


@dataclass(frozen=True, slots=True)
class Route:
    """A link's way: the points it passes. Where ``column`` changes it goes through the gutter."""

    link: int
    points: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all boxes, in their order, the routes of all links, and the whole size.

    ``gutters`` are the x of the middle of the gap to the right of each column.
    """

    places: tuple[Place, ...]
    routes: tuple[Route, ...]
    gutters: tuple[float, ...]
    width: float
    height: float


def lay_out(drawing: Drawing, sizes: Sequence[tuple[float, float]]) -> Layout:
    """Places the boxes of a drawing; ``sizes`` are their (width, height) in pixels."""
    if not drawing.boxes:
        return Layout((), (), (), 2 * MARGIN, 2 * MARGIN)
    return _Layers(drawing, sizes).layout()


class _Layers:
    """Boxes and stand-ins on ranks; items past the number of boxes are stand-ins."""

    def __init__(self, drawing: Drawing, sizes: Sequence[tuple[float, float]]) -> None:
        count = len(drawing.boxes)
        links = [
            (number, link.source, link.target)
            for number, link in enumerate(drawing.links)
            if link.source != link.target
        ]
        pairs = [(source, target) for _, source, target in links]
        self.numbers = [number for number, _, _ in links]
        self.count = count
        self.widths = [width for width, _ in sizes]
        self.heights = [height for _, height in sizes]
        position = {index: at for at, index in enumerate(topological(count, pairs))}
        # a link against the order (of a cycle) is laid out as if it went the other way
        self.flipped = [position[source] > position[target] for source, target in pairs]
        down = [
            pair[::-1] if flipped else pair
            for pair, flipped in zip(pairs, self.flipped, strict=True)
        ]
        self.rank = ranks(count, down, _PER_RANK)
        self.chains = [self._chain(source, target) for source, target in down]

    def _chain(self, source: int, target: int) -> list[int]:
        """Source, a stand-in on every rank between, target."""
        chain = [source]
        for rank in range(self.rank[source] + 1, self.rank[target]):
            chain.append(len(self.rank))
            self.rank.append(rank)
            self.widths.append(2.0)
            self.heights.append(0.0)
        return [*chain, target]

    def layout(self) -> Layout:
        hops = [pair for chain in self.chains for pair in pairwise(chain)]
        rows = order_ranks(self.rank, hops)
        centers = place(rows, hops, self.widths, GAP_X)
        tops, cuts = self._columns(rows, hops)
        return self._drawn(rows, centers, tops, cuts)

    def _columns(
        self, rows: Sequence[Sequence[int]], hops: Sequence[tuple[int, int]]
    ) -> tuple[list[float], list[int]]:
        """The height of each rank, and the first rank of every column."""
        tall = [max(self.heights[item] for item in row) + GAP_Y for row in rows]
        total = sum(tall)
        width = _spread(rows, self.widths) + COLUMN_GAP
        columns = 1
        while (
            total > _TALL
            and total / columns > _ASPECT * columns * width
            and (columns + 1) * width <= _WIDEST
        ):
            columns += 1
        crossing = [0] * (len(rows) + 1)
        for source, _ in hops:
            crossing[self.rank[source] + 1] += 1
        return tall, _cut(tall, crossing, columns)

    def _drawn(
        self,
        rows: Sequence[Sequence[int]],
        centers: Sequence[float],
        tall: Sequence[float],
        cuts: Sequence[int],
    ) -> Layout:
        x = [0.0] * len(self.rank)
        top = [0.0] * len(rows)
        column_of = [0] * len(rows)
        gutters = []
        left, bottom = float(MARGIN), 0.0
        for column, start in enumerate(cuts):
            stop = cuts[column + 1] if column + 1 < len(cuts) else len(rows)
            items = [item for row in rows[start:stop] for item in row]
            low = min(centers[item] - self.widths[item] / 2 for item in items)
            high = max(centers[item] + self.widths[item] / 2 for item in items)
            for item in items:
                x[item] = left + centers[item] - low
            y = float(MARGIN)
            for rank in range(start, stop):
                top[rank], column_of[rank] = y, column
                y += tall[rank]
            left += high - low + COLUMN_GAP
            gutters.append(left - COLUMN_GAP / 2)
            bottom = max(bottom, y - GAP_Y)
        places = tuple(
            Place(
                round(x[item] - self.widths[item] / 2, 1),
                top[self.rank[item]],
                self.widths[item],
                self.heights[item],
                self.rank[item],
                column_of[self.rank[item]],
            )
            for item in range(self.count)
        )
        routes = tuple(
            Route(link, self._points(number, x, top, tall, column_of))
            for number, link in enumerate(self.numbers)
        )
        width, height = left - COLUMN_GAP + MARGIN, bottom + MARGIN
        return Layout(places, routes, tuple(gutters), width, height)

    def _points(
        self,
        number: int,
        x: Sequence[float],
        top: Sequence[float],
        tall: Sequence[float],
        column_of: Sequence[int],
    ) -> tuple[tuple[float, float, int], ...]:
        """From the source's bottom through both ends of every stand-in to the target's top."""
        chain = self.chains[number]
        points = []
        for item in chain:
            rank = self.rank[item]
            column = column_of[rank]
            is_box = item < self.count
            height = self.heights[item] if is_box else tall[rank] - GAP_Y
            if item != chain[0]:
                points.append((round(x[item], 1), top[rank], column))
            if item != chain[-1]:
                points.append((round(x[item], 1), top[rank] + height, column))
        return tuple(reversed(points)) if self.flipped[number] else tuple(points)


def _spread(rows: Sequence[Sequence[int]], widths: Sequence[float]) -> float:
    return max(sum(widths[item] for item in row) + GAP_X * (len(row) - 1) for row in rows)


def _cut(tall: Sequence[float], crossing: Sequence[int], columns: int) -> list[int]:
    """The first rank of each column: near equal heights, where few links cross."""
    unit = sum(tall) / len(tall)
    reached = [0.0, *accumulate(tall)]
    cuts = [0]
    for column in range(1, columns):
        # half a rank more: of unequal columns the first is the longer
        wanted = reached[-1] * column / columns + unit * 0.49
        near = range(cuts[-1] + 1, len(tall))
        if near:
            cuts.append(min(near, key=lambda r: abs(reached[r] - wanted) / unit + crossing[r]))
    return cuts
